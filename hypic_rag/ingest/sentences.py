"""Where sentences end: punctuation, abbreviations, and the full stops of other scripts."""

from __future__ import annotations

import re

__all__ = ["sentence_spans"]

_CLOSERS = r"[\"'”’»›)\]}」』】）]*"
_BOUNDARY = re.compile(
    rf"(?P<stop>[.!?…]+){_CLOSERS}(?=\s)"  # Latin, Cyrillic, Greek: a space must follow
    rf"|[。！？｡।॥؟۔።]+{_CLOSERS}"  # CJK, Devanagari, Arabic, Ethiopic
)
_DOTTED = re.compile(r"(?:[^\W\d_]\.)+[^\W\d_]")  # e.g, U.S
_OPENERS = "\"'“‘„«‹([{「『【（¿¡-–—*_#`"
_ENGLISH = """adj al approx apr aug ave ca capt cf co corp dec dept dr ed eds eg esp et ex feb gen
gov hon hrs ie inc jan jr jul jun lt ltd maj messrs mr mrs ms mt nov oct pres prof ref refs rep rev
sept sgt sr st viz vs"""
_GERMAN = """abb abs anm aufl bd bspw bzgl bzw dh dipl ebd evtl ggf hrsg ing inkl jh kap lfd mio mrd
sog str ua usw vgl zb zzgl"""
_ROMANCE = "av apr env mlle mme mgr sra srta sres dña dott ecc pag"
_ABBREVIATIONS = frozenset(f"{_ENGLISH} {_GERMAN} {_ROMANCE}".split())
_ALSO_WORDS = """art cap ch chap col eq est fig figs max min no nos nr op p par pl pp s sec tab tel
vol vols"""
_BEFORE_NUMBERS = frozenset(_ALSO_WORDS.split())


def sentence_spans(text: str, start: int = 0, end: int | None = None) -> list[tuple[int, int]]:
    """Cut ``text[start:end]`` into sentences: (start, end) pairs in order, without gaps.

    The white space behind a sentence belongs to it.
    """
    end = len(text) if end is None else end
    spans = []
    begin = start
    for match in _BOUNDARY.finditer(text, start, end):
        following = match.end()
        while following < end and text[following].isspace():
            following += 1
        if match["stop"] and not _ends_sentence(text, begin, match.start(), following, end):
            continue
        if following > begin:
            spans.append((begin, following))
            begin = following
    if begin < end:
        spans.append((begin, end))
    return spans


def _ends_sentence(text: str, begin: int, stop: int, following: int, end: int) -> bool:
    """Whether the punctuation at ``stop`` ends the sentence that starts at ``begin``."""
    if following >= end:
        return True
    first = text[following]
    if first in _OPENERS and following + 1 < end:
        first = text[following + 1]
    if first.islower():
        return text[stop] in "!?" and text[following] in _OPENERS
    if text[stop] != "." or text[stop : stop + 2] == "..":
        return True
    word_start = stop
    while word_start > begin and not text[word_start - 1].isspace() and stop - word_start < 20:
        word_start -= 1
    word = text[word_start:stop].lstrip(_OPENERS)
    if word.isdecimal() and not text[begin:word_start].strip():
        return False  # the number of an item or a heading
    if len(word) == 1 and (word.isupper() or text[following + 1 : following + 2] == "."):
        return False  # an initial, or "z. B."
    plain = word.casefold().replace(".", "")
    if first.isdecimal() and plain in _BEFORE_NUMBERS:
        return False
    return not _DOTTED.fullmatch(word) and plain not in _ABBREVIATIONS
