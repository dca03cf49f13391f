"""Trains the small model on the facts language, on the CPU with two one-thread processes.

Resumes from the newest checkpoint in the folder. Every choice is seeded by the step, so a
resumed run sees the batches an uninterrupted one would have seen.

    python -m demos.small_model.train --out FOLDER --tokenizer FOLDER
"""

import argparse
import itertools
import json
import math
import os
import random
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from transformers import (
    AutoTokenizer,
    PreTrainedTokenizerFast,
    Qwen3_5ForCausalLM,
    Qwen3_5TextConfig,
)
from transformers.models.qwen3_5 import modeling_qwen3_5

from demos.small_model.prompts import (
    SEPARATORS,
    encode_prompt,
    prefix_text,
    question_text,
    random_system,
)
from hypic_rag.evaluation import facts

WORKERS = 2
ANSWER = 1.0  # loss weight
DOCUMENT_SAMPLE = 0.3  # share of the document and question tokens that the loss looks at


@dataclass(frozen=True)
class Stage:
    """A part of the curriculum: until a step, batches of some lengths.

    copying, recall: shares of rows without language, see ``Sampler``.
    dense: share of the other rows whose chunks hold hardly anything but facts.
    no_answer: share of questions without an answer.
    document: loss weight of document tokens; half of it for question tokens. When it's small,
        a row asks for every fact only once.
    value_first: whether facts may be stated with the value in front of its subject.
    """

    until: int
    lengths: tuple[int, ...]
    copying: float = 0.0
    recall: float = 0.0
    dense: float = 0.0
    no_answer: float = 0.0
    document: float = 0.15
    value_first: bool = True


LONG = (320, 448, 640, 1024, 1024, 1536, 2048)
CURRICULUM = (
    Stage(750, (64,), copying=0.4),
    Stage(912, (96, 128), copying=0.1),
    Stage(1344, (160, 192), copying=0.05, no_answer=0.05),
    Stage(2000, (256, 320), copying=0.02, no_answer=0.08),
    Stage(2900, (128, 160, 192), recall=0.25, dense=0.85),
    Stage(3400, (192, 256, 320), recall=0.05, dense=0.4, no_answer=0.06),
    Stage(4200, (256, 448, 640), dense=0.15, no_answer=0.1),
    Stage(5000, (384, 640, 1024), dense=0.05, no_answer=0.1),
    Stage(6250, LONG, recall=0.04, dense=0.15, no_answer=0.1, document=0.02),
    Stage(7700, LONG, dense=0.1, no_answer=0.1, document=0.02, value_first=False),
)
STEPS = CURRICULUM[-1].until
RATES = (  # step, share of the full learning rate
    (0, 0.0),
    (30, 1.0),
    (3600, 1.0),
    (5000, 0.4167),
    (6250, 0.1426),
    (6300, 0.3),
    (STEPS, 0.0),
)


# --------------------------------------------------------------------------------------------
# Data
# --------------------------------------------------------------------------------------------


class Sampler:
    """Makes training rows: token ids with a loss weight for every token."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        self.tokenizer = tokenizer
        syllables = (*facts.NAME_STARTS, *facts.NAME_MIDDLES, *facts.NAME_ENDS, *"0123456789")
        self.copyable = [tokenizer.convert_tokens_to_ids(s) for s in syllables]

    def encode(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False)

    def copying(self, rng: random.Random, length: int) -> tuple[list[int], list[float]]:
        """Random name tokens, then spans of them again: only a copying model predicts these."""
        size = rng.randint(6, length // 2)
        ids = [rng.choice(self.copyable) for _ in range(size)]
        weights = [0.0] * size
        while len(ids) < length:
            span = rng.randint(4, 12)
            start = rng.randint(0, max(0, size - span))
            again = ids[start : start + span]
            ids += again
            weights += [0.0, *([1.0] * (len(again) - 1))]
        return ids[:length], weights[:length]

    def recall(self, rng: random.Random, length: int) -> tuple[list[int], list[float]]:
        """Pairs of names, then the same pairs in another order: whole names must be matched."""
        starts, ends = rng.sample(facts.NAME_STARTS, 5), rng.sample(facts.NAME_ENDS, 5)
        names = [start + end for start in starts for end in ends]
        rng.shuffle(names)
        link, close = rng.choice((":", " is", " has", " in")), rng.choice((".", ";", ",", "\n"))
        pairs = [
            (self.encode(f" {key}{link}"), self.encode(f" {value}"), self.encode(close))
            for key, value in zip(names[:12], names[12:], strict=False)
        ]
        pairs = pairs[: rng.randint(3, min(12, length // 20))]
        ids: list[int] = []
        weights: list[float] = []
        first = True
        while len(ids) < length:
            for key, value, end in rng.sample(pairs, len(pairs)):
                ids += key + value + end
                weights += [0.0] * len(key) + [0.0 if first else ANSWER] * len(value)
                weights += [0.0] * len(end)
            first = False
        return ids[:length], weights[:length]

    def restatement(
        self, rng: random.Random, fact: facts.Fact, separator: str, stage: Stage
    ) -> tuple[list[int], list[float]]:
        """A fact in other words; the value is learned where the subject stands before it."""
        sentence = facts.fact_sentence(
            fact.relation, fact.subject, fact.value, rng, stage.value_first
        )
        ids = self.encode(sentence + separator)
        weights = [stage.document] * len(ids)
        value = self.encode(f" {fact.value}")
        if sentence.find(fact.subject) < sentence.find(fact.value):
            for start in range(len(ids) - len(value) + 1):
                if ids[start : start + len(value)] == value:
                    weights[start + 1 : start + len(value)] = [ANSWER] * (len(value) - 1)
        return ids, weights

    def dense_context(self, rng: random.Random, count: int, stage: Stage) -> facts.Context:
        """Chunks with nothing but facts, the same relations of several entities."""
        kind = rng.choice(facts.KINDS)
        relations = [relation for relation in facts.RELATIONS if relation.subject == kind]
        relations = rng.sample(relations, rng.randint(1, min(3, len(relations))))
        names: set[str] = set()
        chunks: list[str] = []
        stated: list[facts.Fact] = []
        for chunk in range(count):
            subject = facts.fresh_value(kind, rng, "train", names)
            sentences = []
            for relation in rng.sample(relations, rng.randint(1, min(2, len(relations)))):
                value = facts.make_value(relation.value, rng, "train")
                sentences.append(
                    facts.fact_sentence(relation, subject, value, rng, stage.value_first)
                )
                stated.append(facts.Fact(relation, subject, value, chunk, False, False))
            chunks.append(" ".join(sentences))
        return facts.Context(chunks, stated, "train", names)

    def conversation(
        self, rng: random.Random, length: int, stage: Stage, dense: bool
    ) -> tuple[list[int], list[float]]:
        """A context and as many questions about it as fit into the length."""
        while True:
            row = self._try_conversation(rng, length, stage, dense)
            if row is not None:
                return row

    def _try_conversation(
        self, rng: random.Random, length: int, stage: Stage, dense: bool
    ) -> tuple[list[int], list[float]] | None:
        system = random_system(rng) if length > 96 or rng.random() < 0.3 else None
        separator = rng.choice(SEPARATORS)
        once = dense or stage.document < 0.1
        no_answer = 0.0 if dense else stage.no_answer
        share = rng.uniform(0.33, 0.48) if stage.document < 0.1 else rng.uniform(0.22, 0.46)
        words = length * share  # of all chunks together
        most = 1 if length <= 64 else max(2, min(16, int(words / 22)))
        count = rng.randint(1 if length <= 128 else 2, most)
        mean = min(300.0 if length >= 1024 else 220.0, words / count)
        low = max(5, int(mean * rng.uniform(0.3, 0.9)))
        if dense:
            count = rng.randint(2, max(2, length // 40))
            context = self.dense_context(rng, count, stage)
            system = system if rng.random() < 0.4 else None
        else:
            context = facts.build_context(
                rng, count, (low, max(low, int(2 * mean - low))), value_first=stage.value_first
            )
        segments = [self.encode(chunk + separator) for chunk in context.chunks]
        held_back = count - rng.randint(1, 2) if count > 2 and rng.random() < 0.15 else count
        ids = self.encode(prefix_text(system))
        weights = [0.0] * len(ids)
        restated = dense and rng.random() < 0.3
        repeated = rng.sample(context.facts, min(len(context.facts), 3)) if restated else []
        if len(ids) + sum(map(len, segments)) + 30 > length:
            return None
        asked: list[facts.Fact] = []  # for which a row doesn't ask again
        shown = 0
        turn = 0
        while True:
            last = count if turn >= 2 else held_back
            added = [i for segment in segments[shown:last] for i in segment]
            visible = [fact for fact in context.facts if fact.chunk < last]
            fresh = [fact for fact in visible if fact not in asked]
            category: facts.Category = "one_fact"
            draw = rng.random()
            if draw < no_answer:
                category = "no_answer"
            elif draw < no_answer + 0.35 and length > 96:
                category = "two_fact"
            question = None
            if category != "one_fact":
                shown_context = facts.Context(
                    context.chunks[:last], visible, "train", context.names
                )
                question = facts.ask(shown_context, category, rng)
            if question is None and fresh:
                question = context.one_fact(rng, rng.choice(fresh))
            if question is None:
                return (ids, weights) if turn else None
            if once:
                asked += [
                    fact
                    for fact in visible
                    if fact.subject in question.text and fact.value == question.answer
                ]
            lead = (self.encode("<|user|>\n") if turn else []) + added
            lead_weights = [stage.document] * len(lead)
            for fact in repeated if turn == 0 else ():
                again, again_weights = self.restatement(rng, fact, separator, stage)
                lead += again
                lead_weights += again_weights
            text = self.encode(question_text(question.text))
            answer = self.encode(f"{question.answer}<|end|>")
            if len(ids) + len(lead) + len(text) + len(answer) > length:
                return (ids, weights) if turn else None
            newline = self.encode("\n")
            ids += lead + text + answer + newline
            weights += lead_weights + [stage.document / 2] * len(text)
            weights += [ANSWER] * len(answer) + [0.0] * len(newline)
            shown = last
            turn += 1

    def batch(
        self, rng: random.Random, rows: int, length: int, stage: Stage
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Rows of ids and weights, ``[rows, length]``, padded on the right."""
        ids = torch.full((rows, length), self.tokenizer.pad_token_id)
        weights = torch.zeros(rows, length)
        for row in range(rows):
            if rng.random() < stage.copying:
                tokens, loss = self.copying(rng, length)
            elif stage.recall and rng.random() < stage.recall:
                tokens, loss = self.recall(rng, length)
            else:
                dense = stage.dense > 0 and rng.random() < stage.dense
                tokens, loss = self.conversation(rng, length, stage, dense)
            tokens, loss = tokens[:length], loss[:length]
            ids[row, : len(tokens)] = torch.tensor(tokens)
            weights[row, : len(loss)] = torch.tensor(loss)
        return ids, weights


# --------------------------------------------------------------------------------------------
# Model
# --------------------------------------------------------------------------------------------


def make_config(tokenizer: PreTrainedTokenizerFast) -> Qwen3_5TextConfig:
    return Qwen3_5TextConfig(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=320,
        num_hidden_layers=8,
        layer_types=(["linear_attention"] * 3 + ["full_attention"]) * 2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        linear_conv_kernel_dim=4,
        linear_key_head_dim=32,
        linear_value_head_dim=32,
        linear_num_key_heads=4,
        linear_num_value_heads=4,
        max_position_embeddings=4096,
        rope_parameters={
            "rope_type": "default",
            "rope_theta": 10000.0,
            "partial_rotary_factor": 0.25,
        },
        tie_word_embeddings=True,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
    )  # fmt: skip


def make_model(config: Qwen3_5TextConfig, seed: int) -> Qwen3_5ForCausalLM:
    """A fresh model. The library's initial decay forgets at once; here heads remember."""
    torch.manual_seed(seed)
    model = Qwen3_5ForCausalLM(config)
    for name, parameter in model.named_parameters():
        data = parameter.data
        if name.endswith("conv1d.weight"):
            data.uniform_(-0.5, 0.5)
            data[:, :, -1] += 0.5
        elif name.endswith("A_log"):
            data.copy_(torch.empty_like(data).uniform_(1, 16).log())
        elif name.endswith("dt_bias"):
            step = torch.exp(torch.rand_like(data) * math.log(100) + math.log(1e-3))
            data.copy_(step + torch.log(-torch.expm1(-step)))  # inverse of softplus
        elif data.dim() == 2 and "embed" not in name and "lm_head" not in name:
            data.normal_(0, data.shape[1] ** -0.5)
    return model


def chunked_delta_rule(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    chunk_size: int = 64,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """The library's chunked gated delta rule from a zero state, without its inner Python loop.

    query, key ``[B, L, H, K]``, value ``[B, L, H, V]``, g, beta ``[B, L, H]``.
    """
    with torch.autocast("cpu", enabled=False):
        dtype, length = query.dtype, query.shape[1]
        q, k, v = (x.transpose(1, 2).float() for x in (query, key, value))
        q = F.normalize(q, dim=-1) * q.shape[-1] ** -0.5
        k = F.normalize(k, dim=-1)
        g, b = (x.transpose(1, 2).float() for x in (g, beta))
        pad = -length % chunk_size
        q, k, v = (F.pad(x, (0, 0, 0, pad)).unflatten(2, (-1, chunk_size)) for x in (q, k, v))
        g, b = (F.pad(x, (0, pad)).unflatten(2, (-1, chunk_size)) for x in (g, b))
        total = g.cumsum(-1)
        decay = (total.unsqueeze(-1) - total.unsqueeze(-2)).tril().exp().tril()
        kb = k * b.unsqueeze(-1)
        system = (kb @ k.transpose(-1, -2) * decay).tril(-1)
        right = torch.cat((v * b.unsqueeze(-1), kb * total.exp().unsqueeze(-1)), -1)
        solved = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
        u, w = solved.split((v.shape[-1], k.shape[-1]), -1)
        inner = (q @ k.transpose(-1, -2) * decay).tril()
        qg = q * total.exp().unsqueeze(-1)
        kg = (k * (total[..., -1:] - total).exp().unsqueeze(-1)).transpose(-1, -2)
        last = total[..., -1].exp()[..., None, None]
        state = q.new_zeros(*q.shape[:2], k.shape[-1], v.shape[-1])
        out = []
        for c in range(q.shape[2]):
            new = u[:, :, c] - w[:, :, c] @ state
            out.append(qg[:, :, c] @ state + inner[:, :, c] @ new)
            state = state * last[:, :, c] + kg[:, :, c] @ new
        result = torch.stack(out, 2).flatten(2, 3)[:, :, :length]
        return result.transpose(1, 2).to(dtype), None


def check_delta_rule() -> None:
    """Raises unless the trainer's delta rule equals the library's, values and gradients."""
    torch.manual_seed(0)
    shape = (2, 133, 3, 16)
    tensors = [torch.randn(shape, requires_grad=True) for _ in range(3)]
    g = (-torch.rand(shape[:3])).requires_grad_()
    beta = torch.rand(shape[:3]).requires_grad_()
    results = []
    for rule in (modeling_qwen3_5.torch_chunk_gated_delta_rule, chunked_delta_rule):
        out, _ = rule(*tensors, g=g, beta=beta, use_qk_l2norm_in_kernel=True)
        results.append([out, *torch.autograd.grad(out.square().sum(), [*tensors, g, beta])])
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-4)


# --------------------------------------------------------------------------------------------
# Training
# --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Options:
    out: Path
    tokenizer: Path
    tokens: int
    seed: int
    minutes: float


def stage_at(step: int) -> Stage:
    return next(stage for stage in CURRICULUM if step < stage.until)


def learning_rate(step: int) -> float:
    """The share of the full learning rate, linear between the points of ``RATES``."""
    (left, low), (right, high) = next(
        pair for pair in itertools.pairwise(RATES) if step < pair[1][0]
    )
    return low + (high - low) * (step - left + (left == 0)) / (right - left)


def loss_of(
    model: Qwen3_5ForCausalLM, ids: torch.Tensor, weights: torch.Tensor, keep: torch.Tensor
) -> tuple[torch.Tensor, float]:
    """Weighted sum of the loss over the kept tokens, and the mean loss on answers."""
    with torch.autocast("cpu", torch.bfloat16):
        hidden = model.model(input_ids=ids, use_cache=False).last_hidden_state
    chosen = (weights[:, 1:] > 0) & ((weights[:, 1:] == ANSWER) | keep[:, 1:])
    with torch.autocast("cpu", torch.bfloat16):
        logits = model.lm_head(hidden[:, :-1][chosen])
    each = F.cross_entropy(logits.float(), ids[:, 1:][chosen], reduction="none")
    weight = weights[:, 1:][chosen]
    answers = weight == ANSWER
    weight = torch.where(answers, weight, weight / DOCUMENT_SAMPLE)
    mean = each.detach()[answers].mean().item() if answers.any() else math.nan
    return (each * weight).sum(), mean


def all_reduce(tensors: list[torch.Tensor]) -> None:
    """Sums tensors over the workers in one message."""
    flat = torch.cat([tensor.flatten() for tensor in tensors])
    dist.all_reduce(flat)
    offset = 0
    for tensor in tensors:
        tensor.copy_(flat[offset : offset + tensor.numel()].view_as(tensor))
        offset += tensor.numel()


@torch.no_grad()
def quick_accuracy(
    model: Qwen3_5ForCausalLM,
    sampler: Sampler,
    category: facts.Category,
    chunks: int,
    words: tuple[int, int],
    rank: int,
) -> tuple[int, int]:
    """Teacher-forced exact matches on a few held-out questions (equals greedy decoding)."""
    right = total = 0
    for seed in range(rank, 40, WORKERS):
        example = facts.make_example(10_000 + seed, category, chunks, words)
        system = random_system(random.Random(seed))
        prompt = encode_prompt(sampler.encode, system, example.chunks, example.question)
        answer = sampler.encode(f"{example.answer}<|end|>")
        logits = model(torch.tensor([prompt + answer]), use_cache=False).logits[0]
        right += logits[len(prompt) - 1 : -1].argmax(-1).tolist() == answer
        total += 1
    return right, total


def save(path: Path, rank: int, content: dict[str, Any]) -> None:
    if rank == 0:
        torch.save(content, path.with_suffix(".new"))
        os.replace(path.with_suffix(".new"), path)


def work(rank: int, options: Options) -> None:
    """One of the two training processes."""
    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29517")
    dist.init_process_group("gloo", rank=rank, world_size=WORKERS)
    modeling_qwen3_5.torch_chunk_gated_delta_rule = chunked_delta_rule
    tokenizer = AutoTokenizer.from_pretrained(options.tokenizer)
    sampler = Sampler(tokenizer)
    model = make_model(make_config(tokenizer), options.seed)
    matrices, others = [], []
    for name, parameter in model.named_parameters():
        small = parameter.dim() != 2 or "embed" in name
        (others if small else matrices).append(parameter)
    optimizers = [
        torch.optim.Muon(matrices, lr=9e-3, weight_decay=0.0, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, lr=3e-3, betas=(0.9, 0.95), weight_decay=0.0),
    ]
    rates = [9e-3, 3e-3]
    step = seen = 0
    spent = 0.0
    checkpoint = options.out / "checkpoint.pt"
    if checkpoint.exists():
        state = torch.load(checkpoint)
        model.load_state_dict(state["model"])
        for optimizer, saved in zip(optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        step, seen, spent = state["step"], state["seen"], state["spent"]
    parameters = [*matrices, *others]
    began = time.monotonic()
    losses: list[float] = []
    while step < STEPS and (time.monotonic() - began) / 60 < options.minutes:
        stage = stage_at(step)
        length = stage.lengths[
            random.Random(f"{options.seed}/{step}").randrange(len(stage.lengths))
        ]
        rng = random.Random(f"{options.seed}/{step}/{rank}")
        rows = max(1, options.tokens // WORKERS // length)
        ids, weights = sampler.batch(rng, rows, length, stage)
        generator = torch.Generator().manual_seed(step * WORKERS + rank)
        keep = torch.rand(weights.shape, generator=generator) < DOCUMENT_SAMPLE
        loss, mean = loss_of(model, ids, weights, keep)
        loss.backward()
        size = weights[:, 1:].sum()
        gradients = [p.grad if p.grad is not None else torch.zeros_like(p) for p in parameters]
        all_reduce([*gradients, size])
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient / size
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        for optimizer, rate in zip(optimizers, rates, strict=True):
            optimizer.param_groups[0]["lr"] = rate * learning_rate(min(step, STEPS - 1))
            optimizer.step()
            optimizer.zero_grad()
        losses.append(mean)
        step += 1
        seen += rows * length * WORKERS
        now = time.monotonic()
        if step % 25 == 0 and rank == 0:
            minutes = (spent + now - began) / 60
            print(
                f"step {step} length {length} tokens {seen} "
                f"minutes {minutes:.1f} answer loss {sum(losses) / len(losses):.4f} "
                f"rate {learning_rate(min(step, STEPS - 1)):.3f}",
                flush=True,
            )
            losses.clear()
        if step % 250 == 0 or step == STEPS:
            evaluate_and_save(
                rank, options, model, sampler, optimizers, step, seen, spent + now - began
            )
    dist.barrier()
    dist.destroy_process_group()


def evaluate_and_save(
    rank: int, options: Options, model: Qwen3_5ForCausalLM, sampler: Sampler,
    optimizers: list[torch.optim.Optimizer], step: int, seen: int, spent: float,
) -> None:  # fmt: skip
    """Writes a checkpoint, and logs exact matches at the stage's size."""
    began = time.monotonic()
    size = (1, (10, 20)) if step <= 750 else (3, (15, 40)) if step <= 2900 else (8, (30, 110))
    counts = []
    model.eval()
    for category in ("one_fact", "two_fact", "no_answer"):
        if category == "two_fact" and size[0] < 2:
            continue
        result = torch.tensor(quick_accuracy(model, sampler, category, *size, rank))
        dist.all_reduce(result)
        counts.append(f"{category} {result[0] / result[1]:.3f}")
    model.train()
    state = {
        "model": model.state_dict(),
        "optimizers": [optimizer.state_dict() for optimizer in optimizers],
        "step": step,
        "seen": seen,
        "spent": spent,
    }
    save(options.out / "checkpoint.pt", rank, state)
    if rank == 0:
        took = time.monotonic() - began
        print(
            f"held out, {size[0]} chunks of {size[1]} words: {', '.join(counts)} ({took:.0f} s)",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="folder of the checkpoint")
    parser.add_argument("--tokenizer", type=Path, required=True)
    parser.add_argument("--tokens", type=int, default=4096, help="tokens in a step")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--minutes", type=float, default=90, help="stop after so many minutes")
    options = Options(**vars(parser.parse_args()))
    options.out.mkdir(parents=True, exist_ok=True)
    check_delta_rule()
    (options.out / "options.json").write_text(json.dumps(vars(options), default=str, indent=1))
    mp.spawn(work, (options,), nprocs=WORKERS)


if __name__ == "__main__":
    main()
