"""Sentences: those that state facts, those around them, and headings."""

from __future__ import annotations

import random
import re

from hypic_rag.evaluation.facts.lists import choices, lines
from hypic_rag.evaluation.facts.relations import Relation

__all__ = ["TITLES", "fact_sentence", "filler_sentence", "heading", "list_intro"]

TITLES: dict[str, tuple[str, ...]] = {
    "town": ("Visiting {s}", "A day in {s}", "Town guide: {s}", "{s}", "Travel notes on {s}"),
    "org": ("{s}", "Press note: {s}", "Staff handbook of {s}", "About {s}", "Annual report of {s}"),
    "person": ("{s}", "Staff page: {s}", "People: {s}", "About {s}", "A portrait of {s}"),
    "product": ("{s}", "Data sheet: {s}", "Care of the {s}", "The {s}", "Notes on the {s}"),
    "ship": ("The ship {s}", "Log of the ship {s}", "Harbour notes: {s}", "{s}"),
    "river": ("The river {s}", "Along the {s}", "Rivers: {s}", "{s}"),
    "exhibit": ("The {s}", "Museum label: {s}", "{s}", "Collection notes: {s}"),
}
SECTIONS = choices(
    "Overview|History|Background|Details|Practical notes|Contact|General|Summary|Notes|Facts"
)

_SLOTS: dict[str, tuple[str, ...]] = {
    key: choices(text)
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

_COMMON = lines("""
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
    "town": lines("""
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
    "org": lines("""
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
    "person": lines("""
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
    "product": lines("""
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
    "ship": lines("""
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
    "river": lines("""
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
    "exhibit": lines("""
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

_LIST_INTROS = lines("""
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


def list_intro(rng: random.Random) -> str:
    """A sentence in front of a list of records."""
    return _fill(rng.choice(_LIST_INTROS), rng)
