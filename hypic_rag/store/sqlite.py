"""All that is particular to SQLite: connections, full-text search, questions about JSON."""

from __future__ import annotations

import os
import sqlite3
import struct
import unicodedata
from contextlib import closing
from pathlib import Path
from typing import Any

from sqlalchemy import (
    ColumnElement,
    Connection,
    Engine,
    Integer,
    String,
    and_,
    case,
    column,
    create_engine,
    event,
    exists,
    false,
    func,
    literal_column,
    not_,
    or_,
    select,
    table,
    true,
)
from sqlalchemy.exc import DBAPIError
from sqlalchemy.orm import InstrumentedAttribute
from sqlalchemy.pool import NullPool, QueuePool

from hypic_rag.errors import HypicError, StoreAccessError, StoreFormatError
from hypic_rag.store.filters import AllOf, AnyOf, Condition, Filter, Scalar
from hypic_rag.store.records import STORE_FORMAT, encode_json
from hypic_rag.store.schema import Chunk, Document

__all__ = ["CREATE_SEARCH", "SEARCH_TABLE", "check_header", "condition_sql", "connect_engine"]

APPLICATION_ID = 0x48595049
BUSY_TIMEOUT_S = 60
SEARCH_TABLE = "chunk_search"

CREATE_SEARCH = (
    f"CREATE VIRTUAL TABLE {SEARCH_TABLE} USING fts5(text, heading, content='chunks', "
    "content_rowid='id', tokenize='unicode61 remove_diacritics 2')",
    f"CREATE TRIGGER {SEARCH_TABLE}_insert AFTER INSERT ON chunks BEGIN "
    f"INSERT INTO {SEARCH_TABLE}(rowid, text, heading) VALUES (new.id, new.text, new.heading); END",
    f"CREATE TRIGGER {SEARCH_TABLE}_delete AFTER DELETE ON chunks BEGIN "
    f"INSERT INTO {SEARCH_TABLE}({SEARCH_TABLE}, rowid, text, heading) "
    "VALUES ('delete', old.id, old.text, old.heading); END",
    f"CREATE TRIGGER {SEARCH_TABLE}_update AFTER UPDATE OF text, heading ON chunks BEGIN "
    f"INSERT INTO {SEARCH_TABLE}({SEARCH_TABLE}, rowid, text, heading) "
    "VALUES ('delete', old.id, old.text, old.heading); "
    f"INSERT INTO {SEARCH_TABLE}(rowid, text, heading) VALUES (new.id, new.text, new.heading); END",
)
"""The index over the chunks' text. Triggers keep it in the transactions that change the chunks."""

SEARCH = table(SEARCH_TABLE, column("rowid", Integer))
_SEARCH_ITSELF: ColumnElement[str] = literal_column(SEARCH_TABLE, String)
SEARCH_RANK: ColumnElement[float] = func.bm25(_SEARCH_ITSELF)
"""Lower is better. Words are weighed by how rare they are in the whole store."""


def connect_engine(path: Path, *, read_only: bool = False) -> Engine:
    """An engine on the existing database ``path``.

    Reading transactions see one snapshot. A writing one (execution option ``write``) takes the
    write lock at its start, so it can't fail half-way because another process has written.
    """
    frozen = read_only and not os.access(path.parent, os.W_OK)

    def connect() -> sqlite3.Connection:
        return _connect_frozen(path) if frozen else _connect(path, "mode=rw")

    engine = create_engine(
        "sqlite+pysqlite://",
        creator=connect,
        json_serializer=encode_json,
        # Without a lock on its file, a connection mustn't outlive its transaction.
        **({"poolclass": NullPool} if frozen else {"poolclass": QueuePool, "max_overflow": -1}),
    )

    @event.listens_for(engine, "connect")
    def configure(connection: sqlite3.Connection, _record: object) -> None:
        connection.create_function("casefold", 1, _casefold, deterministic=True)
        connection.execute("PRAGMA foreign_keys = ON")
        if read_only:
            connection.execute("PRAGMA query_only = ON")
        else:
            connection.execute("PRAGMA journal_mode = WAL")
            connection.execute("PRAGMA synchronous = NORMAL")

    @event.listens_for(engine, "begin")
    def begin(connection: Connection) -> None:
        write = connection.get_execution_options().get("write", False)
        connection.exec_driver_sql("BEGIN IMMEDIATE" if write else "BEGIN")

    return engine


def _casefold(value: object) -> str | None:
    """SQLite's own ``lower`` knows ASCII alone."""
    return value.casefold() if isinstance(value, str) else None


def _connect(path: Path, options: str) -> sqlite3.Connection:
    return sqlite3.connect(
        f"{path.absolute().as_uri()}?{options}",
        uri=True,
        isolation_level=None,
        check_same_thread=False,
        timeout=BUSY_TIMEOUT_S,
    )


def _connect_frozen(path: Path) -> sqlite3.Connection:
    """A connection to a database in a folder that can't be written.

    SQLite needs its two side files for the write-ahead log. Where they're missing and can't be
    made, nobody is writing, and the file may be read as it is.
    """
    connection = _connect(path, "mode=ro")
    try:
        connection.execute("SELECT 1 FROM sqlite_schema LIMIT 1")
    except sqlite3.OperationalError:
        connection.close()
        log = path.with_name(path.name + "-wal")
        if log.exists() and log.stat().st_size:
            raise
        return _connect(path, "immutable=1")
    return connection


def translate_error(error: DBAPIError, path: Path) -> HypicError | None:
    """The error to raise instead of the driver's; ``None`` for one that is a defect here."""
    name = getattr(error.orig, "sqlite_errorname", "")
    if name.startswith(("SQLITE_BUSY", "SQLITE_LOCKED")):
        return StoreAccessError(
            f"The store {path.parent} has been in use by another process for too long; "
            "wait for it to finish and try again."
        )
    if name.startswith("SQLITE_FULL"):
        return StoreAccessError(f"The disk of {path.parent} is full; free some space.")
    if name.startswith(("SQLITE_READONLY", "SQLITE_CANTOPEN", "SQLITE_PERM", "SQLITE_IOERR")):
        return StoreAccessError(
            f"The catalogue {path} can't be read or written ({error.orig}); "
            "check the folder, its permissions and its disk."
        )
    if name.startswith(("SQLITE_CORRUPT", "SQLITE_NOTADB", "SQLITE_ERROR")):
        return StoreFormatError(
            f"The catalogue {path} is damaged ({error.orig}); restore it from a copy, or create a "
            "new store and ingest again."
        )
    return None


def new_database(path: Path) -> None:
    """Make an empty database at ``path`` that is marked as a store's catalogue."""
    with closing(sqlite3.connect(path)) as connection:
        connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
        connection.execute(f"PRAGMA user_version = {STORE_FORMAT}")


def check_header(path: Path) -> None:
    """Check that ``path`` is a catalogue of this version, without opening it as a database.

    So a store of another version isn't changed in any way.

    Raises:
        StoreFormatError: it is something else, or of another version.
        StoreAccessError: it can't be read.
    """
    try:
        with path.open("rb") as file:
            header = file.read(100)
    except OSError as error:
        raise StoreAccessError(
            f"The store's catalogue {path} can't be read ({error.strerror}); "
            "check the permissions of the folder."
        ) from error
    if len(header) < 100 or not header.startswith(b"SQLite format 3\0"):
        raise StoreFormatError(
            f"The catalogue {path} is damaged: it isn't a database any more; "
            "restore it from a copy, or create a new store and ingest again."
        )
    (version,) = struct.unpack_from(">i", header, 60)
    (application,) = struct.unpack_from(">i", header, 68)
    if application != APPLICATION_ID:
        raise StoreFormatError(
            f"{path} is a database of another program, not a store's catalogue; "
            "give the folder of a store."
        )
    if version != STORE_FORMAT:
        raise StoreFormatError(
            f"The store {path.parent} has format version {version}, and this program reads "
            f"version {STORE_FORMAT}; use the program's version that made it, or create a new "
            "store and ingest again."
        )


def integrity_problems(connection: Connection) -> tuple[str, ...]:
    """What SQLite's own checks find wrong; empty for a healthy database."""
    found = [str(row[0]) for row in connection.exec_driver_sql("PRAGMA integrity_check")]
    dangling = connection.exec_driver_sql("PRAGMA foreign_key_check").all()
    return (*(text for text in found if text != "ok"), *(str(tuple(row)) for row in dangling))


def rebuild_search(connection: Connection) -> None:
    """Build the full-text index anew from the chunks."""
    connection.exec_driver_sql(f"INSERT INTO {SEARCH_TABLE}({SEARCH_TABLE}) VALUES ('rebuild')")


def search_expression(query: str) -> str:
    """``query`` as a full-text expression that finds chunks with any of its words.

    All but letters, digits and the marks on them separates words, so nothing that a user types
    acts as an operator. Empty when no word is left.
    """
    kept = (char if unicodedata.category(char)[0] in "LNM" else " " for char in query)
    words = dict.fromkeys("".join(kept).lower().split())
    return " OR ".join(f'"{word}"' for word in list(words)[:256])


def search_matches(expression: str) -> ColumnElement[bool]:
    """The condition that the row of :data:`SEARCH` matches ``expression``."""
    return _SEARCH_ITSELF.op("MATCH", is_comparison=True)(expression)


def condition_sql(condition: Condition) -> ColumnElement[bool]:
    """``condition`` over a row of ``chunks`` joined with ``documents``."""
    if isinstance(condition, Filter):
        return _filter_sql(condition)
    if isinstance(condition, AllOf):
        return and_(true(), *(condition_sql(part) for part in condition.conditions))
    if isinstance(condition, AnyOf):
        return or_(false(), *(condition_sql(part) for part in condition.conditions))
    return not_(condition_sql(condition.condition))


def _filter_sql(condition: Filter) -> ColumnElement[bool]:
    if condition.op in ("ne", "nin"):
        positive: Any = "eq" if condition.op == "ne" else "in"
        return not_(_filter_sql(Filter(condition.field, positive, condition.value)))
    if condition.op == "empty" and condition.value:
        return not_(_filter_sql(Filter(condition.field, "empty", False)))
    built_in: dict[str, tuple[ColumnElement[Any], str]] = {
        "source": (Document.source.expression, "text"),
        "title": (Document.title.expression, "text"),
        "document_id": (Document.id.expression, "integer"),
        "chunk_id": (Chunk.id.expression, "integer"),
        "chunk_name": (Chunk.name.expression, "text"),
    }
    if condition.field in built_in:
        value, kind = built_in[condition.field]
        if condition.field == "chunk_name":
            value = func.coalesce(value, "")
        return _compare(condition, value, literal_column(f"'{kind}'", String))
    return or_(
        _holds(Chunk.details, condition.field, condition),
        and_(
            not_(_holds(Chunk.details, condition.field)),
            _holds(Document.details, condition.field, condition),
        ),
    )


def _holds(
    details: InstrumentedAttribute[dict[str, Any]], name: str, condition: Filter | None = None
) -> ColumnElement[bool]:
    """Whether the object ``details`` has a member ``name`` (one that ``condition`` is true of)."""
    members = func.json_each(details).table_valued("key", "value", "type")
    one: ColumnElement[int] = literal_column("1", Integer)
    found = select(one).select_from(members).where(members.c.key == name)
    if condition is not None:
        found = found.where(_compare(condition, members.c.value, members.c.type))
    return exists(found.correlate(Chunk, Document))


def _compare(
    condition: Filter, value: ColumnElement[Any], kind: ColumnElement[str]
) -> ColumnElement[bool]:
    """``condition`` on one JSON value of the given kind, as ``json_each`` names kinds."""
    if condition.op == "contains":
        wanted = condition.values[0]
        # Only a list may reach json_each: other text needn't be JSON.
        listed = case((kind == "array", value), else_="[]")
        elements = func.json_each(listed).table_valued("value", "type")
        inside = exists(
            select(literal_column("1"))
            .select_from(elements)
            .where(_equals(wanted, elements.c.value, elements.c.type))
        )
        if not isinstance(wanted, str):
            return inside
        return or_(and_(kind == "text", func.instr(value, wanted) > 0), inside)
    if condition.op in ("eq", "in"):
        return or_(false(), *_equals_any(condition.values, value, kind))
    wanted = condition.values[0]
    if condition.op == "empty":
        return case(
            (kind == "text", value != ""), (kind == "array", value != "[]"), else_=kind != "null"
        )
    if condition.op == "icontains":
        return and_(kind == "text", func.instr(func.casefold(value), str(wanted).casefold()) > 0)
    compared = {
        "gt": value > wanted,
        "gte": value >= wanted,
        "lt": value < wanted,
        "lte": value <= wanted,
    }[condition.op]
    return and_(_is_kind(wanted, kind), compared)


def _equals_any(
    values: tuple[Scalar, ...], value: ColumnElement[Any], kind: ColumnElement[str]
) -> list[ColumnElement[bool]]:
    texts = [item for item in values if isinstance(item, str)]
    numbers = [item for item in values if not isinstance(item, str | bool)]
    parts = [_equals(item, value, kind) for item in values if isinstance(item, bool)]
    if texts:
        parts.append(and_(kind == "text", value.in_(texts)))
    if numbers:
        parts.append(and_(kind.in_(["integer", "real"]), value.in_(numbers)))
    return parts


def _equals(
    wanted: Scalar, value: ColumnElement[Any], kind: ColumnElement[str]
) -> ColumnElement[bool]:
    if isinstance(wanted, bool):
        return kind == ("true" if wanted else "false")
    return and_(_is_kind(wanted, kind), value == wanted)


def _is_kind(wanted: Scalar, kind: ColumnElement[str]) -> ColumnElement[bool]:
    return kind == "text" if isinstance(wanted, str) else kind.in_(["integer", "real"])
