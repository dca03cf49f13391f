from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hypic_rag.server.text import AnswerText


def sent(pieces: list[str], stops: list[str]) -> tuple[list[str], bool]:
    text = AnswerText(stops)
    given_out = []
    for piece in pieces:
        given_out.append(text.feed(piece))
        if text.stopped:
            break
    given_out.append(text.end())
    assert text.text == "".join(given_out)
    return [piece for piece in given_out if piece], text.stopped


@pytest.mark.parametrize(
    ("pieces", "stops", "expected", "stopped"),
    [
        (["one ", "two"], [], "one two", False),
        (["\n one", " \n"], [], "one", False),
        (["one STOP two"], ["STOP"], "one", True),
        (["one S", "TO", "P two"], ["STOP"], "one", True),
        (["one S", "TO"], ["STOP"], "one STO", False),
        (["one ST", "ART"], ["STOP"], "one START", False),
        (["aab"], ["ab", "b"], "a", True),
        (["STOP"], ["STOP"], "", True),
        (["one", "\n\n", "two"], ["\n\n"], "one", True),
        ([], ["x"], "", False),
    ],
)
def test_stop_sequences(pieces: list[str], stops: list[str], expected: str, stopped: bool) -> None:
    given_out, ended = sent(pieces, stops)
    assert "".join(given_out) == expected
    assert ended == stopped


def test_text_is_given_out_as_soon_as_it_can_be() -> None:
    text = AnswerText(["END"])
    assert text.feed("one") == "one"
    assert text.feed(" ") == ""
    assert text.feed("two") == " two"
    assert text.feed(" E") == ""
    assert text.feed("gg") == " Egg"


@given(
    st.lists(st.text("ab \n", max_size=4), max_size=8),
    st.lists(st.text("ab \n", min_size=1, max_size=3), max_size=2),
)
def test_cutting_agrees_with_cutting_the_whole_text(pieces: list[str], stops: list[str]) -> None:
    whole = "".join(pieces).lstrip()
    places = [whole.find(stop) for stop in stops if stop in whole]
    expected = whole[: min(places)] if places else whole
    given_out, stopped = sent(pieces, stops)
    assert "".join(given_out) == expected.rstrip()
    assert stopped == bool(places)
