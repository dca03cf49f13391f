"""From a path to bytes, and from bytes to text, without losing a character."""

from __future__ import annotations

import codecs
import errno
import stat
from pathlib import Path

from charset_normalizer import from_bytes

from hypic_rag.errors import DocumentError

__all__ = ["DEFAULT_MAX_BYTES", "decode_text", "read_bytes"]

DEFAULT_MAX_BYTES = 100 * 2**20
"""Files above 100 MiB are refused unless the caller says otherwise."""

_SAMPLE_BYTES = 64 * 1024
_MAX_CONTROL_SHARE = 0.01
# UTF-32 first: its little-endian mark begins with that of UTF-16.
_BYTE_ORDER_MARKS = (
    (codecs.BOM_UTF8, "utf-8"),
    (codecs.BOM_UTF32_LE, "utf-32-le"),
    (codecs.BOM_UTF32_BE, "utf-32-be"),
    (codecs.BOM_UTF16_LE, "utf-16-le"),
    (codecs.BOM_UTF16_BE, "utf-16-be"),
)
# Every text fits these: a guess among them is a matter of frequency, and this order is it.
_FREQUENT_ENCODINGS = ("cp1252", "latin_1")


def read_bytes(path: Path, max_bytes: int) -> bytes:
    """The file's content; raises :class:`DocumentError` for anything but a readable, small file."""
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):
            raise DocumentError(f"{path}: this is no regular file; give the path of a document.")
        if status.st_size > max_bytes:
            raise DocumentError(
                f"{path}: {status.st_size:,} bytes are more than the limit of {max_bytes:,}; "
                "split the file or raise the limit (max_bytes)."
            )
        with path.open("rb") as file:
            data = file.read(max_bytes + 1)
    except OSError as error:
        raise DocumentError(f"{path}: {_reason(error)}") from error
    if len(data) > max_bytes:
        raise DocumentError(f"{path}: the file grew beyond {max_bytes:,} bytes while it was read.")
    if not data.strip():
        raise DocumentError(f"{path}: the file is empty; leave it out or fill it.")
    return data


def _reason(error: OSError) -> str:
    if error.errno in (errno.ENOENT, errno.ENOTDIR):
        return "there's no such file (any more); check the path."
    if error.errno in (errno.EACCES, errno.EPERM):
        return "permission denied; make the file readable for this user."
    return f"can't be read: {error.strerror or error}."


def decode_text(data: bytes, path: Path, declared: str | None = None) -> tuple[str, str]:
    """Decode a text file strictly; returns the text with ``\\n`` line ends, and the encoding.

    A byte order mark decides; then UTF-8, which hardly ever fits by chance; then the encoding that
    the file itself declares; then UTF-16 without a mark; then statistics (charset-normalizer).

    Raises:
        DocumentError: the bytes are binary, or no encoding fits all of them.
    """
    text, encoding = _decode(data, path, declared)
    if "\0" in text or _control_share(text) > _MAX_CONTROL_SHARE:
        raise DocumentError(
            f"{path}: this is binary data, not text; give the file the suffix of its true format."
        )
    text = text.replace("\r\n", "\n").replace("\r", "\n")
    if not text.strip():
        raise DocumentError(f"{path}: the file holds white space only; leave it out or fill it.")
    return text, encoding


def _decode(data: bytes, path: Path, declared: str | None) -> tuple[str, str]:
    for mark, encoding in _BYTE_ORDER_MARKS:
        if data.startswith(mark):
            text = _try(data[len(mark) :], encoding)
            if text is None:
                raise DocumentError(
                    f"{path}: it begins with a mark of {encoding.upper()} but isn't valid "
                    f"{encoding.upper()}; save it as UTF-8."
                )
            return text, encoding
    utf16 = _utf16_without_mark(data)
    for encoding in filter(None, (utf16, None if utf16 else "utf-8", declared)):
        text = _try(data, encoding)
        if text is not None:
            return text, encoding
    if b"\0" in data:  # no legacy encoding has zero bytes
        return "\0", "binary"
    for encoding in _guesses(data):
        text = _try(data, encoding)
        if text is not None:
            return text, encoding
    raise DocumentError(f"{path}: no known text encoding fits this file; save it as UTF-8.")


def _try(data: bytes, encoding: str) -> str | None:
    try:
        text = data.decode(encoding)
    except (UnicodeDecodeError, LookupError):
        return None
    # bytes-to-bytes codecs such as "hex" can be declared, too
    return text if isinstance(text, str) else None


def _utf16_without_mark(data: bytes) -> str | None:
    """UTF-16 when most characters of the sample have one zero byte, always on the same side."""
    sample = data[:_SAMPLE_BYTES]
    pairs = len(sample) // 2
    high, low = sample[0::2].count(0), sample[1::2].count(0)
    if len(data) % 2 or min(high, low) > pairs // 100 or max(high, low) < pairs // 4:
        return None
    if max(high, low) == 0:
        return None
    return "utf-16-be" if high > low else "utf-16-le"


def _guesses(data: bytes) -> list[str]:
    matches = list(from_bytes(data[:_SAMPLE_BYTES]))
    if not matches:
        return []
    best = matches[0]
    equally_clean = {
        name
        for match in matches
        if match.chaos <= best.chaos and match.coherence >= best.coherence
        for name in (match.encoding, *match.could_be_from_charset)
    }
    frequent = [name for name in _FREQUENT_ENCODINGS if name in equally_clean]
    return [*frequent, *(match.encoding for match in matches)]


def _control_share(text: str) -> float:
    sample = text[:_SAMPLE_BYTES]
    controls = sum(character < " " and character not in "\t\n\r\f\v\x1b" for character in sample)
    return controls / max(1, len(sample))
