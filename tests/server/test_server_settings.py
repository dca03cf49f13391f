from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from hypic_rag.errors import ConfigError
from hypic_rag.server.settings import ApiKeys, ServerSettings


def key_file(folder: Path, text: str) -> Path:
    path = folder / "keys.toml"
    path.write_text(text, encoding="utf-8")
    return path


def test_keys_have_tenants(tmp_path: Path) -> None:
    digest = hashlib.sha256(b"another-secret").hexdigest()
    path = key_file(
        tmp_path,
        f'metrics = "read-metrics"\n[keys]\n"first-secret" = "a"\n"sha256:{digest}" = "b"\n',
    )
    keys = ApiKeys.load(path)
    assert keys.tenant("first-secret") == "a"
    assert keys.tenant("another-secret") == "b"
    assert keys.tenant(f"sha256:{digest}") is None
    assert keys.tenant("") is None
    assert keys.tenant("read-metrics") is None
    assert keys.reads_metrics("read-metrics")
    assert not keys.reads_metrics("first-secret")
    assert "secret" not in repr(keys)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[keys]\n",
        '[keys]\n"long-enough-key" = 3\n',
        '[keys]\n"short" = "a"\n',
        '[keys]\n"sha256:12" = "a"\n',
        '[keys]\n"long-enough-key" = "a"\n[other]\n',
        'metrics = 3\n[keys]\n"long-enough-key" = "a"\n',
        '[keys]\n"unclosed-secret = "a"\n',
    ],
)
def test_wrong_key_files(tmp_path: Path, text: str) -> None:
    with pytest.raises(ConfigError, match="key") as caught:
        ApiKeys.load(key_file(tmp_path, text))
    assert "unclosed-secret" not in str(caught.value)


def test_a_missing_key_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="can't be read"):
        ApiKeys.load(tmp_path / "none.toml")


@pytest.mark.parametrize(
    "wrong",
    [
        {"top_k": 0},
        {"concurrency": 0},
        {"queue": -1},
        {"timeout_s": 0.0},
        {"body_bytes": 0},
        {"session_bytes": -1},
        {"state_bytes": -1},
    ],
)
def test_wrong_settings(wrong: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        ServerSettings(**wrong)  # type: ignore[arg-type]
