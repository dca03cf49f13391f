"""Measures the small model on held-out questions, by full recompute with the plain library.

An answer counts when greedy decoding would give exactly the expected tokens and then the end
token. Names and values of the questions occur in no training example.

    python -m demos.small_model.evaluate --model FOLDER --json results.json
"""

import argparse
import json
import random
import time
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from demos.small_model.prompts import encode_prompt
from hypic_rag.evaluation import facts

SYSTEMS = (
    "You are a helpful assistant. Answer the question from the documents.",
    "You answer questions from the documents. If the answer is not in them, say so.",
    "Find the fact in the texts. Be brief.",
    None,
)
BATCH_TOKENS = 12_000


class Evaluator:
    """Scores examples in batches of similar length."""

    def __init__(self, folder: str) -> None:
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    def encode(self, text: str) -> list[int]:
        return list(self.tokenizer.encode(text, add_special_tokens=False))

    def row(self, example: facts.Example, system: str | None) -> tuple[list[int], list[int]]:
        prompt = encode_prompt(self.encode, system, example.chunks, example.question)
        return prompt, self.encode(f"{example.answer}<|end|>")

    @torch.inference_mode()
    def exact(self, rows: list[tuple[list[int], list[int]]]) -> list[bool]:
        """Whether greedy decoding gives the expected tokens, for every (prompt, answer)."""
        order = sorted(range(len(rows)), key=lambda i: len(rows[i][0]))
        results = [False] * len(rows)
        while order:
            longest = len(rows[order[-1]][0]) + 32
            batch = [order.pop() for _ in range(min(len(order), max(1, BATCH_TOKENS // longest)))]
            width = max(len(rows[i][0]) + len(rows[i][1]) for i in batch)
            ids = torch.full((len(batch), width), self.tokenizer.pad_token_id)
            for place, i in enumerate(batch):
                tokens = rows[i][0] + rows[i][1]
                ids[place, : len(tokens)] = torch.tensor(tokens)  # padded behind: causal, harmless
            hidden = self.model.model(input_ids=ids, use_cache=False).last_hidden_state
            for place, i in enumerate(batch):
                prompt, answer = rows[i]
                span = hidden[place, len(prompt) - 1 : len(prompt) + len(answer) - 1]
                results[i] = self.model.lm_head(span).argmax(-1).tolist() == answer
        return results

    def accuracy(
        self,
        category: facts.Category,
        chunks: int,
        words: tuple[int, int],
        count: int,
        value_first: bool,
    ) -> tuple[float, float]:
        """Share of exact answers, and the mean prompt length in tokens."""
        rng = random.Random(5)
        rows = []
        for seed in range(count):
            example = facts.make_example(
                1_000_000 + seed, category, chunks, words, "held_out", value_first
            )
            rows.append(self.row(example, rng.choice(SYSTEMS)))
        exact = self.exact(rows)
        return sum(exact) / count, sum(len(prompt) for prompt, _ in rows) / count


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True, help="folder of the model")
    parser.add_argument("--count", type=int, default=500, help="questions at 8 chunks")
    parser.add_argument("--other-count", type=int, default=200, help="questions elsewhere")
    parser.add_argument("--chunks", type=int, nargs="+", default=[8, 4, 16])
    parser.add_argument("--categories", nargs="+", default=list(facts.CATEGORIES))
    parser.add_argument("--words", type=int, nargs=2, default=[30, 110])
    parser.add_argument("--value-first", action="store_true", help="all word orders")
    parser.add_argument("--json", type=Path, help="where to write the numbers")
    arguments = parser.parse_args()
    evaluator = Evaluator(arguments.model)
    words = (arguments.words[0], arguments.words[1])
    results = []
    for chunks in arguments.chunks:
        for category in arguments.categories:
            count = arguments.count if chunks == 8 else arguments.other_count
            began = time.monotonic()
            exact, length = evaluator.accuracy(
                category, chunks, words, count, arguments.value_first
            )
            results.append(
                {
                    "category": category,
                    "chunks": chunks,
                    "words": list(words),
                    "value_first": arguments.value_first,
                    "questions": count,
                    "exact_match": round(exact, 4),
                    "mean_prompt_tokens": round(length),
                }
            )
            took = time.monotonic() - began
            print(
                f"{chunks:2} chunks  {category:15} {exact:.3f}  {length:6.0f} tokens  {took:.0f} s",
                flush=True,
            )
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
