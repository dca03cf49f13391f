"""Which files to ingest, and what each is called in the store."""

from __future__ import annotations

import hashlib
import os
import stat
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from hypic_rag.errors import ConfigError, DocumentError
from hypic_rag.ingest.readers import SUPPORTED_SUFFIXES

__all__ = ["Found", "Skipped", "discover", "folder_names", "sha256_of"]


@dataclass(frozen=True)
class Found:
    """A file to ingest.

    Attributes:
        path: where it is.
        source: its name in the store, with ``/`` on every system (see :func:`discover`).
        size: bytes.
        mtime_ns: time of the last change.
    """

    path: Path
    source: str
    size: int
    mtime_ns: int


@dataclass(frozen=True)
class Skipped:
    """A file or folder that was left out, and why."""

    path: Path
    reason: str


def discover(
    paths: Iterable[str | Path],
    *,
    skipped: list[Skipped] | None = None,
    suffixes: frozenset[str] = SUPPORTED_SUFFIXES,
) -> Iterator[Found]:
    """Expand files and folders, in the order given and each folder sorted by name.

    The source of a file is the name of the folder given, then the path below it:
    ``discover(["/srv/docs"])`` names ``/srv/docs/a/b.md`` "docs/a/b.md", so it stays the same when
    the folder is moved. A file given by itself is named by the folder it lies in and its own name.
    Where two of the folders given have the same name, as many outer folders are added to both as
    make them differ.

    Hidden files and folders (``.name``), other suffixes, unreadable folders and special files are
    left out; what was named explicitly may be hidden. Links are followed; a file or folder that is
    reached twice counts once.

    Args:
        paths: files and folders.
        skipped: takes up what was left out, and why.
        suffixes: the lower-case suffixes to find.

    Raises:
        ConfigError: a path doesn't exist, or there's none (at once); or two files would have the
            same source in spite of all that (while iterating).
    """
    given = [Path(path) for path in paths]
    if not given:
        raise ConfigError("No files or folders were given; name at least one.")
    for path in given:
        try:
            path.stat()
        except OSError as error:
            raise ConfigError(
                f"{path}: {error.strerror or error}; check the path and its permissions."
            ) from error
    walk = _Walk([] if skipped is None else skipped, suffixes)
    return walk.everything(given)


def folder_names(paths: Iterable[str | Path]) -> list[str]:
    """What the sources of files below each folder of ``paths`` begin with, as in :func:`discover`.

    Files given by themselves have no entry.
    """
    given = [Path(path) for path in paths]
    names = _names_of(given)
    return [name for path, name in zip(given, names, strict=True) if os.path.isdir(path)]


def sha256_of(path: str | Path) -> str:
    """SHA-256 (hex) of a file's content; raises :class:`DocumentError` when it can't be read."""
    try:
        with Path(path).open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise DocumentError(
            f"{path}: can't be read: {error.strerror or error}; check the path and its permissions."
        ) from error


class _Walk:
    """One pass over the paths given."""

    def __init__(self, skipped: list[Skipped], suffixes: frozenset[str]) -> None:
        self._skipped = skipped
        self._suffixes = suffixes
        self._seen: set[tuple[int, int]] = set()
        self._sources: set[str] = set()

    def everything(self, given: list[Path]) -> Iterator[Found]:
        for path, name in zip(given, _names_of(given), strict=True):
            if os.path.isdir(path):
                yield from self._folder(path, name)
            else:
                yield from self._file(path, name)

    def _folder(self, folder: Path, name: str) -> Iterator[Found]:
        """Depth first, without recursion: files and folders alike in the order of their names."""
        pending = [(folder, name)]
        while pending:
            path, prefix = pending.pop()
            if not os.path.isdir(path):
                yield from self._file(path, prefix)
                continue
            try:
                if self._is_repeated(path.stat(), path):
                    continue
                entries = sorted(os.scandir(path), key=lambda entry: entry.name, reverse=True)
            except OSError as error:
                self._skip(path, f"can't be read: {error.strerror or error}")
                continue
            for entry in entries:
                child = path / entry.name
                if entry.name.startswith("."):
                    self._skip(child, "hidden")
                elif os.path.isdir(child):
                    pending.append((child, f"{prefix}/{_printable(entry.name)}"))
                else:
                    pending.append((child, prefix))

    def _file(self, path: Path, prefix: str) -> Iterator[Found]:
        if path.suffix.lower() not in self._suffixes:
            self._skip(path, f"files ending in {path.suffix or 'nothing'!r} aren't supported")
            return
        try:
            status = path.stat()
        except OSError as error:
            self._skip(path, f"can't be read: {error.strerror or error}")
            return
        if not stat.S_ISREG(status.st_mode):
            self._skip(path, "no regular file")
        elif not self._is_repeated(status, path):
            source = f"{prefix}/{_printable(path.name)}".lstrip("/")
            if source in self._sources:
                raise ConfigError(
                    f"{path}: another file is called {source!r}, too; rename its folder, or ingest "
                    "the folder above both."
                )
            self._sources.add(source)
            yield Found(path, source, status.st_size, status.st_mtime_ns)

    def _is_repeated(self, status: os.stat_result, path: Path) -> bool:
        # The same path again is no news; another path to the same thing is.
        identity = (status.st_dev, status.st_ino)
        if identity not in self._seen:
            self._seen.add(identity)
            return False
        self._skip(path, "found before under another name, or given twice")
        return True

    def _skip(self, path: Path, reason: str) -> None:
        self._skipped.append(Skipped(path, reason))


def _names_of(given: list[Path]) -> list[str]:
    """For each path the name of the folder, or of the folder that a file lies in."""
    folders = [path.resolve() if os.path.isdir(path) else path.resolve().parent for path in given]
    names = _distinct_names(folders)
    return [names[folder] for folder in folders]


def _distinct_names(folders: Iterable[Path]) -> dict[Path, str]:
    """For each folder the shortest end of its path that no other one has."""
    distinct = set(folders)
    names: dict[Path, str] = {}
    length = 1
    while distinct:
        ends = {folder: _end(folder, length) for folder in distinct}
        uses = Counter(ends.values())
        done = {f for f in distinct if uses[ends[f]] == 1 or length >= len(f.parts)}
        names |= {folder: ends[folder] for folder in done}
        distinct -= done
        length += 1
    return names


def _end(folder: Path, length: int) -> str:
    return "/".join(_printable(part) for part in folder.parts[1:][-length:])


def _printable(name: str) -> str:
    """The name; bytes that are no UTF-8 as ``\\xNN``, so that any database can hold it."""
    return name.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")
