from __future__ import annotations

import dataclasses
import subprocess
import sys

import pytest

from hypic_rag.config import Seam
from hypic_rag.errors import ConfigError
from hypic_rag.segments import Segment, SegmentKey

KEY = SegmentKey("model", "tokenizer", "prefix", Seam(4, 0), (1, 2, 3), "tenant")


@pytest.mark.parametrize(
    "change",
    [
        {"model": "modem"},
        {"tokenizer": "other"},
        {"conditioning": ""},
        {"seam": Seam(0, 4)},
        {"token_ids": (1, 2)},
        {"token_ids": (1, 2, 4)},
        {"tenant": ""},
        {"format_version": 2},
        # Characters that move from one field to the next mustn't give the same digest.
        {"model": "modelt", "tokenizer": "okenizer"},
    ],
)
def test_every_field_changes_the_digest(change: dict[str, object]) -> None:
    assert dataclasses.replace(KEY, **change).digest != KEY.digest


def test_the_digest_is_the_same_in_every_process() -> None:
    script = (
        "from hypic_rag.config import Seam\n"
        "from hypic_rag.segments import SegmentKey\n"
        "print(SegmentKey('model', 'tokenizer', 'prefix', Seam(4, 0), (1, 2, 3), 'tenant').digest)"
    )
    for seed in ("1", "2"):
        done = subprocess.run(
            [sys.executable, "-c", script],
            capture_output=True,
            text=True,
            check=True,
            env={"PYTHONHASHSEED": seed, "PYTHONPATH": ":".join(sys.path)},
        )
        assert done.stdout.strip() == KEY.digest


def test_a_segment_needs_tokens() -> None:
    with pytest.raises(ConfigError, match="at least one token"):
        Segment(())
