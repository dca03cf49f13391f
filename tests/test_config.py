from __future__ import annotations

import dataclasses
import re
import tomllib
from pathlib import Path

import pytest

from hypic_rag.config import Mode, Sampling, Seam, Settings
from hypic_rag.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "seam"),
    [
        ("default", Seam(4, 0)),
        ("none", Seam(0, 0)),
        ("paper", Seam(8, 8)),
        ("3/17", Seam(3, 17)),
    ],
)
def test_seams_are_read(text: str, seam: Seam) -> None:
    assert Seam.parse(text) == seam


@pytest.mark.parametrize("text", ["", "4", "-1/0", "4/0/0", "a/b", "wide"])
def test_bad_seams_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="HEAD/TAIL"):
        Seam.parse(text)


@pytest.mark.parametrize("widths", [(-1, 0), (0, -2), (1.5, 0), (True, 0)])
def test_seam_widths_are_checked(widths: tuple[int, int]) -> None:
    with pytest.raises(ConfigError, match=">= 0"):
        Seam(*widths)


def test_interiors() -> None:
    assert Seam(4, 0).interior(5) == (4, 5)
    assert Seam(4, 0).interior(4) == (0, 0)
    assert Seam(8, 8).interior(17) == (8, 9)
    assert Seam(8, 8).interior(16) == (0, 0)
    assert Seam(0, 0).interior(3) == (0, 3)


def test_modes() -> None:
    assert Mode.parse("transition_rope") is Mode.TRANSITION_ROPE
    with pytest.raises(ConfigError, match="addition"):
        Mode.parse("fastest")
    assert Mode.SEAM.seam(Seam(3, 1)) == Seam(3, 1)
    assert Mode.ADDITION.seam(Seam(3, 1)) == Seam(0, 0)


@pytest.mark.parametrize(
    "values",
    [{"max_tokens": 0}, {"temperature": -1.0}, {"temperature": float("nan")}, {"top_p": 0.0}],
)
def test_sampling_is_checked(values: dict[str, float]) -> None:
    with pytest.raises(ConfigError):
        Sampling(**values)  # type: ignore[arg-type]


def test_settings_file(tmp_path: Path) -> None:
    file = tmp_path / "settings.toml"
    file.write_text('top_k = 3\nmode = "addition"\n')
    assert Settings.load(file) == Settings(top_k=3, mode="addition")
    assert Settings.load(None) == Settings()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("topk = 3", "unknown settings: topk"),
        ('top_k = "three"', "top_k must be a number"),
        ("mode = 3", "mode must be text"),
        ("top_k = true", "top_k must be a number"),
        ("top_k = ", "no valid TOML"),
    ],
)
def test_bad_settings_files(tmp_path: Path, content: str, message: str) -> None:
    file = tmp_path / "settings.toml"
    file.write_text(content)
    with pytest.raises(ConfigError, match=message):
        Settings.load(file)


def test_missing_settings_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="can't be read"):
        Settings.load(tmp_path / "none.toml")


def test_the_readme_explains_every_setting(tmp_path: Path) -> None:
    readme = (Path(__file__).parent.parent / "README.md").read_text("utf-8")
    (example,) = re.findall(r"```toml\n(.*?)```", readme, re.DOTALL)
    file = tmp_path / "settings.toml"
    file.write_text(example, "utf-8")
    Settings.load(file)
    assert set(tomllib.loads(example)) == {item.name for item in dataclasses.fields(Settings)}
