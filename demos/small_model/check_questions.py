"""Asks the small model the demo's questions, with the right chunks among others in the prompt.

Retrieval plays no part: the chunks of the documents that hold the answer are always there.
Full recompute with the plain library.

    python -m demos.small_model.check_questions --model FOLDER
"""

import argparse
import json
import random
from pathlib import Path

from demos.small_model.evaluate import SYSTEMS, Evaluator
from hypic_rag.evaluation import facts
from hypic_rag.ingest.chunking import split_document
from hypic_rag.ingest.readers import read_document

DEMOS = Path(__file__).parents[1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True, help="folder of the model")
    parser.add_argument("--chunks", type=int, default=6, help="chunks in the prompt, at least")
    parser.add_argument("--chunk-tokens", type=int, default=512)
    parser.add_argument("--first", type=int, default=10, help="how many questions the demo asks")
    arguments = parser.parse_args()
    evaluator = Evaluator(arguments.model)
    chunks = {
        path.name: [
            chunk.text.rstrip("\n")
            for chunk in split_document(
                read_document(path), evaluator.encode, arguments.chunk_tokens
            )
        ]
        for path in sorted((DEMOS / "documents").iterdir())
    }
    questions = json.loads((DEMOS / "questions.json").read_text(encoding="utf-8"))
    rng = random.Random(3)
    rows = []
    for question in questions:
        shown = [text for name in question["document"] for text in chunks[name]]
        others = [t for n in chunks if n not in question["document"] for t in chunks[n]]
        shown += rng.sample(others, max(0, arguments.chunks - len(shown)))
        rng.shuffle(shown)
        example = facts.Example(
            shown, question["question"], question["answer"], question["category"], []
        )
        rows.append(evaluator.row(example, SYSTEMS[0]))
    exact = evaluator.exact(rows)
    for number, (question, right, (prompt, _)) in enumerate(
        zip(questions, exact, rows, strict=True)
    ):
        if not right or number < arguments.first:
            mark = "right" if right else "WRONG"
            print(f"{mark} {len(prompt):5} tokens  {question['question']}  {question['answer']}")
    demo = exact[: arguments.first]
    print(f"{sum(demo)} of the demo's {len(demo)}, {sum(exact)} of all {len(exact)} right")


if __name__ == "__main__":
    main()
