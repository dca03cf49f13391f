"""What compressing stored states costs in answers and saves in bytes.

On the small model, against full recompute, next to the ablation's results::

    python -m hypic_rag.evaluation.precision --out results --contexts 100

Sizes and the rank of transitions for a random model with heads of a real one's size::

    python -m hypic_rag.evaluation.precision --sizes
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from hypic_rag.config import Mode, Seam
from hypic_rag.engine.encode import encode_segments
from hypic_rag.engine.engine import load_model
from hypic_rag.evaluation.cells import Conditioner, Encodings, run_cell
from hypic_rag.evaluation.runs import Found, parse_shard, read_records, run_missing
from hypic_rag.evaluation.summary import summarize
from hypic_rag.evaluation.trials import Trial, TrialMaker
from hypic_rag.families.model import HybridModel, wrap
from hypic_rag.segments import Segment
from hypic_rag.states import SegmentState
from hypic_rag.store.compression import LEVELS, Precision, compress, transition_report

__all__ = ["VARIANTS", "run", "sizes"]

_PREFIX = "precision/"

VARIANTS: dict[str, Precision] = {
    **LEVELS,
    "bfloat16 operators, int8 kv": Precision(0.0, "bfloat16", "int8"),
    "float8 operators": Precision(0.0, "float8"),
    "tolerance 0.02, float8, int8 kv": Precision(0.02, "float8", "int8"),
    "tolerance 0.05, float8, int8 kv": Precision(0.05, "float8", "int8"),
    "tolerance 0.2, float8, int8 kv": Precision(0.2, "float8", "int8"),
    "tolerance 0.1, float32": Precision(0.1),
    "tolerance 0.3, float32": Precision(0.3),
    "tolerance 0.5, float32": Precision(0.5),
}
"""The levels, and what they're made of one by one."""


def run(
    model: HybridModel,
    folder: Path,
    *,
    contexts: int,
    chunks: int = 8,
    shard: tuple[int, int] = (0, 1),
    unit: int = 4,
    words: tuple[int, int] = (30, 110),
    variants: Sequence[str] | None = None,
) -> None:
    """Run what's missing and append it to this shard's file."""
    maker = TrialMaker(model, words)
    conditioner = Conditioner(maker)

    def measure(trials: list[Trial], names: list[str]) -> Found:
        bases = [conditioner.behind("other", trial) for trial in trials]
        states = Encodings(model, trials, bases, [Seam()]).states(Seam())
        for name in names:
            precision = VARIANTS[name.removeprefix(_PREFIX)]
            changed = [tuple(_through(state, precision) for state in held) for held in states]
            yield name, run_cell(model, trials, changed, Mode.SEAM)

    run_missing(
        maker,
        folder,
        [_PREFIX + name for name in (VARIANTS if variants is None else variants)],
        measure,
        chunks=chunks,
        contexts=contexts,
        shard=shard,
        unit=unit,
    )


def _through(state: SegmentState | None, precision: Precision) -> SegmentState | None:
    return None if state is None else compress(state, precision).expand()


def sizes(states: Sequence[SegmentState]) -> dict[str, dict[str, Any]]:
    """Per variant the mean bytes of a segment, their share of float32's, and the worst bounds.

    The share is of everything in float32, keys and values included, whatever the model's dtype.
    """
    plain = statistics.fmean(
        sum(tensor.numel() * 4 for tensor in state.to_tensors().values()) for state in states
    )
    found = {}
    for name, precision in VARIANTS.items():
        packed = [compress(state, precision) for state in states]
        size = statistics.fmean(item.nbytes for item in packed)
        bounds = [bound for item in packed for bound in item.bounds]
        found[name] = {
            "bytes": round(size),
            "share": size / plain,
            "transition_bound": max(bound.transition for bound in bounds),
        }
    return found


def large_random_model(seed: int = 0) -> HybridModel:
    """Two linear layers and a full-attention one with heads of 128, with gates that remember.

    Decay rates and write strengths are spread as trained models' are; the weights are random.
    """
    from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig

    torch.manual_seed(seed)
    config = Qwen3_5TextConfig(
        vocab_size=512,
        hidden_size=512,
        intermediate_size=512,
        num_hidden_layers=4,
        layer_types=["linear_attention"] * 3 + ["full_attention"],
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=256,
        linear_num_key_heads=8,
        linear_num_value_heads=8,
        linear_key_head_dim=128,
        linear_value_head_dim=128,
        linear_conv_kernel_dim=4,
        max_position_embeddings=4096,
        rope_parameters={
            "rope_type": "default",
            "rope_theta": 1e7,
            "partial_rotary_factor": 0.25,
        },
    )
    module = Qwen3_5ForCausalLM(config)
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in module.named_parameters():
        data = parameter.data
        if name.endswith("A_log"):
            data.copy_(torch.linspace(-7.5, 1.0, data.numel()))
        elif name.endswith("dt_bias"):
            data.fill_(-1.0)
        elif name.endswith("conv1d.weight"):
            data.copy_(torch.rand(data.shape, generator=generator) - 0.5)
            data[..., -1] += 0.5
        elif data.ndim == 2:
            data.copy_(torch.randn(data.shape, generator=generator) * data.shape[-1] ** -0.5)
    return wrap(module.float(), name="random")


def random_sizes(tokens: int = 512) -> dict[str, Any]:
    """Sizes per level and the transitions' norms and ranks, of one segment of a random model."""
    model = large_random_model()
    generator = torch.Generator().manual_seed(1)
    drawn = tuple(torch.randint(0, 512, (tokens,), generator=generator).tolist())
    (state,) = encode_segments(model, [Segment(drawn)], Seam())
    assert state is not None
    return {"tokens": tokens, "levels": sizes([state]), "transitions": transition_report(state)}


def small_sizes(model: HybridModel, contexts: int = 10, chunks: int = 8) -> dict[str, Any]:
    """The same of a model's own segments."""
    maker = TrialMaker(model)
    conditioner = Conditioner(maker)
    trials = [maker.trial(seed, chunks) for seed in range(contexts)]
    with torch.inference_mode():
        states = [
            state
            for trial in trials
            for state in encode_segments(
                model, trial.segments, Seam(), conditioner.of("other", trial)
            )
            if state is not None
        ]
    tokens = statistics.fmean(state.length for state in states)
    return {"tokens": tokens, "levels": sizes(states), "transitions": transition_report(states[0])}


def to_markdown(model: HybridModel, folder: Path, levels: dict[str, Any], chunks: int = 8) -> str:
    """The table of levels: bytes, bounds and fidelity, over all categories."""
    records = [record for record in read_records(folder, model).values() if record.chunks == chunks]
    rows = {row.cell: row for row in summarize(records) if row.category == "all"}
    lines = [
        "| states | bytes per segment | of float32 | bound on T | questions | exact match "
        "| first token agrees | KL |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, size in levels.items():
        row = rows.get(_PREFIX + name)
        if row is None:
            continue
        lines.append(
            f"| {name} | {size['bytes']} | {size['share']:.3f} | {size['transition_bound']:.3f} "
            f"| {row.exact.count} | {row.exact} | {row.first.mean:.4f} "
            f"| {row.kl.mean:.5f} [{row.kl.low:.5f}, {row.kl.high:.5f}] |"
        )
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, help="folder of the results")
    parser.add_argument("--model", default="small", help="name or folder of the model")
    parser.add_argument("--contexts", type=int, default=100)
    parser.add_argument("--shard", type=parse_shard, default=(0, 1), help="NUMBER/COUNT")
    parser.add_argument("--report", action="store_true", help="print the table instead")
    parser.add_argument("--sizes", action="store_true", help="print a random model's sizes instead")
    chosen = parser.parse_args(arguments)
    if chosen.sizes:
        sys.stdout.write(json.dumps(random_sizes(), indent=1) + "\n")
        return
    if chosen.out is None:
        parser.error("--out is needed")
    model = load_model(chosen.model)
    if chosen.report:
        levels = small_sizes(model)["levels"]
        sys.stdout.write(to_markdown(model, chosen.out, levels) + "\n")
        return
    run(model, chosen.out, contexts=chosen.contexts, shard=chosen.shard)


if __name__ == "__main__":
    main()
