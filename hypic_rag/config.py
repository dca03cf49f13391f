"""Frozen settings: values that are passed on, never ambient state."""

from __future__ import annotations

import dataclasses
import enum
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from hypic_rag.errors import ConfigError

__all__ = [
    "STATE_PRECISIONS",
    "AnswerOptions",
    "Mode",
    "Sampling",
    "Seam",
    "Settings",
    "parse_state_precision",
    "text_or_file",
]

STATE_PRECISIONS = ("exact", "half", "low rank", "compact", "smallest")
"""How states may be compressed on the disk, the largest first."""


def parse_state_precision(text: str) -> str:
    """``text``, if it's one of :data:`STATE_PRECISIONS`.

    Raises:
        ConfigError: it isn't.
    """
    if text not in STATE_PRECISIONS:
        raise ConfigError(
            f"Unknown state precision {text!r}: expected one of {', '.join(STATE_PRECISIONS)}."
        )
    return text


@dataclass(frozen=True, order=True)
class Seam:
    """How many tokens at either end of a segment are recomputed in the true context.

    The first ``head`` and the last ``tail`` tokens of a segment are no part of its cached operators
    and cached keys and values (HYPIC, "seam window"). A segment of at most ``head + tail`` tokens
    has no interior and is always recomputed.

    Raises:
        ConfigError: a width is negative or no integer.
    """

    head: int = 4
    tail: int = 0

    def __post_init__(self) -> None:
        for name, width in (("head", self.head), ("tail", self.tail)):
            if isinstance(width, bool) or not isinstance(width, int) or width < 0:
                raise ConfigError(
                    f"The seam's {name} must be a whole number of tokens >= 0, but is {width!r}."
                )

    @classmethod
    def parse(cls, text: str) -> Seam:
        """Read ``"default"``, ``"none"``, ``"paper"`` (8/8) or ``"HEAD/TAIL"``."""
        named = {"default": cls(), "none": cls(0, 0), "paper": cls(8, 8)}
        if text in named:
            return named[text]
        head, slash, tail = text.partition("/")
        if not slash or not head.isdecimal() or not tail.isdecimal():
            raise ConfigError(
                f"A seam is 'default', 'none', 'paper' or 'HEAD/TAIL' such as '4/0', not {text!r}."
            )
        return cls(int(head), int(tail))

    def interior(self, length: int) -> tuple[int, int]:
        """Start and end of the cached interior of a segment of ``length`` tokens.

        The two are equal when the segment is too short to have one.
        """
        end = length - self.tail
        return (self.head, end) if end > self.head else (0, 0)

    def __str__(self) -> str:
        return f"{self.head}/{self.tail}"


class Mode(enum.StrEnum):
    """How the states of segments are put together; the ablation of the HYPIC paper, by name.

    ``FULL`` recomputes everything with the library's own forward. ``ADDITION`` adds the end states
    and ignores the transitions. ``TRANSITION`` applies ``h <- T h + e``. ``TRANSITION_ROPE`` also
    moves cached keys to their true positions. ``SEAM`` also recomputes the seams.

    The three modes in the middle have no seams: they use states of whole segments.
    """

    FULL = "full"
    ADDITION = "addition"
    TRANSITION = "transition"
    TRANSITION_ROPE = "transition_rope"
    SEAM = "seam"

    @classmethod
    def parse(cls, text: str) -> Mode:
        """The mode called ``text``; raises :class:`ConfigError` for an unknown name."""
        try:
            return cls(text)
        except ValueError:
            names = ", ".join(cls)
            raise ConfigError(f"Unknown mode {text!r}: expected one of {names}.") from None

    @property
    def applies_transition(self) -> bool:
        """Whether ``T`` is applied to what precedes a segment."""
        return self is not Mode.ADDITION

    @property
    def moves_keys(self) -> bool:
        """Whether cached keys are rotated to their true positions."""
        return self in (Mode.TRANSITION_ROPE, Mode.SEAM)

    def seam(self, seam: Seam) -> Seam:
        """The seam that states need in this mode: the given one, or none."""
        return seam if self is Mode.SEAM else Seam(0, 0)


@dataclass(frozen=True)
class Sampling:
    """How the next tokens are chosen.

    ``temperature`` 0 is greedy. ``top_p`` keeps the smallest set of tokens whose probability
    reaches it. ``seed`` makes sampling repeatable.
    """

    max_tokens: int = 256
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int | None = None

    def __post_init__(self) -> None:
        if self.max_tokens < 1:
            raise ConfigError(f"max_tokens must be at least 1, but is {self.max_tokens}.")
        if not 0.0 <= self.temperature < float("inf"):
            raise ConfigError(f"temperature must be a number >= 0, but is {self.temperature}.")
        if not 0.0 < self.top_p <= 1.0:
            raise ConfigError(f"top_p must lie in (0, 1], but is {self.top_p}.")


@dataclass(frozen=True)
class AnswerOptions:
    """How a prompt is computed and its answer generated, wherever its passages come from.

    Attributes:
        mode: how cached states are put together.
        sampling: how tokens are chosen.
        repair_tokens: cached tokens that may be recomputed in the true context, from the starts of
            the passages that matter most to the question.

    Raises:
        ConfigError: ``repair_tokens`` is negative or no whole number.
    """

    mode: Mode = Mode.SEAM
    sampling: Sampling = Sampling()
    repair_tokens: int = 0

    def __post_init__(self) -> None:
        tokens = self.repair_tokens
        if isinstance(tokens, bool) or not isinstance(tokens, int) or tokens < 0:
            raise ConfigError(f"repair_tokens must be a whole number >= 0, but is {tokens!r}.")

    @classmethod
    def of(
        cls,
        mode: Mode | str,
        sampling: Sampling | None = None,
        repair_tokens: int = 0,
        *,
        exact: bool = False,
    ) -> Self:
        """Options from what a caller gives; ``exact`` is the mode ``full``.

        Raises:
            ConfigError: the mode is unknown, or as the class.
        """
        chosen = Mode.FULL if exact else Mode.parse(mode)
        return cls(chosen, sampling or Sampling(), repair_tokens)


@dataclass(frozen=True)
class Settings:
    """What the command line takes its defaults from: the keys of a settings file (TOML).

    ``None`` leaves a choice to the store or to the library.
    """

    model: str | None = None
    device: str = "auto"
    dtype: str = "auto"
    system_prompt: str | None = None
    conditioning: str = "system prompt"
    chunk_tokens: int = 512
    seam: str = "default"
    state_precision: str = "exact"
    tenant: str = ""
    top_k: int = 5
    mode: str = "seam"
    repair_tokens: int = 0
    max_tokens: int = 256

    @classmethod
    def load(cls, path: str | Path | None) -> Settings:
        """Read a settings file; None gives the defaults.

        Raises:
            ConfigError: the file can't be read, is no TOML, or has an unknown key or a value of
                the wrong type.
        """
        if path is None:
            return cls()
        try:
            values = tomllib.loads(Path(path).read_text(encoding="utf-8"))
        except OSError as error:
            raise ConfigError(
                f"The settings file {path} can't be read: {error.strerror}."
            ) from None
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise ConfigError(f"The settings file {path} is no valid TOML: {error}.") from None
        return cls.from_dict(values, str(path))

    @classmethod
    def from_dict(cls, values: dict[str, Any], origin: str) -> Settings:
        """Settings from plain values; ``origin`` names them in errors."""
        known = {item.name: item for item in dataclasses.fields(cls)}
        unknown = sorted(set(values) - set(known))
        if unknown:
            raise ConfigError(
                f"{origin} has unknown settings: {', '.join(unknown)}. "
                f"Known are {', '.join(sorted(known))}."
            )
        for name, value in values.items():
            wanted = int if isinstance(known[name].default, int) else str
            if not isinstance(value, wanted) or isinstance(value, bool):
                raise ConfigError(
                    f"{origin}: {name} must be {'a number' if wanted is int else 'text'}, "
                    f"but is {value!r}."
                )
        return cls(**values)


def text_or_file(value: str | None) -> str | None:
    """``value``, or the content of the file that it names as ``@FILE``.

    Raises:
        ConfigError: the file can't be read as text.
    """
    if value is None or not value.startswith("@"):
        return value
    try:
        return Path(value[1:]).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{value[1:]} can't be read as text ({error}): check the file.") from None
