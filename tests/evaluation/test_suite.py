from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from hypic_rag import Mode, Seam
from hypic_rag.errors import ConfigError
from hypic_rag.evaluation import suite
from hypic_rag.evaluation.suite import evaluate, splitter, to_markdown
from hypic_rag.evaluation.tasks import DATASETS, METRICS, TASKS, Item, load_dataset, make_item
from hypic_rag.evaluation.verify import Variant
from hypic_rag.families.model import HybridModel

VARIANTS = [Variant(Mode.SEAM, Seam(4, 0)), Variant(Mode.ADDITION, Seam(0, 0))]
WORDS = {"count": lambda text: len(text.split())}


@pytest.mark.parametrize("task", sorted(TASKS))
def test_generated_items(task: str) -> None:
    item = make_item(task, 3, segments=6, tokens=60, **WORDS)
    assert item == make_item(task, 3, segments=6, tokens=60, **WORDS)
    assert item != make_item(task, 4, segments=6, tokens=60, **WORDS)
    assert len(item.segments) == 6
    assert all(60 <= len(text.split()) < 120 for text in item.segments)
    whole = "".join(item.segments)
    if task == "two_hop":
        names = [word for word in item.references[0].split() if word[0].isupper()]
        assert len(names) >= 2 and all(name in whole for name in names)
    else:
        assert all(reference in whole for reference in item.references)
    assert METRICS[item.metric](" and ".join(item.references), item.references) == 1.0
    assert METRICS[item.metric]("something else", item.references) == 0.0


def test_needles_lie_in_segments_of_their_own() -> None:
    for seed in range(5):
        item = make_item("multi_value", seed, segments=5, tokens=40, **WORDS)
        holders = [sum("once sailed" in text for text in item.segments)]
        assert holders == [3]
        item = make_item("variable_tracking", seed, segments=6, tokens=40, **WORDS)
        code = item.question.split()[3]
        order = [i for i, text in enumerate(item.segments) if f"badge {code.lower()}" in
                 text.lower()]  # fmt: skip
        assert len(order) == 4 and item.references[0] in item.segments[order[-1]]


def test_impossible_items_are_refused() -> None:
    with pytest.raises(ConfigError, match="Unknown task"):
        make_item("needle", 0, segments=4, tokens=60, **WORDS)
    with pytest.raises(ConfigError, match="at least 16 tokens"):
        make_item("two_hop", 0, segments=4, tokens=3, **WORDS)


ENTRIES = {
    "longbench": {
        "input": "Who?",
        "context": "Passage 1:\nA ferry.\n\nPassage 2:\nA mill.",
        "answers": ["Orla", "Orla Venn"],
    },
    "2wiki": {
        "question": "Who?",
        "context": [["Ferry", ["A ferry. ", "It floats."]], ["Mill", ["A mill."]]],
        "answer": "Orla",
    },
    "columns": {
        "question": "Who?",
        "context": {"title": ["Ferry", "Mill"], "sentences": [["A ferry."], ["A mill."]]},
        "answer": "Orla",
    },
    "musique": {
        "question": "Who?",
        "paragraphs": [
            {"title": "Ferry", "paragraph_text": "A ferry."},
            {"title": "Mill", "paragraph_text": "A mill."},
        ],
        "answer": "Orla",
        "answer_aliases": ["Orla Venn"],
    },
}


@pytest.mark.parametrize("form", sorted(ENTRIES))
@pytest.mark.parametrize("array", [True, False])
def test_sets_are_read_from_local_files(form: str, array: bool, tmp_path: Path) -> None:
    path = tmp_path / "set.json"
    entries = [ENTRIES[form]] * 2
    lines = "\n".join(json.dumps(entry) for entry in entries)
    path.write_text(json.dumps(entries) if array else lines)
    items = list(load_dataset("2wikimqa", path, split=lambda text: [text]))
    assert len(items) == 2
    assert [len(item.segments) for item in items] == [2, 2]
    assert items[0].question == "Who?" and items[0].references[0] == "Orla"
    assert "ferry" in items[0].segments[0] and "mill" in items[0].segments[1]
    assert items[0].metric == "f1"


def test_separators_inside_strings_and_marks_in_front_are_no_line_ends(tmp_path: Path) -> None:
    """Sets are often written without escapes, and on Windows with a byte order mark."""
    path = tmp_path / "set.jsonl"
    entry = {"input": "Who?", "context": "A\u2028ferry\x85 and a mill.", "answers": ["Orla"]}
    line = json.dumps(entry, ensure_ascii=False)
    path.write_text(f"{line}\r\n{line}\n", encoding="utf-8-sig")
    items = list(load_dataset("hotpotqa", path, split=lambda text: [text]))
    assert [item.segments for item in items] == [(entry["context"],)] * 2


def test_what_follows_the_answer_line_counts_only_where_longbench_says(tmp_path: Path) -> None:
    path = tmp_path / "set.jsonl"
    path.write_text(json.dumps({"input": "Who?", "context": "A mill.", "answers": ["Orla Venn"]}))
    for name, score in (("triviaqa", 1.0), ("hotpotqa", 0.5)):
        (item,) = load_dataset(name, path, split=lambda text: [text])
        answer = "\nOrla Venn\nQuestion: what?\nAnswer: that"
        found = METRICS[item.metric](answer, item.references)
        assert found == pytest.approx(score)


def test_summaries_get_their_instruction(tmp_path: Path) -> None:
    path = tmp_path / "set.jsonl"
    path.write_text(json.dumps({"input": "", "context": "News.", "answers": ["A summary."]}))
    (item,) = load_dataset("multi_news", path, split=lambda text: [text])
    assert item.question == DATASETS["multi_news"].instruction
    assert item.metric == "rouge_l"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "line 1 is no valid JSON"),
        ('{"input": "a"}', "entry 1"),
        ('{"input": "", "context": "a", "answers": ["b"]}', "no question"),
        ('{"input": "q", "context": "a", "answers": []}', "no answer"),
        ("[3]", "entry 1"),
    ],
)
def test_broken_sets_are_refused(content: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "set.jsonl"
    path.write_text(content)
    with pytest.raises(ConfigError, match=message):
        list(load_dataset("hotpotqa", path, split=lambda text: [text]))


def test_long_texts_are_cut_into_segments(small_model: HybridModel) -> None:
    split = splitter(small_model, 32)
    pieces = split("The mill stands by the river. " * 20)
    assert len(pieces) > 3
    prompt_ids = [small_model.tokenizer(p, add_special_tokens=False)["input_ids"] for p in pieces]
    assert all(len(ids) <= 32 for ids in prompt_ids)


def test_items_are_scored_in_every_mode(small_model: HybridModel) -> None:
    items = [make_item("single_needle", seed, segments=2, tokens=20, **WORDS) for seed in (0, 1)]
    too_long = Item(("word " * 5000,), "Why?", ("because",), "f1")
    scores = evaluate(small_model, "single_needle", [*items, too_long], VARIANTS, limit=6)
    assert [score.mode for score in scores] == ["full", "seam 4/0", "addition"]
    for score in scores:
        assert score.score.count == 2 and len(score.problems) == 1
        assert "context holds" in score.problems[0]
    full, seam, _ = scores
    assert full.kl.mean == 0.0 and full.difference.mean == 0.0
    assert 0 < seam.kl.mean < math.inf
    assert to_markdown(scores).count("\n") == 4


def test_the_command_runs_all_generated_tasks_in_all_modes(
    capsys: pytest.CaptureFixture[str],
) -> None:
    options = ["--items", "2", "--segments", "3", "--tokens", "24"]
    suite.main([*options, "--json"])
    rows = json.loads(capsys.readouterr().out)
    modes = ["full", "addition", "transition", "transition_rope", "seam 4/0", "seam 8/8"]
    assert [(row["task"], row["mode"]) for row in rows] == [
        (task, mode) for task in TASKS for mode in modes
    ]
    assert all(row["score"]["count"] == 2 and not row["problems"] for row in rows)
    # Among real questions the modes differ, and the default is the nearest to full recompute.
    divergence = {mode: sum(r["kl"]["mean"] for r in rows if r["mode"] == mode) for mode in modes}
    assert divergence["full"] == 0 < divergence["seam 4/0"] < divergence["addition"]
    suite.main(["two_hop", *options, "--modes", "seam", "--seams", "default"])
    assert capsys.readouterr().out.count("| two_hop |") == 2


def test_unknown_tasks_and_files_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        suite.main(["three_hop"])
    assert stop.value.code == 2
    assert "Unknown task 'three_hop'" in capsys.readouterr().err
    with pytest.raises(SystemExit) as stop:
        suite.main(["two_hop", "hotpotqa", "--file", "nowhere.jsonl"])
    assert stop.value.code == 2
