"""Writes the demo's documents and questions: an invented world, the same at every run.

    python -m demos.make_documents

The names occur in no text that the small model was trained on.
"""

import csv
import html
import io
import json
import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from hypic_rag.evaluation import facts

HERE = Path(__file__).parent
SEED = 11
COUNTS = {
    "river": 5,
    "town": 17,
    "org": 16,
    "person": 22,
    "product": 22,
    "ship": 22,
    "exhibit": 16,
}
# How many entities of a kind have a page of their own; the others are rows of a table.
PAGES = {"river": 5, "town": 9, "org": 8, "person": 8, "product": 7, "ship": 6, "exhibit": 6}
FORMATS = {
    "river": ("md", "md", "txt", "md", "md"),
    "town": ("md", "md", "md", "md", "html", "md", "md", "md", "md"),
    "org": ("md", "md", "html", "md", "md", "md", "txt", "md"),
    "person": ("md", "md", "txt", "md", "md", "md", "md", "md"),
    "product": ("md", "md", "md", "html", "md", "md", "md"),
    "ship": ("md", "md", "txt", "md", "md", "md"),
    "exhibit": ("md", "md", "md", "html", "md", "md"),
}
TABLES = {
    "town": ("json", "Towns without a guide of their own"),
    "org": ("json", "Further organisations"),
    "person": ("csv", "Staff list"),
    "product": ("csv", "Price list"),
    "ship": ("csv", "Harbour register"),
    "exhibit": ("json", "Museum inventory"),
}
SECTIONS = ("Overview", "Background", "Details", "Practical notes", "Notes", "General")
BY_NAME = {relation.name: relation for relation in facts.RELATIONS}


@dataclass(frozen=True)
class Entity:
    """Somebody or something, and what the documents say of it (by relation name)."""

    kind: str
    name: str
    values: dict[str, str]


@dataclass(frozen=True)
class Page:
    """A document: a title and sections of paragraphs."""

    title: str
    sections: tuple[tuple[str, tuple[str, ...]], ...]


def make_world(rng: random.Random) -> dict[str, list[Entity]]:
    """Entities whose values are, where they can, other entities of the world."""
    used: set[str] = set()
    names = {
        kind: [facts.fresh_value(kind, rng, "held_out", used) for _ in range(count)]
        for kind, count in COUNTS.items()
    }
    world: dict[str, list[Entity]] = {}
    for kind, own in names.items():
        relations = [relation for relation in facts.RELATIONS if relation.subject == kind]
        world[kind] = []
        for number, name in enumerate(own):
            values = {}
            for place, relation in enumerate(relations):
                known = names.get(relation.value)
                if known:
                    values[relation.name] = known[(number * 5 + place) % len(known)]
                elif relation.value == "trade":
                    values[relation.name] = facts.make_value("trade", rng, "held_out")
                else:
                    values[relation.name] = facts.fresh_value(relation.value, rng, "held_out", used)
            world[kind].append(Entity(kind, name, values))
    return world


def write_page(entity: Entity, rng: random.Random) -> Page:
    """A page about one entity: its facts, one to a paragraph or two, between other sentences."""
    title = rng.choice(facts.TITLES[entity.kind]).format(s=entity.name)
    stated = rng.sample(sorted(entity.values), len(entity.values))
    headings = rng.sample(SECTIONS, 3)
    sections = []
    for heading in headings[: rng.randint(1, 3)]:
        sections.append((heading, []))
    texts: list[list[list[str]]] = [[[]] for _ in sections]
    for number, name in enumerate(stated):
        sentence = facts.fact_sentence(BY_NAME[name], entity.name, entity.values[name], rng)
        section = texts[number * len(sections) // len(stated)]
        if section[-1]:
            section.append([])
        section[-1].append(sentence)
    for section in texts:
        for paragraph in section:
            for _ in range(rng.randint(3, 8)):
                sentence = facts.filler_sentence(entity.kind, entity.name, rng)
                if sentence not in paragraph:
                    paragraph.insert(rng.randint(0, len(paragraph)), sentence)
    body = tuple(
        (heading, tuple(" ".join(paragraph) for paragraph in section))
        for (heading, _), section in zip(sections, texts, strict=True)
    )
    return Page(title, body)


def as_markdown(page: Page) -> str:
    lines = [f"# {page.title}"]
    for heading, paragraphs in page.sections:
        if len(page.sections) > 1:
            lines.append(f"## {heading}")
        lines += paragraphs
    return "\n\n".join(lines) + "\n"


def as_text(page: Page) -> str:
    return "\n\n".join([page.title, *(p for _, group in page.sections for p in group)]) + "\n"


def as_html(page: Page) -> str:
    title = html.escape(page.title)
    body = [f"<h1>{title}</h1>"]
    for heading, paragraphs in page.sections:
        body.append(f"<h2>{html.escape(heading)}</h2>")
        body += (f"<p>{html.escape(paragraph)}</p>" for paragraph in paragraphs)
    head = f'<head><meta charset="utf-8"><title>{title}</title></head>'
    return "\n".join(
        ("<!DOCTYPE html>", '<html lang="en">', head, "<body>", *body, "</body>", "</html>", "")
    )


def rows(entities: Sequence[Entity]) -> list[dict[str, str]]:
    """The entities as records under the keys that the small model knows."""
    return [
        {"name": entity.name} | {BY_NAME[name].key: value for name, value in entity.values.items()}
        for entity in entities
    ]


def as_csv(entities: Sequence[Entity]) -> str:
    records = rows(entities)
    stream = io.StringIO()
    writer = csv.DictWriter(stream, records[0], lineterminator="\n")
    writer.writeheader()
    writer.writerows(records)
    return stream.getvalue()


def as_json(entities: Sequence[Entity]) -> str:
    return json.dumps(rows(entities), indent=2, ensure_ascii=False) + "\n"


def slug(title: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", title.lower()).strip("-")


def make_questions(
    world: dict[str, list[Entity]], files: dict[str, str], rng: random.Random
) -> list[dict[str, object]]:
    """Questions with answers and the files that hold them; the first ten are the demo's."""

    def one(entity: Entity, name: str) -> dict[str, object]:
        text = rng.choice(BY_NAME[name].questions).format(s=entity.name)
        return question("one_fact", text, entity.values[name], files[entity.name])

    def two(chain: facts.Chain, first: Entity) -> dict[str, object]:
        middle = first.values[chain.first]
        second = next(e for group in world.values() for e in group if e.name == middle)
        text = rng.choice(chain.questions).format(s=first.name)
        answer = chain.answer.format(b=middle, v=second.values[chain.second])
        return question("two_fact", text, answer, files[first.name], files[middle])

    def none(relation: facts.Relation, absent: str) -> dict[str, object]:
        text = rng.choice(relation.questions).format(s=absent)
        return question("no_answer", text, facts.NO_ANSWER)

    singles = [
        one(entity, rng.choice(sorted(entity.values)))
        for kind, group in world.items()
        for entity in [*group[: PAGES[kind]], *group[PAGES[kind] :][:4]]
    ]
    rng.shuffle(singles)
    tabular = [q for q in singles if str(q["document"]).rstrip("']").endswith(("csv", "json"))]
    prose = [q for q in singles if q not in tabular]
    doubles = []
    for chain in facts.CHAINS:
        for entity in rng.sample(world[BY_NAME[chain.first].subject], 2):
            if files[entity.name] != files[entity.values[chain.first]]:
                doubles.append(two(chain, entity))
    rng.shuffle(doubles)
    used = {name for group in world.values() for e in group for name in e.name.split()}
    missing = []
    for kind in ("town", "org", "product", "ship"):
        relation = rng.choice([r for r in facts.RELATIONS if r.subject == kind])
        missing.append(none(relation, facts.fresh_value(kind, rng, "held_out", used)))
    # Questions that need two documents are in the demo where retrieval finds both among five.
    demo = [
        *prose[:3],
        doubles[0],
        tabular[0],
        doubles[1],
        prose[3],
        missing[0],
        doubles[5],
        prose[4],
    ]
    rest = [q for q in (*singles, *doubles, *missing) if q not in demo]
    return demo + rest


def question(category: str, text: str, answer: str, *documents: str) -> dict[str, object]:
    return {
        "question": text,
        "answer": answer,
        "document": list(documents),
        "category": category,
    }


WRITERS: dict[str, Callable[[Page], str]] = {"md": as_markdown, "txt": as_text, "html": as_html}
TABLE_WRITERS: dict[str, Callable[[Sequence[Entity]], str]] = {"csv": as_csv, "json": as_json}


def make(seed: int = SEED) -> tuple[dict[str, str], list[dict[str, object]]]:
    """All documents (file name to text) and all questions."""
    rng = random.Random(seed)
    world = make_world(rng)
    documents: dict[str, str] = {}
    files: dict[str, str] = {}
    for kind, entities in world.items():
        pages = PAGES[kind]
        for entity, suffix in zip(entities[:pages], FORMATS[kind], strict=True):
            page = write_page(entity, rng)
            name = f"{kind}-{slug(page.title)}.{suffix}"
            documents[name] = WRITERS[suffix](page)
            files[entity.name] = name
        if entities[pages:]:
            suffix, title = TABLES[kind]
            name = f"{slug(title)}.{suffix}"
            documents[name] = TABLE_WRITERS[suffix](entities[pages:])
            files |= {entity.name: name for entity in entities[pages:]}
    return documents, make_questions(world, files, rng)


def main() -> None:
    documents, questions = make()
    folder = HERE / "documents"
    folder.mkdir(exist_ok=True)
    for old in folder.iterdir():
        if old.name not in documents:
            old.unlink()
    for name, text in documents.items():
        (folder / name).write_text(text, encoding="utf-8")
    text = json.dumps(questions, indent=1, ensure_ascii=False) + "\n"
    (HERE / "questions.json").write_text(text, encoding="utf-8")
    print(f"{len(documents)} documents and {len(questions)} questions")


if __name__ == "__main__":
    main()
