"""``hypic-rag serve``: a store over HTTP."""

from __future__ import annotations

import contextlib
import ipaddress
import signal
import socket
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hypic_rag.config import Mode, Settings, text_or_file
from hypic_rag.errors import ConfigError, ServerError

if TYPE_CHECKING:
    from hypic_rag.knowledge_base import KnowledgeBase
    from hypic_rag.server.settings import ServerSettings

__all__ = ["run", "serve"]

_MB = 1 << 20
_PROBE_SHARE = 0.01
_LOOPBACK = ("localhost", "127.0.0.1", "[::1]")


def serve(
    store: Annotated[Path, typer.Option("--store", help="Folder of the store.")],
    host: Annotated[str, typer.Option("--host", help="Address to listen at.")] = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", min=0, max=65535, help="0 takes a free one.")] = (
        8000
    ),
    api_keys: Annotated[
        Path | None,
        typer.Option("--api-keys", help="File (TOML) of API keys, each with its tenant."),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option("--model", help="Hub name or folder; 'small' is the model that ships here."),
    ] = None,
    model_name: Annotated[
        str | None, typer.Option("--model-name", help="What clients call the model.")
    ] = None,
    system_prompt: Annotated[
        str | None, typer.Option("--system-prompt", help="Text, or @FILE to read it from a file.")
    ] = None,
    top_k: Annotated[
        int | None, typer.Option("--top-k", help="Chunks to answer from. [default: 5]")
    ] = None,
    mode: Annotated[
        str | None, typer.Option("--mode", help=f"One of {', '.join(Mode)}. [default: seam]")
    ] = None,
    repair_tokens: Annotated[
        int | None,
        typer.Option("--repair-tokens", help="Cached tokens recomputed a request. [default: 0]"),
    ] = None,
    max_tokens: Annotated[
        int | None, typer.Option("--max-tokens", help="Tokens of an answer, if none are asked for.")
    ] = None,
    concurrency: Annotated[int, typer.Option(help="Answers that are made side by side.")] = 16,
    prepare_ahead: Annotated[
        bool,
        typer.Option(
            help="Prepare the requests that wait in a thread of its own, while the model is busy."
        ),
    ] = True,
    queue: Annotated[int, typer.Option(help="Requests that may wait; more are refused.")] = 32,
    timeout: Annotated[float, typer.Option(help="Seconds that a request may take.")] = 120.0,
    upload_mb: Annotated[int, typer.Option(help="Largest upload, in MB.")] = 64,
    session_mb: Annotated[int, typer.Option(help="Memory for conversations' caches, in MB.")] = (
        1024
    ),
    state_mb: Annotated[
        int | None, typer.Option(help="Disk space for segment states, in MB. [default: no limit]")
    ] = None,
    max_kl: Annotated[
        float | None,
        typer.Option(
            "--max-kl",
            help="Compare some requests with full recompute in the background, and warn if their "
            "mean KL (nats) is above this.",
        ),
    ] = None,
    probe_share: Annotated[
        float | None,
        typer.Option(
            "--probe-share", help="Share of requests that --max-kl compares. [default: 0.01]"
        ),
    ] = None,
    read_only: Annotated[
        bool, typer.Option("--read-only", help="Never write: no uploads, no new states.")
    ] = False,
    workers: Annotated[
        int,
        typer.Option(
            min=0,
            help="Processes that encode a request's passages side by side if several have no "
            "state; 0 for none.",
        ),
    ] = 0,
    open_to_all: Annotated[
        bool,
        typer.Option("--no-keys", help="Allow other machines to ask without an API key."),
    ] = False,
    device: Annotated[str | None, typer.Option("--device", help="auto, cpu or cuda.")] = None,
    dtype: Annotated[
        str | None, typer.Option("--dtype", help="auto, float32, bfloat16 or float16.")
    ] = None,
    tenant: Annotated[
        str | None, typer.Option("--tenant", help="Whose documents, without API keys.")
    ] = None,
    config: Annotated[Path | None, typer.Option("--config", help="Settings file (TOML).")] = None,
) -> None:
    """Serve a store: OpenAI's chat protocol, documents, metrics and a chat page."""
    settings = Settings.load(config)
    require_server_packages()
    from hypic_rag.families.quiet import quiet_library
    from hypic_rag.knowledge_base import KnowledgeBase
    from hypic_rag.server.settings import ApiKeys, ServerSettings

    quiet_library()
    keys = None if api_keys is None else ApiKeys.load(api_keys)
    if keys is not None and tenant is not None:
        raise ConfigError("With --api-keys every key has its own tenant: leave --tenant out.")
    if keys is None and not open_to_all and not _is_loopback(host):
        raise ConfigError(
            f"Listening at {host} lets other machines in: give --api-keys, or --no-keys if "
            "everyone may ask and upload."
        )
    _check_probe(max_kl, probe_share)
    served = ServerSettings(
        keys=keys,
        hosts=None if open_to_all else tuple(dict.fromkeys((*_LOOPBACK, host.lower()))),
        model_name=model_name,
        top_k=settings.top_k if top_k is None else top_k,
        mode=Mode.parse(mode or settings.mode),
        repair_tokens=settings.repair_tokens if repair_tokens is None else repair_tokens,
        max_tokens=settings.max_tokens if max_tokens is None else max_tokens,
        concurrency=concurrency,
        prepare_ahead=prepare_ahead,
        queue=queue,
        timeout_s=timeout,
        upload_bytes=upload_mb * _MB,
        session_bytes=session_mb * _MB,
        state_bytes=None if state_mb is None else state_mb * _MB,
    )
    prompt = settings.system_prompt if system_prompt is None else system_prompt
    _check_port(host, port)
    with KnowledgeBase.open(
        store,
        model or settings.model,
        system_prompt=text_or_file(prompt),
        tenant=settings.tenant if tenant is None else tenant,
        create=False,
        read_only=read_only,
        device=device or settings.device,
        dtype=dtype or settings.dtype,
        workers=workers,
    ) as kb:
        if max_kl is not None:
            kb.watch(max_kl, _PROBE_SHARE if probe_share is None else probe_share)
        run(kb, served, host, port)


def run(kb: KnowledgeBase, settings: ServerSettings, host: str, port: int) -> None:
    """Serve until told to stop (SIGINT, SIGTERM); what runs then has a few seconds to finish."""
    require_server_packages()
    import uvicorn

    from hypic_rag.server.app import create_app

    class Announcing(uvicorn.Server):
        async def startup(self, sockets: list[socket.socket] | None = None) -> None:
            await super().startup(sockets)
            for listener in self.servers:
                for opened in listener.sockets:
                    name, number = opened.getsockname()[:2]
                    shown = f"[{name}]" if ":" in name else name
                    print(f"hypic_rag is at http://{shown}:{number}/", file=sys.stderr)

    config = uvicorn.Config(
        create_app(kb, settings),
        host=host.strip("[]"),
        port=port,
        log_level="warning",
        timeout_graceful_shutdown=10,
        server_header=False,
    )
    # The server sends itself the signal once more when it has stopped; the store is still to be
    # closed then.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(0))
    with contextlib.suppress(KeyboardInterrupt):
        Announcing(config).run()


def _check_port(host: str, port: int) -> None:
    """Find out before the model is loaded whether the port can be had.

    Raises:
        ServerError: it can't.
    """
    name = host.strip("[]")
    try:
        kind, _, _, _, address = socket.getaddrinfo(name, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(kind) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    except OSError as error:
        raise ServerError(
            f"The server can't listen at {host}, port {port} ({error.strerror}): stop what uses "
            "it, or choose another --port (0 takes a free one) or --host."
        ) from None


def require_server_packages() -> None:
    """Say how to install what's missing.

    Raises:
        ConfigError: a package of the extra ``server`` isn't installed.
    """
    from importlib.util import find_spec

    needed = ("fastapi", "uvicorn", "python_multipart", "prometheus_client")
    missing = [name for name in needed if find_spec(name) is None]
    if missing:
        raise ConfigError(
            f"Serving needs packages that aren't installed ({', '.join(missing)}): "
            "pip install 'hypic-rag[server]' brings them."
        )


def _check_probe(max_kl: float | None, share: float | None) -> None:
    """Refuse a probe that can't be made before the model is loaded for it."""
    if share is not None and max_kl is None:
        raise ConfigError("--probe-share needs --max-kl, the limit to compare with.")
    if share is not None and not 0.0 <= share <= 1.0:
        raise ConfigError(f"--probe-share is a share between 0 and 1, not {share:g}.")
    if max_kl is not None and not max_kl > 0:
        raise ConfigError(f"--max-kl is a KL in nats above 0, not {max_kl:g}.")


def _is_loopback(host: str) -> bool:
    if host.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False
