"""Synthetic questions over documents about an invented world.

Every example holds a few short texts (chunks) in natural English, a question about facts that
the texts state, and the answer. All names, codes, years and quantities are invented, so a model
can only answer from the texts. The small model that ships with the package was trained on this
language, and ablations use it to tell what a way of reading costs in answers.

Names and values are divided by a hash into a training and a held-out split: an example of one
split never contains a name or value of the other.

    example = make_example(seed=7, category="two_fact", chunks=8)
    example.chunks, example.question, example.answer, example.fact_chunks
"""

import hashlib
import random
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

Category = Literal["one_fact", "two_fact", "first_sentence", "last_sentence", "no_answer"]
Split = Literal["train", "held_out"]

CATEGORIES: tuple[Category, ...] = (
    "one_fact",
    "two_fact",
    "first_sentence",
    "last_sentence",
    "no_answer",
)
NO_ANSWER = "Not in the documents."

# --------------------------------------------------------------------------------------------
# Names and values
# --------------------------------------------------------------------------------------------


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


def _choices(text: str) -> tuple[str, ...]:
    return tuple(text.split("|"))


NAME_STARTS = _words(
    "Bel Bor Brin Cal Cor Dal Dor Dun Fal Fen Gal Gar Gol Hal Har Hol Jas Jor Kal Kel Kor Lan Lor "
    "Lum Mal Mir Mor Nal Nes Nor Ost Pel Pol Quin Ral Ros Sal Sel Sor Tal Tar Tol Tur Ul Val Ver "
    "Vin Wes Wil Yar Yor Zan Zel"
)
NAME_MIDDLES = _words(
    "ba bi da de do fi ga ka ke la le li lo ma me mi mo na ne no ra ri ro sa ta ti to va vi za"
)
NAME_ENDS = _words(
    "bek bin bran dak dar den dil dor fan gan gor hem kan kel kor lan lin lis lor mar mel mir mon "
    "mund nak nath nel nor rak ran rek ric rim ros sel sin stad sten tan tel thal tor vak van vel "
    "vik vor wen win zor"
)
CODE_LETTERS = "ABCDEFGHJKLMNPRSTVWXZ"

ORG_SUFFIXES = _words("Works Institute Company Trust Bank Press Mills Guild Foundation Group")
PRODUCT_NOUNS = _words(
    "kettle lantern pump radio plough loom stove drill camera bicycle heater scale"
)
EXHIBIT_NOUNS = _words("Chalice Map Clock Bell Mask Globe Tapestry Harp Sword Crown Shield Urn")
TRADES = _words(
    "glassblower surveyor baker carpenter botanist printer weaver nurse engineer teacher potter "
    "archivist locksmith gardener chemist translator"
)


def _held_out(value: str) -> bool:
    """Whether a name or value belongs to the held-out split (a fifth of all)."""
    return hashlib.sha256(value.encode()).digest()[0] % 5 == 0


def _draw(make: Callable[[], str], split: Split) -> str:
    """Draws values until one belongs to the split."""
    while True:
        value = make()
        if _held_out(value) == (split == "held_out"):
            return value


def _word(rng: random.Random, split: Split) -> str:
    def make() -> str:
        middle = rng.choice(NAME_MIDDLES) if rng.random() < 0.35 else ""
        return rng.choice(NAME_STARTS) + middle + rng.choice(NAME_ENDS)

    return _draw(make, split)


def _digits(rng: random.Random, low: int, high: int, split: Split) -> str:
    return _draw(lambda: str(rng.randint(low, high)), split)


def _code(rng: random.Random, split: Split) -> str:
    def make() -> str:
        letters = rng.choice(CODE_LETTERS) + rng.choice(CODE_LETTERS)
        return f"{letters}-{rng.randint(100, 9999)}"

    return _draw(make, split)


def make_value(kind: str, rng: random.Random, split: Split) -> str:
    """A new name or value of a kind, e.g. ``make_value("town", rng, "held_out")``."""
    match kind:
        case "person":
            return f"{_word(rng, split)} {_word(rng, split)}"
        case "org":
            return f"{_word(rng, split)} {rng.choice(ORG_SUFFIXES)}"
        case "product":
            return f"{_word(rng, split)} {rng.choice(PRODUCT_NOUNS)}"
        case "exhibit":
            return f"{_word(rng, split)} {rng.choice(EXHIBIT_NOUNS)}"
        case "town" | "ship" | "river":
            return _word(rng, split)
        case "hill":
            return f"Mount {_word(rng, split)}"
        case "trade":
            return rng.choice(TRADES)
        case "code":
            return _code(rng, split)
        case "birth_year":
            return _digits(rng, 1930, 2004, split)
        case "year":
            return _digits(rng, 1600, 2020, split)
        case "people":
            return _digits(rng, 1200, 98000, split)
        case "price":
            return _digits(rng, 12, 980, split) + " crowns"
        case "weight":
            return _digits(rng, 3, 940, split) + " kilograms"
        case "metres":
            return _digits(rng, 14, 260, split) + " metres"
        case "kilometres":
            return _digits(rng, 21, 890, split) + " kilometres"
    raise ValueError(f"unknown kind of value: {kind!r}")


# --------------------------------------------------------------------------------------------
# Relations
# --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Relation:
    """What can be said of an entity: sentences with ``{s}`` and ``{v}``, questions with ``{s}``."""

    name: str
    subject: str
    value: str
    key: str
    statements: tuple[str, ...]
    questions: tuple[str, ...]

    @property
    def subject_first(self) -> tuple[str, ...]:
        """The statements that name the subject before the value."""
        return tuple(s for s in self.statements if s.index("{s}") < s.index("{v}"))


@dataclass(frozen=True)
class Chain:
    """Two relations in a row; the answer ``{b} … {v}`` spells the middle entity and the end."""

    first: str
    second: str
    questions: tuple[str, ...]
    answer: str


def _relation(
    name: str, subject: str, value: str, key: str, statements: str, questions: str
) -> Relation:
    return Relation(name, subject, value, key, _lines(statements), _lines(questions))


def _lines(text: str) -> tuple[str, ...]:
    return tuple(line.strip() for line in text.strip().splitlines())


RELATIONS: tuple[Relation, ...] = (
    _relation("town_river", "town", "river", "river", """
        {s} lies on the river {v}.
        The town of {s} was built on the banks of the river {v}.
        The river {v} runs straight through the middle of {s}.
        Boats reach {s} by the river {v}, which is slow and wide here.
        Visitors to {s} often walk along the river {v} in the evening.
        """, """
        On which river does {s} lie?
        Which river runs through {s}?
        What is the name of the river at {s}?
        Which river is the town of {s} on?
        """),
    _relation("town_mayor", "town", "person", "mayor", """
        The mayor of {s} is {v}.
        {v} was elected mayor of {s} last spring.
        In {s} the office of mayor is held by {v}.
        The town council of {s} is led by its mayor, {v}.
        {s} has been governed for six years by mayor {v}.
        """, """
        Who is the mayor of {s}?
        What is the name of the mayor of {s}?
        Who holds the office of mayor in {s}?
        """),
    _relation("town_founded", "town", "year", "founded", """
        {s} was founded in {v}.
        The town of {s} received its charter in {v}.
        The oldest house in {s} stood here when the town was founded in {v}.
        Settlers came to the valley and founded {s} in {v}.
        The records of {s} begin with its foundation in {v}.
        """, """
        When was {s} founded?
        In which year was the town of {s} founded?
        What is the year of foundation of {s}?
        """),
    _relation("town_people", "town", "people", "population", """
        {s} has {v} inhabitants.
        At the last count {v} people lived in {s}.
        The population of {s} is {v}.
        About {s} the register says that {v} people live there.
        With {v} inhabitants, {s} is neither small nor large.
        """, """
        How many people live in {s}?
        What is the population of {s}?
        How many inhabitants does {s} have?
        """),
    _relation("org_town", "org", "town", "town", """
        {s} has its head office in {v}.
        {s} is based in {v}.
        The main building of {s} stands in {v}.
        Letters to {s} should be sent to its office in {v}.
        For many years {s} has worked from a brick house in {v}.
        """, """
        In which town is {s} based?
        Where is the head office of {s}?
        Where is {s} based?
        In which town does {s} have its office?
        """),
    _relation("org_director", "org", "person", "director", """
        {s} is directed by {v}.
        The director of {s} is {v}.
        {v} has been director of {s} since the summer.
        The board appointed {v} as director of {s}.
        Questions about {s} are answered by its director, {v}.
        """, """
        Who is the director of {s}?
        Who directs {s}?
        What is the name of the director of {s}?
        """),
    _relation("org_founded", "org", "year", "founded", """
        {s} was founded in {v}.
        {s} opened its doors in {v}.
        The history of {s} goes back to {v}, when it was founded.
        Since its foundation in {v}, {s} has grown slowly.
        Two brothers founded {s} in {v}.
        """, """
        When was {s} founded?
        In which year was {s} founded?
        In what year did {s} open its doors?
        """),
    _relation("org_code", "org", "code", "register number", """
        {s} is entered in the register under number {v}.
        The register number of {s} is {v}.
        In the trade register {s} has the number {v}.
        Please quote register number {v} in letters to {s}.
        {s} carries the register number {v}.
        """, """
        What is the register number of {s}?
        Under which number is {s} registered?
        Which register number does {s} have?
        """),
    _relation("person_org", "person", "org", "employer", """
        {s} works for {v}.
        {s} is employed at {v}.
        Since the autumn {s} has had a post at {v}.
        {v} hired {s} after a short interview.
        Most people know {s} from the front desk of {v}.
        """, """
        Who employs {s}?
        For whom does {s} work?
        Where does {s} work?
        What is the employer of {s}?
        """),
    _relation("person_born", "person", "town", "birthplace", """
        {s} was born in {v}.
        {s} comes from {v}.
        The birthplace of {s} is {v}.
        {s} was born in a small house in {v}.
        Born in {v}, {s} still speaks with the accent of the place.
        """, """
        Where was {s} born?
        In which town was {s} born?
        What is the birthplace of {s}?
        """),
    _relation("person_year", "person", "birth_year", "year of birth", """
        {s} was born in the year {v}.
        The year of birth of {s} is {v}.
        According to the parish book, {s} was born in the year {v}.
        The file of {s} gives {v} as the year of birth.
        """, """
        In which year was {s} born?
        What is the year of birth of {s}?
        When was {s} born?
        """),
    _relation("person_trade", "person", "trade", "trade", """
        {s} is a {v} by trade.
        {s} trained for three years as a {v}.
        By profession {s} is a {v}.
        {s} earns a living as a {v}.
        """, """
        What is the trade of {s}?
        What is the profession of {s}?
        What does {s} do for a living?
        """),
    _relation("person_code", "person", "code", "badge", """
        {s} carries badge {v}.
        The badge number of {s} is {v}.
        Badge {v} was issued to {s}.
        At the gate {s} shows badge {v}.
        """, """
        What is the badge number of {s}?
        Which badge does {s} carry?
        Which badge was issued to {s}?
        """),
    _relation("product_maker", "product", "org", "maker", """
        The {s} is made by {v}.
        {v} makes the {s}.
        The {s} is a product of {v}.
        The maker of the {s} is {v}.
        Every {s} leaves the workshop of {v} with a seal.
        """, """
        Who makes the {s}?
        Which company makes the {s}?
        Who is the maker of the {s}?
        """),
    _relation("product_code", "product", "code", "article number", """
        The {s} is listed under article number {v}.
        The article number of the {s} is {v}.
        To order the {s}, give article number {v}.
        In the catalogue the {s} has article number {v}.
        """, """
        What is the article number of the {s}?
        Under which article number is the {s} listed?
        Which article number does the {s} have?
        """),
    _relation("product_price", "product", "price", "price", """
        The {s} costs {v}.
        The price of the {s} is {v}.
        In the shop the {s} is sold for {v}.
        A customer pays {v} for the {s}.
        """, """
        How much does the {s} cost?
        What is the price of the {s}?
        For how much is the {s} sold?
        """),
    _relation("product_weight", "product", "weight", "weight", """
        The {s} weighs {v}.
        The weight of the {s} is {v}.
        With its crate the {s} comes to a weight of {v}.
        Two people should lift the {s}, since it weighs {v}.
        """, """
        How much does the {s} weigh?
        What is the weight of the {s}?
        How heavy is the {s}?
        """),
    _relation("ship_captain", "ship", "person", "captain", """
        The captain of the ship {s} is {v}.
        The ship {s} sails under captain {v}.
        {v} took command of the ship {s} in the spring.
        Captain {v} has been master of the ship {s} for years.
        """, """
        Who is the captain of the ship {s}?
        Who commands the ship {s}?
        Under which captain does the ship {s} sail?
        """),
    _relation("ship_port", "ship", "town", "home port", """
        The home port of the ship {s} is {v}.
        The ship {s} is at home in the port of {v}.
        Between voyages the ship {s} lies in her home port, {v}.
        The ship {s} is registered in {v}, her home port.
        """, """
        What is the home port of the ship {s}?
        Which town is the home port of the ship {s}?
        Where is the ship {s} at home?
        """),
    _relation("ship_length", "ship", "metres", "length", """
        The ship {s} is {v} long.
        The length of the ship {s} is {v}.
        From bow to stern the ship {s} measures {v}.
        The yard gives the length of the ship {s} as {v}.
        """, """
        How long is the ship {s}?
        What is the length of the ship {s}?
        What does the ship {s} measure from bow to stern?
        """),
    _relation("ship_year", "ship", "year", "launched", """
        The ship {s} was launched in {v}.
        The yard launched the ship {s} in {v}.
        In {v} the ship {s} first touched the water.
        The ship {s} has been at sea since she was launched in {v}.
        """, """
        When was the ship {s} launched?
        In which year was the ship {s} launched?
        In what year did the ship {s} first touch the water?
        """),
    _relation("river_source", "river", "hill", "source", """
        The river {s} has its source on {v}.
        The river {s} rises on {v}.
        High on {v} lies the source of the river {s}.
        The springs of the river {s} are found on {v}.
        """, """
        Where does the river {s} rise?
        Where is the source of the river {s}?
        On which mountain does the river {s} have its source?
        """),
    _relation("river_length", "river", "kilometres", "length", """
        The river {s} is {v} long.
        The length of the river {s} is {v}.
        From its source to the sea the river {s} runs for {v}.
        After {v} the river {s} reaches the sea.
        """, """
        How long is the river {s}?
        What is the length of the river {s}?
        For how many kilometres does the river {s} run?
        """),
    _relation("exhibit_donor", "exhibit", "person", "donor", """
        The {s} was given to the museum by {v}.
        The donor of the {s} is {v}.
        The museum owes the {s} to {v}, who donated it.
        {v} donated the {s} to the collection.
        """, """
        Who donated the {s}?
        Who is the donor of the {s}?
        Who gave the {s} to the museum?
        """),
    _relation("exhibit_year", "exhibit", "year", "made in", """
        The {s} was made in {v}.
        The {s} dates from {v}.
        A mark on the base shows that the {s} was made in {v}.
        Experts date the {s} to {v}.
        """, """
        When was the {s} made?
        In which year was the {s} made?
        From which year does the {s} date?
        """),
    _relation("exhibit_code", "exhibit", "code", "inventory number", """
        The {s} has inventory number {v}.
        The inventory number of the {s} is {v}.
        In the inventory the {s} is number {v}.
        The label of the {s} shows inventory number {v}.
        """, """
        What is the inventory number of the {s}?
        Which inventory number does the {s} have?
        Under which inventory number is the {s} kept?
        """),
)  # fmt: skip

CHAINS: tuple[Chain, ...] = (
    Chain("product_maker", "org_town", _lines("""
        Which company makes the {s}, and in which town is it based?
        Who makes the {s}, and where is the maker based?
        """), "{b} in {v}"),
    Chain("product_maker", "org_director", _lines("""
        Which company makes the {s}, and who is its director?
        Who makes the {s}, and who directs the maker?
        """), "{b} under {v}"),
    Chain("person_org", "org_town", _lines("""
        For whom does {s} work, and in which town is the employer based?
        Who employs {s}, and where is the employer based?
        """), "{b} in {v}"),
    Chain("ship_captain", "person_born", _lines("""
        Who is the captain of the ship {s}, and where was the captain born?
        Who commands the ship {s}, and in which town was the captain born?
        """), "{b} from {v}"),
    Chain("ship_port", "town_river", _lines("""
        What is the home port of the ship {s}, and on which river does it lie?
        Where is the ship {s} at home, and which river runs through the place?
        """), "{b} on the {v}"),
    Chain("org_town", "town_river", _lines("""
        In which town is {s} based, and on which river does the town lie?
        Where is {s} based, and which river runs through the town?
        """), "{b} on the {v}"),
    Chain("person_born", "town_mayor", _lines("""
        Where was {s} born, and who is the mayor of that town?
        In which town was {s} born, and who is mayor there?
        """), "{b} under {v}"),
    Chain("org_director", "person_born", _lines("""
        Who is the director of {s}, and where was the director born?
        Who directs {s}, and in which town was the director born?
        """), "{b} from {v}"),
    Chain("exhibit_donor", "person_born", _lines("""
        Who donated the {s}, and where was the donor born?
        Who gave the {s} to the museum, and in which town was the donor born?
        """), "{b} from {v}"),
    Chain("town_river", "river_source", _lines("""
        On which river does {s} lie, and where does the river rise?
        Which river runs through {s}, and where is its source?
        """), "{b} from {v}"),
)  # fmt: skip

_PLAIN_WORDS = {"Mount", *ORG_SUFFIXES, *EXHIBIT_NOUNS}
_BY_NAME = {relation.name: relation for relation in RELATIONS}
_BY_SUBJECT: dict[str, tuple[Relation, ...]] = {
    kind: tuple(relation for relation in RELATIONS if relation.subject == kind)
    for kind in dict.fromkeys(relation.subject for relation in RELATIONS)
}
KINDS = tuple(_BY_SUBJECT)

# --------------------------------------------------------------------------------------------
# Prose around the facts
# --------------------------------------------------------------------------------------------

TITLES: dict[str, tuple[str, ...]] = {
    "town": ("Visiting {s}", "A day in {s}", "Town guide: {s}", "{s}", "Travel notes on {s}"),
    "org": ("{s}", "Press note: {s}", "Staff handbook of {s}", "About {s}", "Annual report of {s}"),
    "person": ("{s}", "Staff page: {s}", "People: {s}", "About {s}", "A portrait of {s}"),
    "product": ("{s}", "Data sheet: {s}", "Care of the {s}", "The {s}", "Notes on the {s}"),
    "ship": ("The ship {s}", "Log of the ship {s}", "Harbour notes: {s}", "{s}"),
    "river": ("The river {s}", "Along the {s}", "Rivers: {s}", "{s}"),
    "exhibit": ("The {s}", "Museum label: {s}", "{s}", "Collection notes: {s}"),
}
SECTIONS = _choices(
    "Overview|History|Background|Details|Practical notes|Contact|General|Summary|Notes|Facts"
)

_SLOTS: dict[str, tuple[str, ...]] = {
    key: _choices(text)
    for key, text in {
        "season": "spring|summer|autumn|winter",
        "day": "Monday|Tuesday|Wednesday|Thursday|Friday|Saturday|Sunday",
        "month": "January|March|April|May|June|July|August|September|October|November",
        "time": "in the morning|at noon|in the afternoon|in the evening|after dark|before lunch|"
        "at dawn",
        "often": "often|rarely|sometimes|usually|always|almost never|now and then",
        "adj": "small|large|old|new|quiet|busy|bright|dark|narrow|wide|pleasant|plain|famous|"
        "simple|"
        "clean|dusty|warm|cold|solid|modest|handsome|crooked|green|grey|red|white|blue",
        "place": "market|station|library|square|garden|bridge|church|school|harbour|theatre|"
        "hospital|"
        "mill|tower|park|inn|bakery|post office|town hall|old wall|covered well",
        "thing": "door|window|table|lamp|roof|floor|stair|wall|gate|bench|sign|shelf|carpet|"
        "fountain|"
        "chimney|balcony|cupboard|fence|staircase|letter box",
        "group": "visitors|children|students|farmers|workers|members|guests|neighbours|sailors|"
        "travellers|readers|painters|musicians|traders|clerks",
        "verb": "meet|rest|wait|talk|gather|eat|sing|read|trade|work|play|sit",
        "goods": "bread|cheese|wool|fish|apples|paper|timber|salt|honey|cloth|tea|leather|rope|"
        "glass|"
        "flour|candles|soap|pottery",
        "weather": "rain|snow|wind|fog|frost|sunshine|heat|thunder|mist|drizzle",
        "part": "handle|lid|screw|spring|cable|switch|valve|filter|wheel|hinge|bolt|frame|chain|"
        "blade",
        "meeting": "meeting|session|discussion|vote|report|hearing|lunch|visit|inspection|lecture",
        "doc": "form|letter|report|receipt|list|plan|map|note|contract|invoice|permit|ticket",
        "deck": "deck|cabin|galley|mast|hold|engine room|bridge|cargo|anchor|sail",
        "animal": "herons|ducks|otters|swans|trout|geese|foxes|deer|owls|bees|frogs|swallows",
        "tree": "willows|oaks|birches|pines|elms|poplars|reeds|ferns|meadows|alders",
        "craft": "silver|bronze|oak|copper|clay|glass|linen|iron|marble|ivory|leather|gold",
        "few": "two|three|four|five|six|seven|eight|nine|ten|twelve",
    }.items()
}

_COMMON = _lines("""
    The {place} opens {time} and closes {time}.
    On {day} the {place} is {often} closed.
    There is a {adj} {place} next to the {place}.
    The {adj} {thing} was painted in {month}.
    {few} {group} came {time} to see the {adj} {thing}.
    Nobody remembers who built the {adj} {thing}.
    In {season} the {group} {often} {verb} near the {place}.
    The {weather} of last {season} damaged the {thing} and the {thing}.
    A {adj} {thing} leads to the {adj} {place}.
    The {group} {often} {verb} {time}.
    It is {often} {adj} here in {season}.
    A short walk leads from the {place} to the {place}.
    Every {adj} {thing} in this part of the country looks like that.
    Some of the {group} bring {goods}, others bring {goods}.
    Further notes on this subject can be found in the {place}.
    The next {meeting} is planned for {month}.
    All of this was written down {time}, as usual.
    People say that the {weather} in {month} is the worst of the year.
    Whoever comes {time} will find the {place} {adj} and {adj}.
    The {adj} {place} was closed for {few} weeks in {season}.
    There are {few} {adj} benches between the {place} and the {place}.
    It took {few} {group} a whole day to move the {adj} {thing}.
    A {doc} on the {thing} explains the rules, but few {group} read it.
    Since {month} the {place} has been {adj}, and the {group} are pleased.
    Between {month} and {month} the price of {goods} {often} rises.
    The {meeting} of last {day} was short, because the {group} were tired.
    Only the {adj} {thing} and the {adj} {thing} are left of the first building.
    The {group} keep their {goods} in the {place}, where it is {adj}.
    For the {meeting} one needs a {doc} and a little patience.
    The {tree} behind the {place} are {few} years old.
    """)

_FILLER: dict[str, tuple[str, ...]] = {
    "town": _lines("""
        {s} is {often} {adj} in {season}.
        The {place} of {s} is {adj} and {adj}.
        On {day} there is a market where {goods} and {goods} are sold.
        The streets are {adj}, and the houses have {adj} roofs.
        From the {place} one sees the {adj} hills behind the town.
        Trains leave every {few} hours from the {adj} station.
        The {adj} inn by the {place} serves {goods} and {goods}.
        {group} who stay in {s} overnight should book in {month}.
        The festival in {month} brings {group} and {group} into the town.
        A tram connects the {place} with the {place}.
        """),
    "org": _lines("""
        {s} employs mostly {group} from the region.
        The office is closed on {day} because of a {meeting}.
        New staff receive a {doc} and a {doc} on the first {day}.
        Every {doc} must be signed {time} and filed in the {adj} cupboard.
        The canteen offers {goods} and {goods} {time}.
        The board of {s} holds a {meeting} every {month}.
        Requests without a {doc} are {often} refused.
        The {adj} building has {few} floors and a {adj} {thing}.
        A {doc} about the {meeting} was sent to all members.
        Last {season} the stock of {goods} was sold at a loss.
        """),
    "person": _lines("""
        {s} {often} takes the early train.
        Colleagues describe the work as {adj} and {adj}.
        In {season} there is a course for {group} in the {place}.
        {s} likes {goods} and {adj} weather.
        The {meeting} on {day} was {adj} and rather long.
        A {doc} with all dates is kept in the {place}.
        {s} gave a {meeting} for {group} in {month}.
        The garden behind the house is full of {tree}.
        Friends {often} {verb} there {time}.
        The desk stands beside a {adj} {thing}.
        """),
    "product": _lines("""
        Clean the {part} with a {adj} cloth every {few} weeks.
        The {part} and the {part} can be replaced without tools.
        Keep the {s} away from {weather} and {weather}.
        The {adj} {part} is made of {craft}.
        Do not open the {part} while the machine is {adj}.
        A {doc} is packed with every delivery.
        The {s} was tested for {few} months by {group}.
        Spare parts such as the {part} are sold by the {place}.
        The colour is {adj} or {adj}, as the customer likes.
        If the {part} is loose, turn the {part} {few} times.
        """),
    "ship": _lines("""
        The crew painted the {deck} in {month}.
        A load of {goods} and {goods} was stored in the hold.
        The {weather} kept the ship in harbour for {few} days.
        The {deck} is {adj}, and the {deck} is {adj}.
        The ship {s} was seen off the coast {time}.
        {few} {group} came aboard on {day}.
        A {adj} {part} in the engine room was replaced.
        The cook served {goods} with {goods} {time}.
        The voyage took {few} days because of the {weather}.
        The watch changes every {few} hours.
        """),
    "river": _lines("""
        The banks are lined with {tree} and {tree}.
        In {season} the water is {adj} and {adj}.
        {animal} and {animal} live along the {s}.
        After {weather} the path along the water is closed.
        A {adj} bridge crosses the water near the {place}.
        The {s} is {often} used to move {goods}.
        {group} {often} {verb} on the {adj} banks.
        The ferry runs every {few} hours from {month} on.
        Above the {mill} the valley becomes {adj}.
        Fishing is allowed on {day} with a {doc}.
        """),
    "exhibit": _lines("""
        The surface is of {craft} with traces of {craft}.
        The {s} is shown in a {adj} case near the {thing}.
        Restorers cleaned the {adj} {part} in {month}.
        {group} {often} stop in front of it {time}.
        The pattern shows {animal} between {tree}.
        A {adj} crack runs across the lower part.
        It was kept in a {place} for {few} decades.
        The case is opened only for a {meeting}.
        Photographs are allowed {time} without flash.
        The {s} was lent to the {place} last {season}.
        """),
}
_SLOTS["mill"] = ("mill", "weir", "old bridge", "last farm")

_LIST_INTROS = _lines("""
    The register was last checked in {month}.
    This list is kept in the {place}.
    Entries are in no special order.
    The following entries were copied from the {adj} {doc}.
    """)


def _fill(template: str, rng: random.Random, subject: str = "") -> str:
    """Fills the slots of a sentence at random and capitalises its first letter."""
    first, *parts = template.split("{")
    out = [first]
    for part in parts:
        slot, rest = part.split("}", 1)
        out += (subject if slot == "s" else rng.choice(_SLOTS[slot]), rest)
    return _sentence("".join(out))


def _sentence(text: str) -> str:
    """Capitalises the first letter, and puts ``an`` for ``a`` before a vowel."""
    text = re.sub(r"\b([Aa]) (?=[aeiou])", r"\1n ", text)
    return text[0].upper() + text[1:]


def fact_sentence(
    relation: Relation, subject: str, value: str, rng: random.Random, value_first: bool = False
) -> str:
    """One of the sentences that state a fact; ``value_first`` admits all word orders."""
    templates = relation.statements if value_first else relation.subject_first
    return _sentence(rng.choice(templates).format(s=subject, v=value))


def filler_sentence(kind: str, subject: str, rng: random.Random) -> str:
    """A sentence without a fact; some of them mention the subject of the text."""
    templates = _COMMON if rng.random() < 0.4 else _FILLER[kind]
    return _fill(rng.choice(templates), rng, subject)


def heading(kind: str, subject: str, rng: random.Random) -> str:
    """A heading line such as ``# Visiting Belmor`` or ``Belmor > History``."""
    title = rng.choice(TITLES[kind]).format(s=subject)
    match rng.randrange(4):
        case 0:
            return title
        case 1:
            return f"{title} > {rng.choice(SECTIONS)}"
        case 2:
            return f"## {rng.choice(SECTIONS)}: {title}"
    return f"# {title}"


# --------------------------------------------------------------------------------------------
# Contexts, facts and questions
# --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Fact:
    """A fact that a chunk states, and where: in its first or last sentence, or in between."""

    relation: Relation
    subject: str
    value: str
    chunk: int
    first: bool
    last: bool


@dataclass(frozen=True)
class Question:
    """A question, its answer and the chunks that hold the facts (none for ``no_answer``)."""

    category: Category
    text: str
    answer: str
    fact_chunks: list[int]


@dataclass(frozen=True)
class Example:
    """Chunks in prompt order with one question about them."""

    chunks: list[str]
    question: str
    answer: str
    category: Category
    fact_chunks: list[int]


@dataclass
class _Plan:
    """What one chunk is about while a context is being laid out."""

    kind: str
    subject: str
    relations: list[Relation]
    style: Literal["prose", "fields", "lines"]


@dataclass
class Context:
    """The chunks of one example and every fact that they state."""

    chunks: list[str]
    facts: list[Fact]
    split: Split
    names: set[str] = field(repr=False)

    def distractors(self, fact: Fact) -> int:
        """How many other entities have the same relation stated."""
        return sum(f.relation is fact.relation and f.subject != fact.subject for f in self.facts)

    def one_fact(self, rng: random.Random, fact: Fact) -> Question:
        """A question about one stated fact."""
        text = rng.choice(fact.relation.questions).format(s=fact.subject)
        return Question("one_fact", text, fact.value, [fact.chunk])

    def chains(self) -> Iterator[tuple[Chain, Fact, Fact]]:
        """Pairs of facts from two chunks of which the first leads to the second."""
        known = {(fact.subject, fact.relation.name): fact for fact in self.facts}
        for chain in CHAINS:
            for first in self.facts:
                second = known.get((first.value, chain.second))
                if first.relation.name == chain.first and second and second.chunk != first.chunk:
                    yield chain, first, second

    def two_fact(self, rng: random.Random, chain: Chain, first: Fact, second: Fact) -> Question:
        """A question whose answer joins two facts through the entity that they share."""
        text = rng.choice(chain.questions).format(s=first.subject)
        answer = chain.answer.format(b=first.value, v=second.value)
        return Question("two_fact", text, answer, [first.chunk, second.chunk])

    def no_answer(self, rng: random.Random) -> Question:
        """A question about an entity that is absent, or about a relation that is not stated."""
        known = {(fact.subject, fact.relation.name) for fact in self.facts}
        missing = [
            (subject, relation)
            for subject, kind in dict.fromkeys((f.subject, f.relation.subject) for f in self.facts)
            for relation in _BY_SUBJECT[kind]
            if (subject, relation.name) not in known
        ]
        if missing and rng.random() < 0.5:
            subject, relation = rng.choice(missing)
        else:
            relation = rng.choice(self.facts).relation
            subject = fresh_value(relation.subject, rng, self.split, self.names)
        text = rng.choice(relation.questions).format(s=subject)
        return Question("no_answer", text, NO_ANSWER, [])


def fresh_value(kind: str, rng: random.Random, split: Split, names: set[str]) -> str:
    """A value of a kind that shares no invented word with an earlier one of the context."""
    for _ in range(1000):
        value = make_value(kind, rng, split)
        words = {word for word in value.split() if word[0].isupper()} - _PLAIN_WORDS
        if not words & names:
            names |= words
            return value
    raise ValueError(f"too many names of kind {kind!r} in one context")


def build_context(
    rng: random.Random,
    chunks: int,
    words: tuple[int, int] = (30, 110),
    split: Split = "train",
    value_first: bool = False,
) -> Context:
    """Lays out and writes a context.

    Chunks are about entities of a few kinds, so that the same relations are stated of several
    entities; values often are entities that another chunk is about, so that facts chain.

    Args:
        rng: source of all choices.
        chunks: number of chunks, 1 or more.
        words: shortest and longest chunk in words (a heading and facts may exceed the shortest).
        split: which names and values to use.
        value_first: also state facts with the value in front of its subject ("Ann Lee was
            elected mayor of Belmor"). That is harder for a causal model, which doesn't know yet
            whose value it reads.
    """
    names: set[str] = set()
    chain = rng.choice(CHAINS)
    pair = [_BY_NAME[chain.first].subject, _BY_NAME[chain.second].subject]
    kinds = pair + rng.sample(KINDS, rng.randint(0, 1 + chunks // 6))
    preference = {kind: _shuffled(_BY_SUBJECT[kind], rng) for kind in KINDS}
    for name in (chain.first, chain.second):
        preferred = preference[_BY_NAME[name].subject]
        preferred.remove(_BY_NAME[name])
        preferred.insert(0, _BY_NAME[name])
    plans: list[list[_Plan]] = []
    lengths = [rng.randint(*words) for _ in range(chunks)]
    for length in lengths:
        style: Literal["prose", "fields", "lines"] = "prose"
        if rng.random() < 0.15:
            style = rng.choice(("fields", "lines"))
        kind = rng.choice(kinds)
        wanted = 1 + int(length / 40 + rng.random() * 2)
        if style == "fields":
            wanted = max(4, length // 5)
        sections: list[_Plan] = []
        while wanted > 0:
            count = min(wanted, rng.randint(1, 3))
            relations = [r for r in preference[kind] if rng.random() < 0.65][:count]
            relations = relations or preference[kind][:1]
            subject = fresh_value(kind, rng, split, names)
            sections.append(_Plan(kind, subject, relations, style))
            wanted -= len(relations)
            if style == "prose":
                kind = rng.choice(kinds)
        plans.append(sections)
    facts: list[Fact] = []
    texts: list[str] = []
    for index, (sections, length) in enumerate(zip(plans, lengths, strict=True)):
        others = [p for i, other in enumerate(plans) if i != index for p in other]
        values: list[tuple[_Plan, Relation, str]] = []
        for plan in sections:
            for relation in plan.relations:
                linked = [p.subject for p in others if p.kind == relation.value]
                if linked and rng.random() < 0.6:
                    value = rng.choice(linked)
                elif relation.value == "trade":
                    value = make_value("trade", rng, split)
                else:
                    value = fresh_value(relation.value, rng, split, names)
                values.append((plan, relation, value))
        text, stated = _write(index, values, length, rng, value_first)
        texts.append(text)
        facts += stated
    return Context(texts, facts, split, names)


def _shuffled(items: Sequence[Relation], rng: random.Random) -> list[Relation]:
    return rng.sample(items, len(items))


def _write(
    index: int,
    values: list[tuple[_Plan, Relation, str]],
    length: int,
    rng: random.Random,
    value_first: bool,
) -> tuple[str, list[Fact]]:
    """Writes one chunk: heading, fact sentences, and filler up to the length in words."""
    main = values[0][0]
    if main.style != "prose":
        return _write_list(index, values, rng)
    sentences: list[tuple[str, Fact | None]] = []
    size = 0
    for plan, relation, value in values:
        text = fact_sentence(relation, plan.subject, value, rng, value_first)
        sentences.append((text, Fact(relation, plan.subject, value, index, False, False)))
        size += text.count(" ") + 1
    while size < length:
        plan = rng.choice(values)[0]
        text = filler_sentence(plan.kind, plan.subject, rng)
        size += text.count(" ") + 1
        sentences.insert(rng.randint(0, len(sentences)), (text, None))
    rng.shuffle(sentences)
    head = (
        heading(main.kind, main.subject, rng) + rng.choice(("\n", "\n\n"))
        if rng.random() < 0.6
        else ""
    )
    facts = []
    for place, (_, fact) in enumerate(sentences):
        if fact is not None:
            first, last = place == 0, place == len(sentences) - 1
            facts.append(Fact(fact.relation, fact.subject, fact.value, index, first, last))
    paragraph = "\n\n" if rng.random() < 0.2 else " "
    body = sentences[0][0]
    for place, (text, _) in enumerate(sentences[1:], 1):
        body += (paragraph if place % 3 == 0 else " ") + text
    return head + body, facts


def _write_list(
    index: int, values: list[tuple[_Plan, Relation, str]], rng: random.Random
) -> tuple[str, list[Fact]]:
    """Writes a chunk as records: ``name: X; river: Y`` or one ``key: value`` a line."""
    records: dict[str, list[tuple[Relation, str]]] = {}
    for plan, relation, value in values:
        records.setdefault(plan.subject, []).append((relation, value))
    one_line = values[0][0].style == "fields"
    lines = []
    facts = []
    for number, (subject, entries) in enumerate(records.items()):
        name = rng.choice(("name", entries[0][0].subject))
        cells = [f"{name}: {subject}", *(f"{relation.key}: {value}" for relation, value in entries)]
        lines.append("; ".join(cells) if one_line else "\n".join(cells))
        for relation, value in entries:
            last = number == len(records) - 1
            facts.append(Fact(relation, subject, value, index, number == 0, last))
    head = ""
    if rng.random() < 0.5:
        kind = values[0][0].kind
        head = rng.choice(
            (f"# List of {kind} entries\n\n", _fill(rng.choice(_LIST_INTROS), rng) + "\n")
        )
    return head + ("\n" if one_line else "\n\n").join(lines), facts


def ask(context: Context, category: Category, rng: random.Random) -> Question | None:
    """A random question of a category about a context, or None if it allows none."""
    match category:
        case "no_answer":
            return context.no_answer(rng)
        case "two_fact":
            chains = list(context.chains())
            return context.two_fact(rng, *rng.choice(chains)) if chains else None
        case "first_sentence":
            facts = [fact for fact in context.facts if fact.first]
        case "last_sentence":
            facts = [fact for fact in context.facts if fact.last]
        case "one_fact":
            facts = context.facts
    return context.one_fact(rng, rng.choice(facts)) if facts else None


def make_example(
    seed: int,
    category: Category = "one_fact",
    chunks: int = 8,
    words: tuple[int, int] = (30, 110),
    split: Split = "held_out",
    value_first: bool = False,
) -> Example:
    """A reproducible example: equal arguments give an equal example.

    Args:
        seed: number of the example.
        category: what is asked. ``one_fact``: a fact anywhere; ``first_sentence`` and
            ``last_sentence``: a fact at that place of its chunk; ``two_fact``: two facts from
            two chunks, the answer spells both; ``no_answer``: the answer is ``NO_ANSWER``.
        chunks: number of chunks; ``two_fact`` needs 2.
        words: shortest and longest chunk in words.
        split: ``held_out`` for names and values that no training example contains.
        value_first: as in ``build_context``.

    Raises:
        ValueError: if no such example can be made.
    """
    if category == "two_fact" and chunks < 2:
        raise ValueError("a two_fact example needs at least 2 chunks")
    rng = random.Random(f"{seed}/{category}/{chunks}/{words}/{split}")
    for _ in range(500):
        context = build_context(rng, chunks, words, split, value_first)
        question = _ask_among_distractors(context, category, rng)
        if question is not None:
            return Example(
                context.chunks, question.text, question.answer, category, question.fact_chunks
            )
    raise ValueError(f"no {category} question found for {chunks} chunks of {words} words")


def _ask_among_distractors(
    context: Context, category: Category, rng: random.Random
) -> Question | None:
    """A question whose relations are also stated of other entities (one at least)."""
    if category == "two_fact":
        chains = [c for c in context.chains() if min(map(context.distractors, c[1:])) >= 1]
        return context.two_fact(rng, *rng.choice(chains)) if chains else None
    if category == "no_answer":
        return context.no_answer(rng)
    facts = [fact for fact in context.facts if context.distractors(fact) >= 1]
    if category == "first_sentence":
        facts = [fact for fact in facts if fact.first]
    elif category == "last_sentence":
        facts = [fact for fact in facts if fact.last]
    if not facts:
        return None
    # By relation first, so that no kind of question dominates.
    relation = rng.choice(sorted({fact.relation.name for fact in facts}))
    question = context.one_fact(rng, rng.choice([f for f in facts if f.relation.name == relation]))
    return Question(category, question.text, question.answer, question.fact_chunks)
