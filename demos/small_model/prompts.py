"""The prompt layout of the small model, and random system prompts for its training.

A prompt is spliced from pieces that are tokenised alone: the prefix up to and including the
user marker, every segment, and the rest from ``Question:`` on.
"""

import random
from collections.abc import Sequence
from typing import Protocol

SEPARATORS = ("\n\n", "\n", "\n---\n", "\n\n\n")

CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    "{{- '<|' + message['role'] + '|>\\n' + message['content'] + '<|end|>\\n' -}}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|assistant|>\\n' -}}{%- endif -%}"
)


class Encoder(Protocol):
    """Turns a text into token ids, without special tokens of its own."""

    def __call__(self, text: str) -> list[int]: ...


def prefix_text(system: str | None) -> str:
    """Everything in front of the first segment."""
    return (f"<|system|>\n{system}<|end|>\n" if system is not None else "") + "<|user|>\n"


def question_text(question: str) -> str:
    """Everything from the question to the start of the answer."""
    return f"Question: {question}<|end|>\n<|assistant|>\n"


def encode_prompt(
    encode: Encoder,
    system: str | None,
    chunks: Sequence[str],
    question: str,
    separator: str = "\n\n",
) -> list[int]:
    """Token ids of a one-turn prompt; every piece is tokenised alone."""
    pieces = [prefix_text(system), *(chunk + separator for chunk in chunks)]
    return [i for piece in (*pieces, question_text(question)) for i in encode(piece)]


_ROLES = """
You are a helpful assistant|You are a careful librarian|You work at an information desk|
You are a clerk in an archive|You answer questions from the documents|
You are the help desk of a company|You are a research assistant|You are a friendly guide|
You read documents for busy people|You help people find facts|
This is a question and answer service|You are an expert reader|You are a museum guide|
You are a support agent|Act as a precise assistant|Your task is to answer questions
"""
_RULES = """
If the answer is not in them, say so|Use only the documents|Answer briefly|
Answer with the fact only|Do not guess|Be precise and short|Use the given texts and nothing else|
Give names and numbers exactly|Read all documents first|Do not explain your answer|
Ignore what is not asked|Keep to the facts|Every answer must come from the texts|
Copy names as they are written|Be polite|Answer in English|The documents may be in any order|
Some documents do not matter|Say when the documents do not tell|The user asks short questions|
Answer in a few words|Trust the documents|Never invent a name|Quote numbers with their unit|
The texts below were found by a search|Several documents follow|Check the name in the question|
One document may hold several facts|Facts may be in different documents
"""
_EXTRAS = """
Today is {day}|The service is open from Monday to Friday|The archive was last updated in {year}|
The user is a {who}|Current session: {number}|Version {number} of these rules|
Our customers are {who}s and {who}s|Region: north|Language: English|Date: {number}.{number}.{year}
"""
_DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
_WHO = ("teacher", "visitor", "student", "clerk", "traveller", "member", "sailor", "reader")


def _phrases(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split("|"))


def random_system(rng: random.Random) -> str | None:
    """A system prompt of 5 to 80 tokens, or None for one context in six."""
    if rng.random() < 1 / 6:
        return None
    parts = [rng.choice(_phrases(_ROLES))] if rng.random() < 0.85 else []
    parts += rng.sample(_phrases(_RULES), rng.choice((0, 1, 1, 2, 2, 3, 4, 6)))
    if rng.random() < 0.3:
        parts.insert(rng.randint(0, len(parts)), rng.choice(_phrases(_EXTRAS)))
    parts = parts or [rng.choice(_phrases(_RULES))]
    joint = rng.choice((". ", ". ", ". ", ".\n", "\n- ", "; "))
    text = joint.join(parts) + rng.choice((".", ".", ".", "", "!"))
    return text.format(
        day=rng.choice(_DAYS),
        who=rng.choice(_WHO),
        year=rng.randint(1990, 2030),
        number=rng.randint(1, 31),
    )
