from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import fields, replace

import pytest
from store_samples import key_of

from hypic_rag.config import Seam
from hypic_rag.segments import SegmentKey

CHANGES = [
    ("model", "other"),
    ("tokenizer", "other"),
    ("conditioning", "other"),
    ("seam", Seam(2, 2)),
    ("seam", Seam(1, 2)),
    ("token_ids", (1, 2, 4)),
    ("token_ids", (1, 2)),
    ("token_ids", (1, 2, 3, 0)),
    ("tenant", "other"),
    ("format_version", 2),
]

KEY = SegmentKey("m", "t", "c", Seam(2, 1), (1, 2, 3), tenant="x")


@pytest.mark.parametrize(("name", "value"), CHANGES)
def test_every_field_changes_the_digest(name: str, value: object) -> None:
    assert replace(KEY, **{name: value}).digest != KEY.digest  # type: ignore[arg-type]


def test_no_field_is_forgotten() -> None:
    assert {name for name, _ in CHANGES} == {field.name for field in fields(SegmentKey)}


def test_fields_dont_run_into_each_other() -> None:
    pairs = [
        (replace(KEY, model="ab", tokenizer="c"), replace(KEY, model="a", tokenizer="bc")),
        (replace(KEY, model="t", tokenizer="m"), KEY),
        (replace(KEY, conditioning="cx", tenant=""), replace(KEY, conditioning="c", tenant="x")),
    ]
    for left, right in pairs:
        assert left.digest != right.digest


def test_all_processes_agree() -> None:
    code = (
        "from hypic_rag.config import Seam; from hypic_rag.segments import SegmentKey; "
        "print(SegmentKey('m', 't', 'c', Seam(2, 1), (1, 2, 3), tenant='x').digest)"
    )
    for seed in ("0", "1", "random"):
        environment = {**os.environ, "PYTHONHASHSEED": seed}
        output = subprocess.check_output([sys.executable, "-c", code], env=environment, text=True)
        assert output.strip() == KEY.digest


def test_the_digest_of_format_1_never_changes() -> None:
    assert KEY.format_version == 1
    assert KEY.digest == "78af84c28a504b41ecd60b920c9015c98f16e11029d664b59c2f74c67a837c17"


def test_equal_keys_have_equal_digests() -> None:
    assert key_of("some text").digest == key_of("some text").digest
