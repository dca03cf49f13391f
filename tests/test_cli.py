"""The command line: results on stdout, one-line errors with a remedy, exit codes."""

from __future__ import annotations

import io
import json
import os
import re
import sys
from pathlib import Path

import pytest

from hypic_rag import cli, knowledge_base
from hypic_rag.families.model import HybridModel
from hypic_rag.store import SegmentStore

QUESTION = "Who is the captain of the ferry of Talmir?"


class Result:
    def __init__(self, code: int, out: str, err: str) -> None:
        self.code, self.out, self.err = code, out, err


class Runner:
    """Runs the command in this process, as the console script would."""

    def __init__(self, capsys: pytest.CaptureFixture[str], patch: pytest.MonkeyPatch) -> None:
        self._capsys, self._patch = capsys, patch

    def __call__(self, *arguments: object, stdin: str = "") -> Result:
        self._patch.setattr(sys, "argv", ["hypic-rag", *map(str, arguments)])
        self._patch.setattr(sys, "stdin", io.StringIO(stdin))
        self._capsys.readouterr()
        try:
            cli.main()
            code = 0
        except SystemExit as exit_:
            code = exit_.code if isinstance(exit_.code, int) else 0 if exit_.code is None else 1
        captured = self._capsys.readouterr()
        return Result(code, captured.out, captured.err)


@pytest.fixture
def run(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    small_model: HybridModel,
) -> Runner:
    # The shipped model is loaded once for all tests; anything else is loaded for real.
    load = knowledge_base.load_model

    def load_once(name: str = "small", *, device: str = "auto", dtype: str = "auto") -> HybridModel:
        plain = (name, device, dtype) == ("small", "auto", "auto")
        return small_model if plain else load(name, device=device, dtype=dtype)

    monkeypatch.setattr(knowledge_base, "load_model", load_once)
    return Runner(capsys, monkeypatch)


@pytest.fixture
def store(run: Runner, documents: Path, tmp_path: Path) -> Path:
    folder = tmp_path / "kb"
    result = run("ingest", documents, "--store", folder)
    assert result.code == 0, result.err
    return folder


def assert_refused(result: Result, message: str, code: int) -> None:
    """One line that says what's wrong, no traceback, nothing on stdout."""
    assert result.code == code, result.err
    assert message in result.err
    assert "Traceback" not in result.err
    assert result.out == ""
    errors = [line for line in result.err.splitlines() if line.startswith("error:")]
    assert len(errors) == 1


def test_ingest_reports(run: Runner, documents: Path, tmp_path: Path) -> None:
    result = run("ingest", documents, "--store", tmp_path / "kb", "--json")
    report = json.loads(result.out)
    assert sorted(report["added"]) == ["docs/ferry.md", "docs/mill.txt", "docs/prices.csv"]
    again = run("ingest", documents, "--store", tmp_path / "kb")
    assert "3 documents unchanged" in again.out
    assert again.code == 0


def test_ingest_exits_non_zero_if_a_file_failed(
    run: Runner, documents: Path, tmp_path: Path
) -> None:
    (documents / "empty.txt").write_text("")
    result = run("ingest", documents, "--store", tmp_path / "kb")
    assert result.code == 1
    assert "failed: " in result.err
    assert "empty.txt" in result.err
    assert "3 documents added" in result.out
    again = run("ingest", documents, "--store", tmp_path / "kb", "--json")
    assert (again.code, len(json.loads(again.out)["failed"])) == (1, 1)
    assert "failed: " in again.err


def test_states_are_stored_in_the_precision_asked_for(
    run: Runner, documents: Path, tmp_path: Path
) -> None:
    sizes = {}
    file = tmp_path / "settings.toml"
    file.write_text('state_precision = "compact"\n')
    for precision, options in (
        ("exact", []),
        ("low rank", ["--state-precision", "low rank"]),
        ("compact", ["--config", file]),
    ):
        store = tmp_path / precision
        result = run("ingest", documents, "--store", store, *options)
        assert result.code == 0, result.err
        told = json.loads(run("stats", "--store", store, "--json").out)
        assert told["settings"]["state_precision"] == precision
        sizes[precision] = told["statistics"]["state_bytes"]
        # What a store was made with needn't be said again, nor is it changed by the file.
        assert run("ingest", documents, "--store", store, "--config", file).code == 0
        assert run("ask", QUESTION, "--store", store, "--max-tokens", 2).code == 0
    assert sizes["exact"] > sizes["low rank"] > sizes["compact"]


def test_a_store_is_opened_once(run: Runner, store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = []
    real = SegmentStore.open

    def counting(path: Path, *options: object, **more: object) -> SegmentStore:
        opened.append(path)
        return real(path, *options, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(SegmentStore, "open", counting)
    assert run("ask", QUESTION, "--store", store, "--max-tokens", 2).code == 0
    assert opened == [store]


def test_dry_run_creates_nothing(run: Runner, documents: Path, tmp_path: Path) -> None:
    result = run("ingest", documents, "--store", tmp_path / "kb", "--dry-run")
    assert result.code == 0
    assert "would be added" in result.out
    assert not (tmp_path / "kb").exists()


def test_ask_as_json(run: Runner, store: Path) -> None:
    result = run("ask", QUESTION, "--store", store, "--top-k", 2, "--max-tokens", 4, "--json")
    answer = json.loads(result.out)
    assert result.code == 0
    assert answer["sources"][0]["document"] == "docs/ferry.md"
    assert set(answer["sources"][0]) >= {"document", "chunk", "score", "text"}
    assert set(answer["tokens"]) == {"prompt", "reused", "computed", "generated"}
    assert set(answer["timings"]) == {"retrieve_s", "load_s", "prefill_s", "ttft_s", "total_s"}
    assert answer["mode"] == "seam"
    assert answer["tokens"]["reused"] > answer["tokens"]["computed"]
    exact = run("ask", QUESTION, "--store", store, "--exact", "--max-tokens", 4, "--json")
    assert json.loads(exact.out)["mode"] == "full"
    assert json.loads(exact.out)["tokens"]["reused"] == 0


def test_repaired_tokens_are_computed(run: Runner, store: Path, tmp_path: Path) -> None:
    few = ("ask", QUESTION, "--store", store, "--max-tokens", 2, "--json")
    plain = json.loads(run(*few).out)["tokens"]
    repaired = json.loads(run(*few, "--repair-tokens", 100000).out)["tokens"]
    assert repaired["prompt"] == plain["prompt"]
    assert repaired["computed"] > plain["computed"] + plain["prompt"] // 4
    file = tmp_path / "settings.toml"
    file.write_text("repair_tokens = 100000\n")
    assert json.loads(run(*few, "--config", file).out)["tokens"] == repaired
    talked = run("chat", "--store", store, "--max-tokens", 2, "--config", file, stdin=QUESTION)
    assert f"{repaired['computed']} computed" in talked.err


def test_ask_as_text(run: Runner, store: Path) -> None:
    result = run("ask", QUESTION, "--store", store, "--max-tokens", 4)
    assert result.code == 0
    assert "[1] docs/ferry.md, chunk 0" in result.err
    assert "prompt tokens reused" in result.err


def test_chat(run: Runner, store: Path) -> None:
    lines = (
        f"/help\n/forget\n/sources\n{QUESTION}\n/sources\n/reset\nWhat does a rope cost?\n/quit\n"
    )
    result = run("chat", "--store", store, "--max-tokens", 4, stdin=lines)
    assert result.code == 0
    assert "Nothing was asked yet" in result.err
    assert "Unknown command /forget. Ask something." in result.err
    assert "[1] docs/ferry.md, chunk 0" in result.out
    assert result.err.count("first token after") == 2


def test_chat_ends_with_its_input(run: Runner, store: Path) -> None:
    assert run("chat", "--store", store, stdin="").code == 0


def test_inspect(run: Runner) -> None:
    result = run("inspect", "small")
    assert result.code == 0
    assert "supported" in result.out
    assert "dense" in result.out
    report = json.loads(run("inspect", "small", "--tokens", 100, "--json").out)
    assert report["segment_bytes"] == sum(
        layer["heads"] * layer["key_dim"] * (layer["key_dim"] + layer["value_dim"]) * 4
        + layer["channels"] * (layer["kernel"] - 1) * 4
        if layer["kind"] == "linear"
        else 2 * layer["kv_heads"] * layer["head_dim"] * 100 * 4
        for layer in report["layers"]
    )


def test_stats_and_repair(run: Runner, store: Path) -> None:
    held = json.loads(run("stats", "--store", store, "--json").out)
    assert held["statistics"]["documents"] == 3
    next(store.glob("states/*/*.safetensors")).unlink()
    report = json.loads(run("repair", "--store", store, "--json").out)
    assert report["problems"] == []
    text = run("repair", "--store", store).out
    assert re.search(r"^lost states +0$", text, re.MULTILINE)
    assert re.search(r"^problems +none$", text, re.MULTILINE)
    assert "documents" in run("stats", "--store", store).out


def test_settings_file(run: Runner, store: Path, tmp_path: Path) -> None:
    file = tmp_path / "settings.toml"
    file.write_text('top_k = 1\nmode = "addition"\nmax_tokens = 3\n')
    answer = json.loads(run("ask", QUESTION, "--store", store, "--config", file, "--json").out)
    assert (len(answer["sources"]), answer["mode"]) == (1, "addition")
    assert answer["tokens"]["generated"] <= 3


def test_system_prompt_from_a_file(run: Runner, store: Path, tmp_path: Path) -> None:
    file = tmp_path / "prompt.txt"
    file.write_text("Be brief.")
    served = run(
        "ask", QUESTION, "--store", store, "--system-prompt", f"@{file}", "--max-tokens", 2
    )
    assert served.code == 0
    missing = run("ask", QUESTION, "--store", store, "--system-prompt", "@/nowhere/prompt.txt")
    assert_refused(missing, "check the file", 2)


@pytest.mark.parametrize(
    ("question", "message"), [("", "question is empty"), ("why \udc80", "valid Unicode")]
)
def test_no_model_is_loaded_for_what_is_no_question(
    run: Runner, monkeypatch: pytest.MonkeyPatch, question: str, message: str
) -> None:
    monkeypatch.setattr(knowledge_base, "load_model", None)
    assert_refused(run("ask", question, "--store", "unopened"), message, 2)


@pytest.mark.parametrize(
    ("arguments", "message", "code"),
    [
        (["ask", QUESTION, "--top-k", "0"], "--top-k must be at least 1", 2),
        (["ask", QUESTION, "--mode", "fastest"], "Unknown mode 'fastest'", 2),
        (["ask", QUESTION, "--max-tokens", "0"], "max_tokens must be at least 1", 2),
        (["ask", QUESTION, "--repair-tokens", "-1"], "repair_tokens must be a whole number", 2),
        (["chat", "--repair-tokens", "-1"], "repair_tokens must be a whole number", 2),
        (["ask", "   "], "question is empty", 2),
        (["ask", "why " * 6000], "shorter question", 1),
        (["ask", QUESTION, "--model", "./no/such/model"], "There's no model", 1),
        (["ask", QUESTION, "--model", "nobody/nothing"], "can't be loaded", 1),
        (["ask", QUESTION, "--device", "abacus"], "Unknown device", 2),
        (["ask", QUESTION, "--model", ".", "--dtype", "int3"], "Unknown dtype", 2),
        (["ask", QUESTION, "--config", "none.toml"], "can't be read", 2),
        (["ingest", "/no/such/folder"], "No such file", 2),
        (["ingest", ".", "--seam", "wide"], "HEAD/TAIL", 2),
        (["ingest", ".", "--chunk-tokens", "64"], "is a store already", 2),
        (["ingest", ".", "--state-precision", "half"], "is a store already", 2),
        (["ingest", ".", "--state-precision", "tiny"], "exact, half, low rank, compact, small", 2),
    ],
)
def test_bad_input(run: Runner, store: Path, arguments: list[str], message: str, code: int) -> None:
    assert_refused(run(*arguments, "--store", store), message, code)
    # Whatever was refused, the store still opens.
    assert run("stats", "--store", store).code == 0


def test_what_is_refused_leaves_no_store(run: Runner, documents: Path, tmp_path: Path) -> None:
    for arguments in (
        ["/no/such/folder"],
        [documents, "--chunk-tokens", 1],
        [documents, "--state-precision", "tiny"],
    ):
        result = run("ingest", *arguments, "--store", tmp_path / "new")
        assert result.code == 2
        assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["ask", QUESTION, "--store", "kb", "--topk", "3"], "No such option: --topk"),
        (["ask", QUESTION, "--store", "kb", "--top-k", "few"], "--top-k"),
        (["ask"], "Missing argument 'question'"),
        (["query"], "No such command 'query'"),
        (["bench", "nothing"], "No such command 'nothing'"),
    ],
)
def test_wrong_command_lines(run: Runner, arguments: list[str], message: str) -> None:
    result = run(*arguments)
    assert_refused(result, message, 2)
    assert "--help" in result.err


def test_help_without_a_command(run: Runner) -> None:
    for arguments in ([], ["bench"]):
        result = run(*arguments)
        assert result.code == 2
        assert "Usage" in result.out + result.err


def test_missing_and_foreign_stores(run: Runner, tmp_path: Path) -> None:
    missing = run("ask", QUESTION, "--store", tmp_path / "none")
    assert_refused(missing, "no store", 1)
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    (foreign / "notes.txt").write_text("mine")
    assert_refused(run("ask", QUESTION, "--store", foreign), "no store", 1)
    assert_refused(run("ingest", foreign, "--store", foreign), "no store", 1)
    assert [path.name for path in foreign.iterdir()] == ["notes.txt"]


def test_an_empty_store(run: Runner, tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    assert run("ingest", empty, "--store", tmp_path / "kb").code == 0
    assert_refused(run("ask", QUESTION, "--store", tmp_path / "kb"), "ingest some", 1)
    other = run("ask", QUESTION, "--store", tmp_path / "kb", "--tenant", "ann")
    assert_refused(other, "no documents of the tenant 'ann'", 1)


def test_a_store_of_another_version(run: Runner, store: Path) -> None:
    import sqlite3

    connection = sqlite3.connect(store / "catalog.sqlite")
    connection.execute("PRAGMA user_version = 99")
    connection.commit()
    connection.close()
    before = (store / "catalog.sqlite").read_bytes()
    result = run("ask", QUESTION, "--store", store)
    assert_refused(result, "version", 1)
    assert (store / "catalog.sqlite").read_bytes() == before


def contents(store: Path) -> dict[Path, int]:
    """Everything in a store but what SQLite keeps beside an open database."""
    return {
        path: path.stat().st_mtime_ns
        for path in store.rglob("*")
        if path.is_file() and not path.name.startswith("catalog.sqlite-")
    }


def test_a_read_only_folder(
    run: Runner, store: Path, documents: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Asking goes on without writing anything; ingesting says what to do."""
    before = contents(store)
    access = os.access
    monkeypatch.setattr(
        os,
        "access",
        lambda path, how, **k: (
            not (how & os.W_OK and str(path).startswith(str(store))) and access(path, how, **k)
        ),
    )
    asked = run("ask", QUESTION, "--store", store, "--mode", "addition", "--max-tokens", 2)
    assert asked.code == 0, asked.err
    assert contents(store) == before
    (documents / "new.txt").write_text("Something new.")
    assert_refused(run("ingest", documents, "--store", store), "written", 1)


def test_an_unsupported_model_says_why(run: Runner, tmp_path: Path) -> None:
    from transformers import LlamaConfig

    LlamaConfig(num_hidden_layers=1, hidden_size=8, num_attention_heads=1).save_pretrained(
        tmp_path / "llama"
    )
    assert_refused(run("inspect", tmp_path / "llama"), "'llama', which isn't supported", 1)


def test_every_command_is_in_the_readme() -> None:
    readme = (Path(cli.__file__).parents[1] / "README.md").read_text(encoding="utf-8")
    names = [command.name or command.callback.__name__ for command in cli.app.registered_commands]
    assert names
    for name in names:
        assert f"hypic-rag {name}" in readme, name
