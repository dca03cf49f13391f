"""Conditions on metadata: a small typed tree that any database can be asked with."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

from hypic_rag.errors import ConfigError

__all__ = ["AllOf", "AnyOf", "Condition", "Filter", "Not", "Operator", "Scalar"]

Operator = Literal[
    "eq", "ne", "gt", "gte", "lt", "lte", "in", "nin", "contains", "icontains", "empty"
]
Scalar = str | int | float | bool

_OPERATORS = get_args(Operator)
_MAX_VALUES = 10_000


@dataclass(frozen=True)
class Filter:
    """One condition on a field.

    ``field`` is ``source``, ``title``, ``document_id``, ``chunk_id``, ``chunk_name`` or a name in
    the metadata, where a chunk's value covers its document's. Values are compared with values of
    their own kind only: text with text, numbers with numbers, booleans with booleans. ``in`` and
    ``nin`` take a tuple or list. ``contains`` is true for text with ``value`` in it and for lists
    with ``value`` as an element; ``icontains`` for text with ``value`` in it, whatever the case of
    either. ``empty`` takes True and is true where the field is missing, null, ``""`` or an empty
    list; with False it's the opposite. ``ne`` and ``nin`` are also true where the field is missing;
    all others but ``empty`` are false there.

    Raises:
        ConfigError: the operator is unknown or the value doesn't fit it.
    """

    field: str
    op: Operator
    value: Scalar | tuple[Scalar, ...] | list[Scalar]

    def __post_init__(self) -> None:
        if self.op not in _OPERATORS:
            raise ConfigError(
                f"Unknown filter operator {self.op!r}: expected one of {', '.join(_OPERATORS)}."
            )
        if not isinstance(self.field, str) or not self.field or not _is_unicode(self.field):
            raise ConfigError(f"A filter needs the name of a field, but has {self.field!r}.")
        many = isinstance(self.value, tuple | list)
        if many != (self.op in ("in", "nin")):
            raise ConfigError(
                f"The filter operator {self.op!r} takes "
                f"{'one value' if many else 'a list of values'}, but has {self.value!r}."
            )
        if len(self.values) > _MAX_VALUES:
            raise ConfigError(
                f"A filter takes at most {_MAX_VALUES} values, but has {len(self.values)}."
            )
        for value in self.values:
            _check_value(self.op, value)

    @property
    def values(self) -> tuple[Scalar, ...]:
        """The value or values, as a tuple."""
        return tuple(self.value) if isinstance(self.value, tuple | list) else (self.value,)

    def __and__(self, other: Condition) -> AllOf:
        return AllOf((self, other))

    def __or__(self, other: Condition) -> AnyOf:
        return AnyOf((self, other))


@dataclass(frozen=True)
class AllOf:
    """True where all ``conditions`` are; true everywhere when there are none."""

    conditions: tuple[Condition, ...]

    def __and__(self, other: Condition) -> AllOf:
        return AllOf((self, other))

    def __or__(self, other: Condition) -> AnyOf:
        return AnyOf((self, other))


@dataclass(frozen=True)
class AnyOf:
    """True where any of ``conditions`` is; true nowhere when there are none."""

    conditions: tuple[Condition, ...]

    def __and__(self, other: Condition) -> AllOf:
        return AllOf((self, other))

    def __or__(self, other: Condition) -> AnyOf:
        return AnyOf((self, other))


@dataclass(frozen=True)
class Not:
    """True where ``condition`` is not."""

    condition: Condition

    def __and__(self, other: Condition) -> AllOf:
        return AllOf((self, other))

    def __or__(self, other: Condition) -> AnyOf:
        return AnyOf((self, other))


Condition = Filter | AllOf | AnyOf | Not


def _check_value(op: str, value: Scalar) -> None:
    if not isinstance(value, str | int | float):
        raise ConfigError(f"A filter's value is text, a number or a boolean, not {value!r}.")
    if op == "empty" and not isinstance(value, bool):
        raise ConfigError(f"The filter operator 'empty' takes True or False, not {value!r}.")
    if op == "icontains" and not isinstance(value, str):
        raise ConfigError(f"The filter operator 'icontains' takes text, not {value!r}.")
    if isinstance(value, bool) and op in ("gt", "gte", "lt", "lte"):
        raise ConfigError(f"Booleans have no order, so {op!r} can't compare with {value!r}.")
    if isinstance(value, float) and not math.isfinite(value):
        raise ConfigError(f"A filter's value must be a finite number, not {value!r}.")
    if isinstance(value, int) and not -(2**63) <= value < 2**63:
        raise ConfigError(f"A filter's whole number must fit 64 bits, but is {value!r}.")
    if isinstance(value, str) and not _is_unicode(value):
        raise ConfigError(f"A filter's value has characters that aren't valid text: {value!r}.")


def _is_unicode(text: str) -> bool:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True
