"""Files that appear whole or not at all, and locks that end with their owner."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from hypic_rag.errors import StoreAccessError

__all__ = [
    "TEMPORARY_SUFFIX",
    "check_space",
    "lock_exclusive",
    "lock_shared",
    "remove_leftovers",
    "sync_folder",
    "temporary_file",
]

TEMPORARY_SUFFIX = ".tmp"
SPACE_MARGIN = 64 << 20
# A database in the making has files of its own beside it.
_LEFTOVER = re.compile(rf"\..*{re.escape(TEMPORARY_SUFFIX)}(-wal|-shm|-journal)?")


def check_space(folder: Path, size: int) -> None:
    """Check that ``size`` more bytes fit, with a margin for the catalogue.

    Raises:
        StoreAccessError: they don't, or the folder is gone.
    """
    try:
        free = shutil.disk_usage(folder).free
    except OSError as error:
        raise StoreAccessError(
            f"The folder {folder} can't be reached ({error.strerror}): was the store moved or "
            "deleted? Put it back, or open it where it is now."
        ) from error
    if free < size + SPACE_MARGIN:
        raise StoreAccessError(
            f"The disk of {folder} has {free >> 20} MiB free, and writing {size >> 20} MiB needs "
            f"{(size + SPACE_MARGIN) >> 20} MiB; free some space or evict states."
        )


@contextlib.contextmanager
def temporary_file(target: Path) -> Iterator[IO[bytes]]:
    """A file beside ``target`` to be renamed to it; whatever isn't renamed is removed.

    The file is locked while it's open, so that another process can tell it from a leftover.

    Raises:
        StoreAccessError: the file can't be written, as when the disk is full.
    """
    file: IO[bytes] | None = None
    try:
        if not target.parent.exists():
            target.parent.mkdir(parents=True, exist_ok=True)
            sync_folder(target.parent.parent)
        file = _create_locked(target)
        yield file
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        raise StoreAccessError(
            f"{target} can't be written ({error.strerror}); "
            f"{'free some space' if full else 'check the folder and its permissions'}."
        ) from error
    finally:
        if file is not None:
            with contextlib.suppress(OSError):
                os.unlink(file.name)
            with contextlib.suppress(OSError):
                file.close()


def _create_locked(target: Path) -> IO[bytes]:
    while True:
        name = f".{target.name}.{secrets.token_hex(8)}{TEMPORARY_SUFFIX}"
        # Unbuffered, so that closing it after a failure has nothing left to write.
        file = target.with_name(name).open("xb", buffering=0)
        fcntl.flock(file, fcntl.LOCK_EX)
        if os.fstat(file.fileno()).st_nlink:  # else it was taken for a leftover before the lock
            return file
        file.close()


def write_all(file: IO[bytes], data: bytes | memoryview) -> None:
    """Write ``data`` and wait until it's on the disk."""
    rest = memoryview(data)
    while rest:
        rest = rest[file.write(rest) :]
    os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    """Wait until the folder's list of names is on the disk."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def remove_leftovers(folder: Path) -> int:
    """Remove temporary files that no living process is writing; returns how many."""
    removed = 0
    with os.scandir(folder) as entries:
        names = [entry.path for entry in entries if _LEFTOVER.fullmatch(entry.name)]
    for name in names:
        descriptor = lock_exclusive(Path(name))
        if descriptor is None:
            continue
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name)
            removed += 1
        os.close(descriptor)
    return removed


def lock_shared(path: Path) -> int | None:
    """A descriptor that keeps ``path`` from being deleted until it's closed or its owner dies.

    ``None`` when there's no such file or it can't be read.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    # A file system without locks protects nobody, but reading goes on: a state that vanishes
    # is computed again.
    with contextlib.suppress(OSError):
        fcntl.flock(descriptor, fcntl.LOCK_SH)
    return descriptor


def lock_exclusive(path: Path) -> int | None:
    """A descriptor that nobody shares ``path`` with; ``None`` if somebody does or it's gone."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    except OSError:
        pass
    return descriptor
