"""Which files are found, in which order, and what they're called."""

import hashlib
import os
import pickle
from pathlib import Path

import pytest

from hypic_rag.errors import ConfigError, DocumentError
from hypic_rag.ingest.discovery import Found, Skipped, discover, folder_names, sha256_of


def make(root: Path, *names: str) -> None:
    for name in names:
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name)


def sources(*paths: Path, skipped: list[Skipped] | None = None) -> list[str]:
    return [found.source for found in discover(paths, skipped=skipped)]


def reasons(root: Path, skipped: list[Skipped]) -> dict[str, str]:
    return {entry.path.relative_to(root).as_posix(): entry.reason for entry in skipped}


def test_folder_in_order_of_names(tmp_path: Path) -> None:
    make(tmp_path, "docs/b.md", "docs/a/z.txt", "docs/a/B.PDF", "docs/c.html", "docs/a.txt")
    names = ["docs/a/B.PDF", "docs/a/z.txt", "docs/a.txt", "docs/b.md", "docs/c.html"]
    assert sources(tmp_path / "docs") == names


def test_found_is_a_value(tmp_path: Path) -> None:
    make(tmp_path, "docs/b.md")
    (found,) = discover([tmp_path / "docs"])
    status = (tmp_path / "docs/b.md").stat()
    assert found == Found(tmp_path / "docs/b.md", "docs/b.md", status.st_size, status.st_mtime_ns)
    assert pickle.loads(pickle.dumps(found)) == found


def test_source_stays_when_the_folder_moves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make(tmp_path, "x/docs/sub/a.md")
    before = sources(tmp_path / "x/docs")
    os.renames(tmp_path / "x/docs", tmp_path / "y/z/docs")
    assert sources(tmp_path / "y/z/docs") == before == ["docs/sub/a.md"]
    monkeypatch.chdir(tmp_path / "y/z/docs")
    assert sources(Path(".")) == before


def test_folders_of_the_same_name_are_told_apart(tmp_path: Path) -> None:
    make(tmp_path, "x/docs/a.md", "y/docs/a.md", "z/a.md")
    folders = [tmp_path / "x/docs", tmp_path / "y/docs", tmp_path / "z"]
    assert sources(*folders) == ["x/docs/a.md", "y/docs/a.md", "z/a.md"]


def test_folder_names_are_what_sources_begin_with(tmp_path: Path) -> None:
    make(tmp_path, "x/docs/a.md", "y/docs/a.md", "z/a.md")
    given = [tmp_path / "x/docs", tmp_path / "y/docs", tmp_path / "z/a.md"]
    assert folder_names(given) == ["x/docs", "y/docs"]
    assert [source.rpartition("/")[0] for source in sources(*given)] == ["x/docs", "y/docs", "z"]


def test_sources_never_collide(tmp_path: Path) -> None:
    make(tmp_path, "p/x/docs/a.md", "r/docs/a.md", "q/x/docs/a.md")
    with pytest.raises(ConfigError, match=r"another file is called 'x/docs/a\.md', too"):
        sources(tmp_path / "p/x/docs", tmp_path / "r/docs", tmp_path / "q/x")


def test_files_given_by_themselves(tmp_path: Path) -> None:
    make(tmp_path, "docs/a.md", "docs/.hidden.md", "docs/b.md", "docs/x.exe")
    skipped: list[Skipped] = []
    paths = [tmp_path / "docs" / name for name in ("b.md", ".hidden.md", "x.exe")]
    assert sources(*paths, tmp_path / "docs", skipped=skipped) == [
        "docs/b.md",
        "docs/.hidden.md",
        "docs/a.md",
    ]
    assert reasons(tmp_path, skipped)["docs/b.md"].startswith("found before")


def test_what_is_skipped_is_told(tmp_path: Path) -> None:
    make(tmp_path, "d/a.md", "d/.git/x.md", "d/.b.md", "d/run.exe", "d/Makefile")
    os.mkfifo(tmp_path / "d/pipe.txt")
    (tmp_path / "d/gone.md").symlink_to(tmp_path / "nowhere.md")
    skipped: list[Skipped] = []
    assert sources(tmp_path / "d", skipped=skipped) == ["d/a.md"]
    found = reasons(tmp_path / "d", skipped)
    assert found[".git"] == found[".b.md"] == "hidden"
    assert found["run.exe"] == "files ending in '.exe' aren't supported"
    assert found["Makefile"] == "files ending in 'nothing' aren't supported"
    assert found["pipe.txt"] == "no regular file"
    assert found["gone.md"].startswith("can't be read")
    assert len(found) == 6


def test_unreadable_folder_is_skipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make(tmp_path, "d/a.md", "d/locked/b.md")
    scandir = os.scandir

    def refuse(path: Path) -> object:
        if Path(path).name == "locked":
            raise PermissionError(13, "Permission denied")
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refuse)  # root may read everything
    skipped: list[Skipped] = []
    assert sources(tmp_path / "d", skipped=skipped) == ["d/a.md"]
    assert reasons(tmp_path / "d", skipped) == {"locked": "can't be read: Permission denied"}


def test_links_are_followed_once(tmp_path: Path) -> None:
    make(tmp_path, "d/a.md", "d/sub/b.md", "outside/c.md")
    (tmp_path / "d/sub/loop").symlink_to(tmp_path / "d")
    (tmp_path / "d/z.md").symlink_to(tmp_path / "d/a.md")
    (tmp_path / "d/out").symlink_to(tmp_path / "outside")
    (tmp_path / "d/self.md").symlink_to(tmp_path / "d/self.md")
    skipped: list[Skipped] = []
    assert sources(tmp_path / "d", skipped=skipped) == ["d/a.md", "d/out/c.md", "d/sub/b.md"]
    assert set(reasons(tmp_path / "d", skipped)) == {"sub/loop", "z.md", "self.md"}


def test_deep_folders(tmp_path: Path) -> None:
    make(tmp_path, "d/" + "x/" * 900 + "a.md")
    assert sources(tmp_path / "d") == ["d/" + "x/" * 900 + "a.md"]


def test_names_that_are_no_text(tmp_path: Path) -> None:
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / os.fsdecode(b"caf\xe9.md")).write_text("x")
    assert sources(tmp_path / "d") == ["d/caf\\xe9.md"]


def test_missing_paths_fail_before_anything_is_found(tmp_path: Path) -> None:
    make(tmp_path, "a.md")
    with pytest.raises(ConfigError, match=r"nowhere: No such file.*check the path"):
        discover([tmp_path / "a.md", tmp_path / "nowhere"])
    with pytest.raises(ConfigError, match="name at least one"):
        discover([])


def test_sha256(tmp_path: Path) -> None:
    data = os.urandom(3_000_001)
    (tmp_path / "a").write_bytes(data)
    assert sha256_of(tmp_path / "a") == hashlib.sha256(data).hexdigest()
    with pytest.raises(DocumentError, match="check the path"):
        sha256_of(tmp_path / "b")
