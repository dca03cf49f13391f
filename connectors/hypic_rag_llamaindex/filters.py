"""LlamaIndex's metadata filters as conditions of the store."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llama_index.core.vector_stores.types import (
    FilterCondition,
    FilterOperator,
    MetadataFilter,
    MetadataFilters,
)

from hypic_rag.errors import ConfigError
from hypic_rag.store import AllOf, AnyOf, Condition, Filter, Not
from hypic_rag_llamaindex.nodes import NODE_TYPE, RESERVED, stored_name

__all__ = ["condition_of"]

_COMPARISONS: dict[str, Any] = {
    "==": "eq",
    "!=": "ne",
    ">": "gt",
    ">=": "gte",
    "<": "lt",
    "<=": "lte",
}
_IS_NODE = Filter(NODE_TYPE, "empty", False)
_IS_FILE_CHUNK = Filter(NODE_TYPE, "empty", True)


def condition_of(filters: MetadataFilters | None) -> Condition | None:
    """The condition that asks for the same; all operators, and nested groups.

    Raises:
        ConfigError: it isn't MetadataFilters, or a filter's value doesn't fit its operator.
    """
    if filters is None:
        return None
    if not isinstance(filters, MetadataFilters):
        raise ConfigError(
            f"Filters are given as MetadataFilters(filters=[...]), not as {type(filters).__name__}."
        )
    if not filters.filters:
        return None
    parts = tuple(
        condition_of(part) or AllOf(()) if isinstance(part, MetadataFilters) else _filter(part)
        for part in filters.filters
    )
    condition = filters.condition or FilterCondition.AND
    if condition == FilterCondition.AND:
        return AllOf(parts)
    if condition == FilterCondition.OR:
        return AnyOf(parts)
    return Not(AnyOf(parts))


def _filter(asked: MetadataFilter) -> Condition:
    make = _maker(asked)
    if asked.key not in RESERVED:
        return make(asked.key)
    return AnyOf(
        (
            AllOf((_IS_NODE, make(stored_name(asked.key)))),
            AllOf((_IS_FILE_CHUNK, make(asked.key))),
        )
    )


def _maker(asked: MetadataFilter) -> Callable[[str], Condition]:
    """What makes the condition, given the name that the store has for the field."""
    operator, value = asked.operator, asked.value
    if operator == FilterOperator.IS_EMPTY:
        return lambda field: Filter(field, "empty", True)
    if operator in (FilterOperator.ANY, FilterOperator.ALL):
        values = _several(asked)
        group = AnyOf if operator == FilterOperator.ANY else AllOf
        return lambda field: group(tuple(Filter(field, "contains", item) for item in values))
    if operator in (FilterOperator.IN, FilterOperator.NIN):
        listed = _several(asked)
        return lambda field: Filter(field, operator.value, listed)
    if value is None or isinstance(value, list):
        raise ConfigError(
            f"The filter {operator.value!r} on {asked.key!r} takes one value, not {value!r}; "
            "use 'is_empty' for missing ones and 'in' for several."
        )
    if operator == FilterOperator.CONTAINS:
        return lambda field: Filter(field, "contains", value)
    if operator == FilterOperator.TEXT_MATCH:
        if not isinstance(value, str):
            raise ConfigError(
                f"The filter 'text_match' on {asked.key!r} takes text, not {value!r}."
            )
        # Text alone: "contains" would also find an element of a list.
        return lambda field: AllOf((Filter(field, "contains", value), Filter(field, "gte", "")))
    if operator == FilterOperator.TEXT_MATCH_INSENSITIVE:
        return lambda field: Filter(field, "icontains", value)
    if operator.value in _COMPARISONS:
        return lambda field: Filter(field, _COMPARISONS[operator.value], value)
    raise ConfigError(f"The filter operator {operator.value!r} isn't supported.")


def _several(asked: MetadataFilter) -> tuple[Any, ...]:
    if not isinstance(asked.value, list):
        raise ConfigError(
            f"The filter {asked.operator.value!r} on {asked.key!r} takes a list of values, not "
            f"{asked.value!r}."
        )
    return tuple(asked.value)
