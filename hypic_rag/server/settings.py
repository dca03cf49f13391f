"""What a server is started with: limits, times, and who may ask."""

from __future__ import annotations

import hashlib
import hmac
import tomllib
from dataclasses import dataclass, field
from pathlib import Path

from hypic_rag.config import Mode
from hypic_rag.errors import ConfigError

__all__ = ["ApiKeys", "ServerSettings"]

_DIGEST = "sha256:"


@dataclass(frozen=True)
class ApiKeys:
    """API keys, each with its tenant, and the key for the metrics; kept as digests only.

    Attributes:
        tenants: tenant by the SHA-256 (hex) of the key.
        metrics: SHA-256 (hex) of the key that reads the metrics.
    """

    tenants: dict[str, str] = field(default_factory=dict)
    metrics: str | None = None

    @classmethod
    def load(cls, path: str | Path) -> ApiKeys:
        """Read a key file (TOML)::

            metrics = "a key that reads /metrics"    # may be left out

            [keys]
            "a secret key" = "tenant-a"
            "sha256:9f86d081..." = "tenant-b"        # the digest of a key, in hex

        Raises:
            ConfigError: the file can't be read, or isn't one of this form.
        """
        try:
            values = tomllib.loads(Path(path).read_text(encoding="utf-8"))
        except OSError as error:
            raise ConfigError(f"The key file {path} can't be read: {error.strerror}.") from None
        except (tomllib.TOMLDecodeError, UnicodeDecodeError):
            # What's wrong isn't quoted: it could be a key.
            raise ConfigError(f"The key file {path} is no valid TOML.") from None
        unknown = sorted(set(values) - {"keys", "metrics"})
        if unknown:
            raise ConfigError(f"The key file {path} has unknown entries: {', '.join(unknown)}.")
        keys, metrics = values.get("keys"), values.get("metrics")
        if not isinstance(keys, dict) or not keys:
            raise ConfigError(f"The key file {path} needs a table [keys] with at least one key.")
        if not all(isinstance(tenant, str) for tenant in keys.values()):
            raise ConfigError(f"The key file {path}: a key's value is the name of its tenant.")
        if metrics is not None and not isinstance(metrics, str):
            raise ConfigError(f"The key file {path}: metrics must be a key, in quotes.")
        return cls(
            {_digest(key, path): tenant for key, tenant in keys.items()},
            None if metrics is None else _digest(metrics, path),
        )

    def tenant(self, key: str) -> str | None:
        """Whose key this is, or None; every key takes the same time to compare."""
        given = hashlib.sha256(key.encode("utf-8", "surrogateescape")).hexdigest()
        found = None
        for digest, tenant in self.tenants.items():
            if hmac.compare_digest(digest, given):
                found = tenant
        return found

    def reads_metrics(self, key: str) -> bool:
        """Whether this key may read the metrics."""
        given = hashlib.sha256(key.encode("utf-8", "surrogateescape")).hexdigest()
        return self.metrics is not None and hmac.compare_digest(self.metrics, given)


def _digest(key: str, path: str | Path) -> str:
    if key.startswith(_DIGEST):
        digest = key.removeprefix(_DIGEST).lower()
        if len(digest) != 64 or set(digest) - set("0123456789abcdef"):
            raise ConfigError(f"The key file {path}: sha256: is followed by 64 hex digits.")
        return digest
    if len(key) < 8:
        raise ConfigError(f"The key file {path}: keys have at least 8 characters.")
    return hashlib.sha256(key.encode("utf-8")).hexdigest()


@dataclass(frozen=True, kw_only=True)
class ServerSettings:
    """Limits and defaults of a server.

    Attributes:
        keys: who may ask; None lets everyone ask for the knowledge base's own tenant.
        hosts: host names that requests may name while there are no keys, so that no foreign
            web page reaches the server through a name that it controls; None allows all.
        model_name: what clients call the model; by default its own name.
        top_k, mode, max_tokens: what a request gets that doesn't say.
        concurrency: answers that are made side by side, a token each in turns.
        prepare_ahead: whether another thread prepares the requests that wait while the model is
            busy, instead of the model's own thread when it's their turn.
        queue: requests that may wait for their turn; more are refused.
        timeout_s: the longest that a request may take, waiting included.
        body_bytes: largest body of a request.
        upload_bytes: largest body of an upload.
        upload_queue: uploads that may wait.
        session_bytes: memory for the caches of conversations.
        session_idle_s: how long an idle conversation keeps its cache.
        state_bytes: disk space for segment states; None sets no limit.
        suggestions: questions that the chat page offers.
    """

    keys: ApiKeys | None = None
    hosts: tuple[str, ...] | None = ("localhost", "127.0.0.1", "[::1]")
    model_name: str | None = None
    top_k: int = 5
    mode: Mode = Mode.SEAM
    max_tokens: int = 256
    concurrency: int = 16
    prepare_ahead: bool = True
    queue: int = 32
    timeout_s: float = 120.0
    body_bytes: int = 4 << 20
    upload_bytes: int = 64 << 20
    upload_queue: int = 8
    session_bytes: int = 1 << 30
    session_idle_s: float = 1800.0
    state_bytes: int | None = None
    suggestions: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        positive = (
            *("top_k", "max_tokens", "concurrency", "timeout_s"),
            *("body_bytes", "upload_bytes", "upload_queue"),
        )
        for name in positive:
            if getattr(self, name) <= 0:
                raise ConfigError(f"{name} must be more than 0, but is {getattr(self, name)}.")
        for name in ("queue", "session_bytes", "session_idle_s"):
            if getattr(self, name) < 0:
                raise ConfigError(f"{name} can't be negative, but is {getattr(self, name)}.")
        if self.state_bytes is not None and self.state_bytes < 0:
            raise ConfigError(f"state_bytes can't be negative, but is {self.state_bytes}.")
