"""What can be said and asked of entities: relations, and chains of two."""

from __future__ import annotations

from dataclasses import dataclass

from hypic_rag.evaluation.facts.lists import lines

__all__ = ["BY_NAME", "BY_SUBJECT", "CHAINS", "KINDS", "RELATIONS", "Chain", "Relation"]


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
    return Relation(name, subject, value, key, lines(statements), lines(questions))


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
    Chain("product_maker", "org_town", lines("""
        Which company makes the {s}, and in which town is it based?
        Who makes the {s}, and where is the maker based?
        """), "{b} in {v}"),
    Chain("product_maker", "org_director", lines("""
        Which company makes the {s}, and who is its director?
        Who makes the {s}, and who directs the maker?
        """), "{b} under {v}"),
    Chain("person_org", "org_town", lines("""
        For whom does {s} work, and in which town is the employer based?
        Who employs {s}, and where is the employer based?
        """), "{b} in {v}"),
    Chain("ship_captain", "person_born", lines("""
        Who is the captain of the ship {s}, and where was the captain born?
        Who commands the ship {s}, and in which town was the captain born?
        """), "{b} from {v}"),
    Chain("ship_port", "town_river", lines("""
        What is the home port of the ship {s}, and on which river does it lie?
        Where is the ship {s} at home, and which river runs through the place?
        """), "{b} on the {v}"),
    Chain("org_town", "town_river", lines("""
        In which town is {s} based, and on which river does the town lie?
        Where is {s} based, and which river runs through the town?
        """), "{b} on the {v}"),
    Chain("person_born", "town_mayor", lines("""
        Where was {s} born, and who is the mayor of that town?
        In which town was {s} born, and who is mayor there?
        """), "{b} under {v}"),
    Chain("org_director", "person_born", lines("""
        Who is the director of {s}, and where was the director born?
        Who directs {s}, and in which town was the director born?
        """), "{b} from {v}"),
    Chain("exhibit_donor", "person_born", lines("""
        Who donated the {s}, and where was the donor born?
        Who gave the {s} to the museum, and in which town was the donor born?
        """), "{b} from {v}"),
    Chain("town_river", "river_source", lines("""
        On which river does {s} lie, and where does the river rise?
        Which river runs through {s}, and where is its source?
        """), "{b} from {v}"),
)  # fmt: skip

BY_NAME = {relation.name: relation for relation in RELATIONS}
BY_SUBJECT: dict[str, tuple[Relation, ...]] = {
    kind: tuple(relation for relation in RELATIONS if relation.subject == kind)
    for kind in dict.fromkeys(relation.subject for relation in RELATIONS)
}
KINDS = tuple(BY_SUBJECT)
"""Kinds of entities that relations are stated of."""
