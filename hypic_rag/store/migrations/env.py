"""Run by Alembic for every command, on the connection that the command was given."""

from __future__ import annotations

from alembic import context

from hypic_rag.store.schema import Base
from hypic_rag.store.sqlite import SEARCH_TABLE


def _is_described(name: str | None, type_: str, parent_names: object) -> bool:
    """Whether the models describe it: the full-text index and its parts aren't among them."""
    return not (type_ == "table" and name is not None and name.startswith(SEARCH_TABLE))


context.configure(
    connection=context.config.attributes["connection"],
    target_metadata=Base.metadata,
    include_name=_is_described,
)
with context.begin_transaction():
    context.run_migrations()
