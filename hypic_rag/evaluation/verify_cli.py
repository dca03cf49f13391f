"""The command ``hypic-rag verify``."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from hypic_rag.config import Mode, Seam
from hypic_rag.errors import ConfigError

__all__ = ["verify"]


def verify(
    store: Annotated[Path, typer.Option("--store", help="Folder of the store.")],
    questions: Annotated[
        Path | None,
        typer.Option(
            help='JSONL file, one {"question": …, "answer": …} a line; without it, questions '
            "are drawn from the store and continuations are compared."
        ),
    ] = None,
    count: Annotated[
        int, typer.Option(min=1, help="Questions to draw, or the most to take from the file.")
    ] = 100,
    modes: Annotated[
        str, typer.Option(help=f"Comma-separated, of {', '.join(Mode)}.")
    ] = "addition,transition,transition_rope,seam",
    seams: Annotated[
        str | None,
        typer.Option(
            help="Comma-separated, each default, none, paper or HEAD/TAIL. "
            "[default: the store's own, none, paper]"
        ),
    ] = None,
    repair_tokens: Annotated[
        str,
        typer.Option(
            help="Comma-separated budgets of cached tokens to recompute, with every seam."
        ),
    ] = "0",
    top_k: Annotated[int, typer.Option("--top-k", min=1, help="Chunks per question.")] = 5,
    tokens: Annotated[int, typer.Option(min=1, help="Tokens of the compared continuation.")] = 32,
    repeats: Annotated[int, typer.Option(min=1, help="Timings per first token.")] = 1,
    seed: Annotated[int, typer.Option(help="For drawn questions.")] = 0,
    html: Annotated[
        Path | None, typer.Option(help="Write a self-contained report with charts here.")
    ] = None,
    max_kl: Annotated[
        float | None,
        typer.Option(
            help="Fail (exit code 1) if the store's own seam, with the first budget, has a higher "
            "mean KL."
        ),
    ] = None,
    model: Annotated[str | None, typer.Option("--model", help="Hub name or folder.")] = None,
    system_prompt: Annotated[
        str | None, typer.Option("--system-prompt", help="The prompt to serve.")
    ] = None,
    tenant: Annotated[str, typer.Option("--tenant", help="Whose documents.")] = "",
    device: Annotated[str, typer.Option("--device", help="auto, cpu or cuda.")] = "auto",
    dtype: Annotated[
        str, typer.Option("--dtype", help="auto, float32, bfloat16 or float16.")
    ] = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON to stdout.")] = False,
) -> None:
    """Measure what caching costs: every mode against full recompute of the same prompts."""
    chosen_modes = [Mode.parse(name.strip()) for name in modes.split(",")]
    budgets = [_budget(text.strip()) for text in repair_tokens.split(",")]
    from rich.console import Console
    from rich.progress import Progress

    from hypic_rag.evaluation.report import print_report, to_html
    from hypic_rag.evaluation.verify import (
        Variant,
        drawn_questions,
        read_questions,
        variants_of,
    )
    from hypic_rag.evaluation.verify import verify as measure
    from hypic_rag.families.quiet import quiet_library
    from hypic_rag.knowledge_base import KnowledgeBase

    quiet_library()
    asked = None if questions is None else read_questions(questions)[:count]
    own = [Seam.parse(name.strip()) for name in seams.split(",")] if seams else None
    with KnowledgeBase.open(
        store,
        model,
        system_prompt=system_prompt,
        tenant=tenant,
        create=False,
        read_only=True,
        device=device,
        dtype=dtype,
    ) as kb:
        stored = kb.store.settings.seam
        variants = variants_of(chosen_modes, own or (stored, Seam(0, 0), Seam(8, 8)), budgets)
        asked = drawn_questions(kb, count, seed) if asked is None else asked
        with Progress(console=Console(stderr=True), transient=True) as bar:
            task = bar.add_task("verifying", total=len(asked))
            report = measure(
                kb,
                asked,
                variants,
                top_k=top_k,
                limit=tokens,
                repeats=repeats,
                progress=lambda done, total: bar.update(task, completed=done, total=total),
            )
    if html is not None:
        html.write_text(to_html(report), encoding="utf-8")
        typer.echo(f"The report is in {html}.", err=True)
    if as_json:
        json.dump(report.to_dict(), sys.stdout, indent=1)
        sys.stdout.write("\n")
    else:
        print_report(report, Console())
    if max_kl is not None:
        own_name = Variant(Mode.SEAM, stored, budgets[0]).name
        mine = [v for v in report.variants if v.name == own_name]
        if not mine or not mine[0].compared or mine[0].kl.mean > max_kl:
            found = f"{mine[0].kl.mean:.2g}" if mine and mine[0].compared else "not measured"
            typer.echo(f"The mean KL of {own_name} is {found}, above {max_kl:g}.", err=True)
            raise typer.Exit(1)


def _budget(text: str) -> int:
    if not text.isdecimal():
        raise ConfigError(f"A budget of repaired tokens is a whole number >= 0, not {text!r}.")
    return int(text)
