"""The ``hypic-rag`` command: thin functions over the library.

JSON goes to stdout alone; progress and messages go to stderr. Exit code 2 means wrong use, 1 any
other failure, 130 an interruption.
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect as inspection
import json
import logging
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hypic_rag.config import (
    STATE_PRECISIONS,
    AnswerOptions,
    Mode,
    Sampling,
    Seam,
    Settings,
    parse_state_precision,
    text_or_file,
)
from hypic_rag.errors import ConfigError, HypicError
from hypic_rag.segments import check_question

if TYPE_CHECKING:
    from hypic_rag.answers import Answer
    from hypic_rag.ingest.pipeline import IngestReport
    from hypic_rag.knowledge_base import KnowledgeBase

__all__ = ["app", "main"]

_WrongUse: type[Exception] = typer.BadParameter.__mro__[2]
"""Base of what typer raises for a wrong command line; it has no public name of its own."""

app = typer.Typer(
    name="hypic-rag",
    help="Answers from documents with hybrid LLMs, from states that are computed once.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

Store = Annotated[Path, typer.Option("--store", help="Folder of the store.")]
Model = Annotated[
    str | None,
    typer.Option("--model", help="Hub name or folder; 'small' is the model that ships here."),
]
Config = Annotated[Path | None, typer.Option("--config", help="Settings file (TOML).")]
Tenant = Annotated[str | None, typer.Option("--tenant", help="Whose documents.")]
TopK = Annotated[int | None, typer.Option("--top-k", help="Chunks to answer from. [default: 5]")]
ModeOption = Annotated[
    str | None, typer.Option("--mode", help=f"One of {', '.join(Mode)}. [default: seam]")
]
RepairTokens = Annotated[
    int | None,
    typer.Option(
        "--repair-tokens",
        help="Cached tokens to recompute, from the best passages' starts. [default: 0]",
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON to stdout.")]
Prompt = Annotated[
    str | None,
    typer.Option("--system-prompt", help="Text, or @FILE to read it from a file."),
]
MaxTokens = Annotated[int | None, typer.Option("--max-tokens", help="Tokens of an answer at most.")]
Device = Annotated[str | None, typer.Option("--device", help="auto, cpu or cuda.")]
Dtype = Annotated[str | None, typer.Option("--dtype", help="auto, float32, bfloat16 or float16.")]


@app.callback(invoke_without_command=True)
def _options(
    version: Annotated[bool, typer.Option("--version", help="Print the version and stop.")] = False,
) -> None:
    if version:
        from hypic_rag import __version__

        print(__version__)
        raise typer.Exit


@app.command()
def ingest(
    paths: Annotated[list[str], typer.Argument(help="Files and folders.")],
    store: Store,
    model: Model = None,
    system_prompt: Prompt = None,
    conditioning: Annotated[
        str | None,
        typer.Option(
            help="For a new store: what segments are encoded behind: 'system prompt', 'none', "
            "a text or @FILE. [default: system prompt]"
        ),
    ] = None,
    chunk_tokens: Annotated[
        int | None, typer.Option(help="For a new store: tokens of a chunk. [default: 512]")
    ] = None,
    seam: Annotated[
        str | None,
        typer.Option(help="For a new store: default, none, paper or HEAD/TAIL. [default: 4/0]"),
    ] = None,
    state_precision: Annotated[
        str | None,
        typer.Option(
            help="For a new store: how states are compressed on the disk, one of "
            f"{', '.join(STATE_PRECISIONS)}. [default: exact]"
        ),
    ] = None,
    prune: Annotated[
        bool, typer.Option("--prune", help="Remove documents that have disappeared.")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Read and count everything, change nothing.")
    ] = False,
    workers: Annotated[
        int,
        typer.Option(
            min=0,
            help="Processes that encode side by side; 0 for none, or with --ray for one per CPU "
            "of the cluster.",
        ),
    ] = 0,
    ray: Annotated[
        str | None,
        typer.Option(
            help="Encode on the Ray cluster at this address: auto, local, HOST:PORT or "
            "ray://HOST:PORT."
        ),
    ] = None,
    tenant: Tenant = None,
    device: Device = None,
    dtype: Dtype = None,
    config: Config = None,
    as_json: AsJson = False,
) -> None:
    """Ingest documents: read, chunk, encode and embed what's new or has changed."""
    import os
    import tempfile
    from contextlib import ExitStack

    settings = Settings.load(config)
    for path in paths:
        # Before a store is made for nothing.
        if not os.path.lexists(path):
            raise ConfigError(f"{path}: No such file or directory; check the path.")
    with ExitStack() as stack:
        if ray is not None and not dry_run:
            from hypic_rag.ingest.ray_pool import connected

            ray = stack.enter_context(connected(ray))
        scratch = stack.enter_context(tempfile.TemporaryDirectory())
        # Nothing may be written, so a store that doesn't exist yet is made elsewhere.
        folder = store if not dry_run or _holds_store(store) else Path(scratch) / "store"
        with _open(
            folder,
            settings,
            model=model,
            system_prompt=system_prompt,
            conditioning=conditioning,
            chunk_tokens=chunk_tokens,
            seam=seam,
            state_precision=state_precision,
            tenant=tenant,
            device=device,
            dtype=dtype,
            create=True,
            read_only=dry_run and folder == store,
        ) as kb:
            report = _ingest(kb, paths, prune=prune, dry_run=dry_run, workers=workers, ray=ray)
    _print_report(report, dry_run=dry_run, as_json=as_json)
    if report.failed:
        raise typer.Exit(1)


@dataclass(frozen=True)
class _Asking:
    """The options of ``ask`` and ``chat``: where to answer from, and how."""

    store: Store
    top_k: TopK = None
    repair_tokens: RepairTokens = None
    mode: ModeOption = None
    model: Model = None
    system_prompt: Prompt = None
    max_tokens: MaxTokens = None
    tenant: Tenant = None
    device: Device = None
    dtype: Dtype = None
    config: Config = None

    @contextlib.contextmanager
    def open(self) -> Iterator[tuple[KnowledgeBase, int, AnswerOptions]]:
        """The knowledge base, warm, with how many chunks to answer from and how to do it."""
        settings = Settings.load(self.config)
        most = settings.max_tokens if self.max_tokens is None else self.max_tokens
        repair = settings.repair_tokens if self.repair_tokens is None else self.repair_tokens
        mode = self.mode or settings.mode
        options = AnswerOptions.of(mode, Sampling(max_tokens=most), repair)
        count = _top_k(self.top_k, settings)
        with _open(
            self.store,
            settings,
            model=self.model,
            system_prompt=self.system_prompt,
            tenant=self.tenant,
            device=self.device,
            dtype=self.dtype,
        ) as kb:
            kb.warm()
            yield kb, count, options


def _takes_asking(command: Callable[..., None]) -> Callable[..., None]:
    """A command whose first parameter is an :class:`_Asking`, with its fields as options."""
    shared = inspection.signature(_Asking, eval_str=True).parameters
    _, *own = inspection.signature(command, eval_str=True).parameters.values()
    kind = inspection.Parameter.KEYWORD_ONLY
    parameters = [parameter.replace(kind=kind) for parameter in (*own, *shared.values())]

    def run(**given: Any) -> None:
        command(_Asking(**{name: given.pop(name) for name in shared}), **given)

    run.__name__, run.__doc__ = command.__name__, command.__doc__
    run.__signature__ = inspection.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return run


@app.command()
@_takes_asking
def ask(
    asking: _Asking,
    question: Annotated[str, typer.Argument(help="In plain words.")],
    exact: Annotated[
        bool, typer.Option("--exact", help="Recompute the whole prompt; reuse nothing.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Answer one question from a store."""
    check_question(question)
    with asking.open() as (kb, top_k, options):
        stream = kb.stream(
            question,
            top_k=top_k,
            mode=options.mode,
            exact=exact,
            sampling=options.sampling,
            repair_tokens=options.repair_tokens,
        )
        if as_json:
            print(json.dumps(stream.finish().to_dict(), ensure_ascii=False, indent=2))
            return
        for piece in stream:
            print(piece, end="", flush=True)
        print()
        _print_facts(stream.answer)


_CHAT_HELP = "Ask something. /sources shows the last passages, /reset starts over, /quit ends."


@app.command()
@_takes_asking
def chat(asking: _Asking) -> None:
    """Talk to a store in the terminal. /sources, /reset, /help and /quit are commands."""
    with asking.open() as (kb, top_k, options):
        session = kb.chat(
            top_k=top_k,
            mode=options.mode,
            sampling=options.sampling,
            repair_tokens=options.repair_tokens,
        )
        _note(_CHAT_HELP)
        last: Answer | None = None
        while (line := _read_line()) is not None:
            if line == "/quit":
                break
            if line == "/reset":
                session.reset()
                last = None
            elif line == "/sources":
                _print_sources(last)
            elif line.startswith("/"):
                _note(_CHAT_HELP if line == "/help" else f"Unknown command {line}. {_CHAT_HELP}")
            elif line:
                try:
                    stream = session.stream(line)
                    for piece in stream:
                        print(piece, end="", flush=True)
                    print()
                    last = stream.answer
                    _print_facts(last)
                except HypicError as error:
                    _note(f"error: {error}")


@app.command()
def inspect(
    model: Annotated[str, typer.Argument(help="Hub name or folder; 'small' ships here.")],
    tokens: Annotated[int, typer.Option(help="Segment length to count bytes for.")] = 512,
    as_json: AsJson = False,
) -> None:
    """Show a model's layers, transitions and bytes per segment, or why it's unsupported."""
    from hypic_rag.engine.engine import checkpoint_path
    from hypic_rag.families.inspect import inspect_checkpoint
    from hypic_rag.families.quiet import quiet_library

    quiet_library()
    if tokens < 1:
        raise ConfigError(f"--tokens must be at least 1, but is {tokens}.")
    report = inspect_checkpoint(checkpoint_path(model), tokens, model)
    print(json.dumps(report.to_dict(), indent=2) if as_json else report)


@app.command()
def demo(
    store: Annotated[
        Path | None, typer.Option("--store", help="Keep the demo's store in this folder.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Ingest the bundled documents and ask questions about them."""
    from hypic_rag.demo import run_demo
    from hypic_rag.families.quiet import quiet_library

    quiet_library()
    if not run_demo(store, as_json=as_json):
        raise typer.Exit(1)


@app.command()
def stats(store: Store, as_json: AsJson = False) -> None:
    """Show what a store was made with and how much it holds."""
    from hypic_rag.store import SegmentStore

    with SegmentStore.open(store, read_only=True) as opened:
        held = dataclasses.asdict(opened.statistics())
        made = opened.settings.to_json()
    if as_json:
        print(json.dumps({"settings": made, "statistics": held}, ensure_ascii=False, indent=2))
        return
    for name, value in {**made, **held}.items():
        print(f"{name:<16}{value}")


@app.command()
def repair(store: Store, as_json: AsJson = False) -> None:
    """Check every state, rebuild what's derived, and say what was found."""
    from hypic_rag.store import SegmentStore

    with SegmentStore.open(store) as opened:
        report = dataclasses.asdict(opened.repair())
    if as_json:
        print(json.dumps(report, indent=2))
    else:
        for name, value in report.items():
            print(f"{name.replace('_', ' '):<20}{_plain(value)}")
    if report["problems"]:
        raise typer.Exit(1)


def _mount() -> None:
    """Add the commands that live in rooms of their own; they import what they need when called."""
    from hypic_rag.bench_serve.command import serve as bench_serve
    from hypic_rag.evaluation.bench_cli import app as bench
    from hypic_rag.evaluation.verify_cli import verify
    from hypic_rag.server.cli import serve

    app.command()(verify)
    app.command()(serve)
    bench.command("serve")(bench_serve)
    app.add_typer(bench, name="bench")


_mount()


def main() -> None:
    """Run the command line; errors made on purpose become one line on stderr."""
    logging.basicConfig(format="%(levelname)s: %(message)s", level=logging.WARNING)
    try:
        status = app(standalone_mode=False)
    except HypicError as error:
        _note(f"error: {error}")
        sys.exit(error.exit_code)
    except _WrongUse as error:
        sys.exit(_explain(error))
    except (KeyboardInterrupt, typer.Abort):
        status = 130
    except BrokenPipeError:
        sys.stderr.close()
        sys.exit(1)
    if status == 130:
        _note("interrupted; what was finished is kept")
    sys.exit(status)


def _explain(error: Any) -> int:
    """Say in one line what's wrong with the command line; returns the exit code."""
    message = " ".join(error.format_message().split())
    context = getattr(error, "ctx", None)
    if context is None or type(error).__name__ == "NoArgsIsHelpError":
        error.show()  # the help itself
    else:
        _note(f"error: {message.rstrip('.')}; see {context.command_path} --help")
    return int(error.exit_code)


# -- helpers -----------------------------------------------------------------------------------


def _holds_store(path: Path) -> bool:
    return path.is_dir() and any(path.iterdir())


def _open(
    store: Path,
    settings: Settings,
    *,
    model: str | None,
    system_prompt: str | None,
    tenant: str | None,
    device: str | None,
    dtype: str | None,
    conditioning: str | None = None,
    chunk_tokens: int | None = None,
    seam: str | None = None,
    state_precision: str | None = None,
    create: bool = False,
    read_only: bool | None = None,
) -> KnowledgeBase:
    """Open a store with what the options, the settings file and the store itself say."""
    import os

    widths = Seam.parse(settings.seam if seam is None else seam)
    precision = settings.state_precision if state_precision is None else state_precision
    parse_state_precision(precision)
    served = text_or_file(settings.system_prompt if system_prompt is None else system_prompt)
    behind = text_or_file(settings.conditioning if conditioning is None else conditioning)
    fixed = (conditioning, chunk_tokens, seam, state_precision)
    if _holds_store(store) and any(value is not None for value in fixed):
        raise ConfigError(
            f"{store} is a store already, and its conditioning, chunk size, seam and state "
            "precision are fixed: leave those options out, or make a new store."
        )
    from hypic_rag.families.quiet import quiet_library

    quiet_library()
    from hypic_rag.knowledge_base import KnowledgeBase

    return KnowledgeBase.open(
        store,
        model or settings.model,
        system_prompt=served,
        conditioning=None if behind == "none" else behind,
        chunk_tokens=settings.chunk_tokens if chunk_tokens is None else chunk_tokens,
        seam=widths,
        state_precision=precision,
        tenant=settings.tenant if tenant is None else tenant,
        create=create,
        read_only=not os.access(store, os.W_OK) if read_only is None else read_only,
        device=device or settings.device,
        dtype=dtype or settings.dtype,
    )


def _plain(value: object) -> str:
    """A figure of a report, for people."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, tuple):
        return "; ".join(map(str, value)) or "none"
    return str(value)


def _top_k(option: int | None, settings: Settings) -> int:
    count = settings.top_k if option is None else option
    if count < 1:
        raise ConfigError(f"--top-k must be at least 1, but is {count}.")
    return count


def _ingest(
    kb: KnowledgeBase,
    paths: list[str],
    *,
    prune: bool,
    dry_run: bool,
    workers: int,
    ray: str | None,
) -> IngestReport:
    """Run an ingestion with a progress bar on stderr."""
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.percentage:>3.0f} % of bytes, {task.fields[rate]} tokens/s,"),
        TimeElapsedColumn(),
        TextColumn("gone,"),
        TimeRemainingColumn(),
        TextColumn("left"),
    )
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task("starting", total=None, rate="0")

        def show(progress: Any) -> None:
            elapsed = bar.tasks[0].elapsed or 1e-9
            bar.update(
                task,
                total=progress.total_bytes,
                completed=progress.bytes,
                description=f"{progress.files}/{progress.total_files} files",
                rate=f"{progress.tokens / elapsed:,.0f}",
            )

        return kb.ingest(
            *paths, prune=prune, dry_run=dry_run, progress=show, workers=workers, ray=ray
        )


def _print_report(report: IngestReport, *, dry_run: bool, as_json: bool) -> None:
    for kind, entries in (("skipped", report.skipped), ("failed", report.failed)):
        for name, reason in entries:
            # Most reasons name the file themselves.
            _note(f"{kind}: {reason if name in reason else f'{name}: {reason}'}")
    if as_json:
        print(json.dumps(dataclasses.asdict(report), ensure_ascii=False, indent=2))
        return
    would = "would be " if dry_run else ""
    for name in ("added", "updated", "unchanged", "restored", "removed"):
        count = len(getattr(report, name))
        if count:
            what = "document" if count == 1 else "documents"
            print(f"{count:>6} {what} {'' if name == 'unchanged' else would}{name}")
    what = "chunk" if report.chunks == 1 else "chunks"
    print(
        f"{report.chunks:>6} {what}, {report.tokens} tokens {would}encoded, "
        f"{report.state_bytes / 1e6:.1f} MB of states in memory, {report.seconds:.1f} s"
    )


def _print_facts(answer: Answer) -> None:
    """Sources and costs of an answer, on stderr."""
    for number, source in enumerate(answer.sources, 1):
        page = f", page {source.page}" if source.page else ""
        _note(f"  [{number}] {source.document}, chunk {source.chunk}{page} ({source.score:.4f})")
    tokens = answer.tokens
    _note(
        f"  {tokens.reused} prompt tokens reused, {tokens.computed} computed; first token after "
        f"{answer.timings.ttft_s:.3f} s"
    )
    for warning in answer.warnings:
        _note(f"  warning: {warning}")


def _print_sources(answer: Answer | None) -> None:
    if answer is None:
        _note("Nothing was asked yet.")
        return
    for number, source in enumerate(answer.sources, 1):
        print(f"[{number}] {source.document}, chunk {source.chunk}\n{source.text}")


def _read_line() -> str | None:
    """The next line, or None at the end of input."""
    try:
        if sys.stdin.isatty():
            return input("> ").strip()
        line = sys.stdin.readline()
        return line.strip() if line else None
    except EOFError:
        return None


def _note(text: str) -> None:
    print(text, file=sys.stderr)
