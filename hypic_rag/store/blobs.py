"""Segment states as files: one safetensors file each, named for its key, never half-written."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import re
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from hypic_rag.config import Seam
from hypic_rag.errors import ConfigError, StateMismatchError
from hypic_rag.segments import SegmentKey
from hypic_rag.store import files

if TYPE_CHECKING:
    from torch import Tensor

    from hypic_rag.states import SegmentState

__all__ = ["DamagedFileError", "StateFiles", "encode_state"]

_NAME = re.compile(r"[0-9a-f]{64}\.safetensors")
_ENTRY = "hypic_rag.segment_state"
_Signature = tuple[int, int, int]


class DamagedFileError(Exception):
    """A state's file isn't what the catalogue or its own description says it is."""


@dataclass(frozen=True)
class FileDescription:
    """A file's size and the SHA-256 of its bytes."""

    bytes: int
    sha256: str


def encode_state(key: SegmentKey, state: SegmentState, precision: str = "exact") -> bytes:
    """The bytes of a file that holds ``state`` and says by itself which key it belongs to.

    A ``precision`` other than ``exact`` compresses it; the file then says by how much its layers
    may be off.

    Raises:
        StateMismatchError: the state isn't one of the key's segment.
    """
    from safetensors.torch import save

    _check_fit(key, state)
    described: dict[str, Any] = dict(state.metadata())
    held: Mapping[str, Tensor] = state.to_tensors()
    if precision != "exact":
        from hypic_rag.store.compression import LEVELS, compress

        packed = compress(state, LEVELS[precision])
        held = packed.tensors
        bounds = [dataclasses.asdict(bound) for bound in packed.bounds]
        described = {**packed.description, "precision": precision, "bounds": bounds}
    tensors = _own_storage(held)
    description = {
        "key": _key_to_json(key),
        "state": described,
        "tensors_sha256": _tensors_digest(tensors),
    }
    # A single entry, since safetensors writes several in no fixed order.
    return save(tensors, metadata={_ENTRY: json.dumps(description)})


class StateFiles:
    """The folders ``states/`` and ``quarantine/`` of a store."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._states = root / "states"
        self._quarantine = root / "quarantine"
        self._lock = threading.Lock()
        self._verified: dict[str, tuple[_Signature, str]] = {}

    def create_folders(self) -> None:
        """Make the folders that are missing."""
        self._states.mkdir(exist_ok=True)
        self._quarantine.mkdir(exist_ok=True)

    def name(self, digest: str) -> str:
        """Path of a state's file within ``states/``."""
        return f"{digest[:2]}/{digest}.safetensors"

    def path(self, digest: str) -> Path:
        """Path of a state's file."""
        return self._states / self.name(digest)

    @contextlib.contextmanager
    def prepared(self, digest: str, data: bytes) -> Iterator[IO[bytes]]:
        """A temporary file with ``data``, safe on the disk, that :meth:`publish` puts in place.

        Raises:
            StoreAccessError: the disk is full or the folder can't be written.
        """
        files.check_space(self._root, len(data))
        with files.temporary_file(self.path(digest)) as file:
            files.write_all(file, data)
            yield file

    def publish(self, digest: str, file: IO[bytes]) -> None:
        """Give a prepared file its final name, replacing an earlier one."""
        path = self.path(digest)
        os.replace(file.name, path)
        files.sync_folder(path.parent)

    def remove(self, digest: str) -> bool:
        """Delete a state's file, unless a reader has leased it; tells whether it is gone."""
        path = self.path(digest)
        descriptor = files.lock_exclusive(path)
        if descriptor is None:
            return not path.exists()
        try:
            path.unlink(missing_ok=True)
        finally:
            os.close(descriptor)
        with self._lock:
            self._verified.pop(digest, None)
        return True

    def quarantine(self, digest: str) -> Path | None:
        """Move a state's file out of the way; returns where to, or ``None`` if it's missing."""
        moment = datetime.now(UTC).strftime("%Y%m%dT%H%M%S%f")
        target = self._quarantine / f"{digest}-{moment}.safetensors"
        self._quarantine.mkdir(exist_ok=True)
        try:
            os.replace(self.path(digest), target)
        except FileNotFoundError:
            return None
        return target

    def digests(self) -> set[str]:
        """The digests of all files, by their names."""
        return {Path(name).stem for folder in self._folders() for name in _state_names(folder)}

    def remove_leftovers(self) -> int:
        """Remove what interrupted writes have left; returns how many files that were."""
        return sum(files.remove_leftovers(folder) for folder in self._folders())

    def quarantined(self) -> int:
        """How many files are in quarantine."""
        return sum(1 for _ in self._quarantine.glob("*.safetensors"))

    def describe(self, digest: str) -> FileDescription:
        """Size and SHA-256 of a state's file, read in full.

        Raises:
            FileNotFoundError: it's missing.
        """
        with self.path(digest).open("rb") as file:
            sha256 = hashlib.file_digest(file, "sha256").hexdigest()
            return FileDescription(os.fstat(file.fileno()).st_size, sha256)

    def load(self, key: SegmentKey, expected: FileDescription) -> SegmentState:
        """The state under ``key``, mapped into memory.

        The bytes are compared with ``expected`` once per process, and again when the file has
        changed.

        Raises:
            FileNotFoundError: there's no file.
            DamagedFileError: the file isn't what was expected.
        """
        from safetensors import SafetensorError, safe_open

        digest = key.digest
        path = self.path(digest)
        self._verify(digest, expected)
        before = _signature(path.stat())
        try:
            with safe_open(path, framework="pt") as file:
                description = json.loads((file.metadata() or {})[_ENTRY])
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            with self._lock:
                verified = self._verified.get(digest)
            if verified != (before, expected.sha256) or _signature(path.stat()) != before:
                raise DamagedFileError("it changed while it was being read")
            if _key_from_json(description["key"]) != key:
                raise DamagedFileError("it belongs to another key")
            return _decode(key, tensors, description)
        except FileNotFoundError:
            raise
        except (
            SafetensorError,
            StateMismatchError,
            ConfigError,
            KeyError,
            TypeError,
            ValueError,
        ) as error:
            raise DamagedFileError(f"it can't be read as a segment state ({error})") from error

    def identify(self, digest: str) -> SegmentKey:
        """The key that a file carries, after a check of all of its contents.

        Raises:
            FileNotFoundError: there's no file.
            DamagedFileError: the file isn't an intact state of the key that it's named for.
        """
        from safetensors import SafetensorError, safe_open

        try:
            with safe_open(self.path(digest), framework="pt") as file:
                description = json.loads((file.metadata() or {})[_ENTRY])
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            key = _key_from_json(description["key"])
            if key.digest != digest or description["tensors_sha256"] != _tensors_digest(tensors):
                raise DamagedFileError("its contents don't match its description")
            _decode(key, tensors, description)
        except FileNotFoundError:
            raise
        except (
            SafetensorError,
            StateMismatchError,
            ConfigError,
            KeyError,
            TypeError,
            ValueError,
        ) as error:
            raise DamagedFileError(f"it can't be read as a segment state ({error})") from error
        return key

    def _verify(self, digest: str, expected: FileDescription) -> None:
        with self.path(digest).open("rb") as file:
            signature = _signature(os.fstat(file.fileno()))
            with self._lock:
                if self._verified.get(digest) == (signature, expected.sha256):
                    return
            if signature[1] != expected.bytes:
                raise DamagedFileError(f"it has {signature[1]} bytes instead of {expected.bytes}")
            if hashlib.file_digest(file, "sha256").hexdigest() != expected.sha256:
                raise DamagedFileError("its digest is another than that in the catalogue")
        with self._lock:
            self._verified[digest] = (signature, expected.sha256)

    def _folders(self) -> list[Path]:
        with os.scandir(self._states) as entries:
            return [Path(entry.path) for entry in entries if entry.is_dir()]


def _state_names(folder: Path) -> list[str]:
    with os.scandir(folder) as entries:
        return [entry.name for entry in entries if _NAME.fullmatch(entry.name)]


def _signature(status: os.stat_result) -> _Signature:
    return status.st_ino, status.st_size, status.st_mtime_ns


def _check_fit(key: SegmentKey, state: SegmentState) -> None:
    if state.length != len(key.token_ids) or state.seam != key.seam:
        raise StateMismatchError(
            f"The key is for {len(key.token_ids)} tokens with the seam {key.seam}, but the state "
            f"has {state.length} tokens and the seam {state.seam}; encode the segment again."
        )


def _decode(
    key: SegmentKey, tensors: Mapping[str, Tensor], description: Mapping[str, Any]
) -> SegmentState:
    from hypic_rag.states import SegmentState

    described = description["state"]
    if "precision" in described:
        from hypic_rag.store.compression import CompressedState, LayerBound

        bounds = tuple(LayerBound(**bound) for bound in described["bounds"])
        state = CompressedState(tensors, described, bounds).expand()
    else:
        state = SegmentState.from_tensors(tensors, described)
    _check_fit(key, state)
    return state


def _own_storage(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """``tensors`` on the CPU, contiguous, none sharing memory with another."""
    owned: dict[str, Tensor] = {}
    taken: set[int] = set()
    for name, tensor in tensors.items():
        plain = tensor.detach().to("cpu").contiguous()
        storage = plain.untyped_storage()
        if storage.nbytes() != plain.nbytes or storage.data_ptr() in taken:
            plain = plain.clone()
        taken.add(plain.untyped_storage().data_ptr())
        owned[name] = plain
    return owned


def _tensors_digest(tensors: Mapping[str, Tensor]) -> str:
    import torch

    sha = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name]
        sha.update(f"{name}|{tensor.dtype}|{list(tensor.shape)}|".encode())
        sha.update(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return sha.hexdigest()


def _key_to_json(key: SegmentKey) -> dict[str, Any]:
    return {
        "format_version": key.format_version,
        "model": key.model,
        "tokenizer": key.tokenizer,
        "conditioning": key.conditioning,
        "tenant": key.tenant,
        "seam": [key.seam.head, key.seam.tail],
        "token_ids": list(key.token_ids),
    }


def _key_from_json(values: Mapping[str, Any]) -> SegmentKey:
    return SegmentKey(
        model=values["model"],
        tokenizer=values["tokenizer"],
        conditioning=values["conditioning"],
        seam=Seam(*values["seam"]),
        token_ids=tuple(values["token_ids"]),
        tenant=values["tenant"],
        format_version=values["format_version"],
    )
