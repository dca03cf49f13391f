"""Laws of chunking: everything once, in order, within the limit, exactly as the model sees it."""

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hypic_rag.errors import ConfigError
from hypic_rag.ingest.chunking import SEPARATOR, Chunk, Tokenize, _without_blank, split_document
from hypic_rag.ingest.readers import Block, Document
from hypic_rag.ingest.sentences import sentence_spans

KINDS = ["paragraph", "heading", "code", "table", "list", "record"]


def words(text: str) -> list[int]:
    """A tokenizer of words, marks and line ends, as byte pair encodings have them."""
    return [len(piece) for piece in re.findall(r" ?\w{1,6}|\n+| +|[^\w\s]|\s", text)]


def letters(text: str) -> list[int]:
    return [ord(letter) for letter in text]


def utf8(text: str) -> list[int]:
    return list(text.encode("utf-8"))


def context_dependent(text: str) -> list[int]:
    """Counts that don't add up: the second half of a text costs more than the first."""
    half = len(text) // 2
    return [0] * (half // 3) + [1] * (len(text) - half)


TOKENIZERS: list[Tokenize] = [words, letters, utf8, context_dependent]


def document(*blocks: Block, title: str = "Manual") -> Document:
    return Document(title, "text/plain", blocks)


def paragraph(text: str, *heading: str) -> Block:
    return Block(text, heading)


def headed(*heading: str) -> Block:
    return Block(heading[-1], heading, kind="heading")


def sentences(count: int, word: str = "word") -> str:
    return " ".join(f"This is sentence number {i} about {word}." for i in range(count))


def dense(text: str) -> str:
    return "".join(text.split())


def check_laws(doc: Document, tokenize: Tokenize, limit: int, chunks: list[Chunk]) -> None:
    assert dense("".join(doc.text[c.start : c.end] for c in chunks)) == dense(doc.text)
    previous = 0
    for chunk in chunks:
        body = doc.text[chunk.start : chunk.end]
        assert previous <= chunk.start < chunk.end
        previous = chunk.end
        assert body == body.rstrip()
        assert body.strip()
        assert chunk.text.endswith(body + SEPARATOR)
        front = chunk.text[: -len(body + SEPARATOR)]
        assert front == "" or re.fullmatch(r"[^\n]+\n\n", front)
        assert chunk.token_ids == tuple(tokenize(chunk.text))
        assert len(chunk.token_ids) <= limit or len(body) == 1


@st.composite
def documents(draw: st.DrawFn) -> Document:
    texts = st.text(
        st.sampled_from("aB ñé字。.!?\n\t-:;|\u00a0\u2003€😀x1 "), min_size=1, max_size=150
    )
    long = st.builds(
        lambda text, count: text * count,
        st.sampled_from(["ab cd. ", "x", "字", "a\n", "1; "]),
        st.integers(1, 300),
    )
    blocks = []
    path: tuple[str, ...] = ()
    for _ in range(draw(st.integers(1, 12))):
        text = draw(texts | long).rstrip()
        text = re.sub(r"\A(?:[^\S\n]*\n)+", "", text)
        if not text:
            continue
        kind = draw(st.sampled_from(KINDS))
        if kind == "heading":
            text = " ".join(text.split())
            path = (*path[: draw(st.integers(0, 2))], text)
        blocks.append(Block(text, path, draw(st.none() | st.integers(1, 3)), kind))
    blocks = blocks or [Block("text")]
    return Document(
        draw(st.sampled_from(["T", "A long title " * 9, "字"])), "text/plain", tuple(blocks)
    )


@settings(max_examples=300, deadline=None)
@given(
    documents(),
    st.sampled_from(TOKENIZERS),
    st.integers(16, 90),
    st.none() | st.integers(0, 16),
)
def test_laws(doc: Document, tokenize: Tokenize, limit: int, least: int | None) -> None:
    chunks = split_document(doc, tokenize, limit, least)
    check_laws(doc, tokenize, limit, chunks)
    assert chunks == split_document(doc, tokenize, limit, least)


def test_short_document_is_one_chunk() -> None:
    doc = document(
        headed("Pump"),
        paragraph("It pumps.", "Pump"),
        headed("Pump", "Care"),
        paragraph("Oil it.", "Pump", "Care"),
        title="Pump",
    )
    (chunk,) = split_document(doc, words, 64)
    assert chunk.text == "Pump\n\nIt pumps.\n\nCare\n\nOil it.\n\n"
    assert (chunk.heading, chunk.start, chunk.end) == ("Pump", 0, len(doc.text))


def test_title_and_headings_lead_where_the_text_has_none() -> None:
    doc = document(
        headed("A"),
        headed("A", "B"),
        paragraph(sentences(30), "A", "B"),
        headed("A", "C"),
        paragraph(sentences(9, "more"), "A", "C"),
    )
    chunks = split_document(doc, words, 128)
    check_laws(doc, words, 128, chunks)
    assert chunks[0].text.startswith("Manual\n\nA\n\nB\n\nThis is sentence number 0")
    assert all(c.text.startswith("Manual > A > B\n\nThis is") for c in chunks[1:-1])
    assert chunks[-1].text.startswith("Manual > A\n\nC\n\nThis is")
    assert [c.heading for c in chunks] == ["A"] + ["A > B"] * (len(chunks) - 2) + ["A > C"]


def test_title_that_is_a_heading_is_not_repeated() -> None:
    doc = document(headed("Manual"), paragraph(sentences(40), "Manual"))
    chunks = split_document(doc, words, 128)
    assert chunks[0].text.startswith("Manual\n\nThis")
    assert chunks[1].text.startswith("Manual\n\nThis")


def test_chunks_end_with_sentences() -> None:
    doc = document(paragraph(sentences(100)))
    chunks = split_document(doc, words, 100)
    assert len(chunks) > 5
    assert all(chunk.text.endswith(".\n\n") for chunk in chunks)


def test_chunks_are_balanced_instead_of_leaving_a_rest() -> None:
    doc = document(paragraph(sentences(22)))
    lengths = [len(chunk.token_ids) for chunk in split_document(doc, words, 160)]
    assert len(lengths) == 2
    assert max(lengths) < 1.3 * min(lengths)


def test_paragraphs_stay_whole_when_they_fit() -> None:
    blocks = [paragraph(sentences(5, f"topic{i}")) for i in range(12)]
    doc = document(*blocks)
    chunks = split_document(doc, words, 150)
    cuts = {chunk.end for chunk in chunks}
    ends = [doc.text.index(block.text) + len(block.text) for block in blocks]
    assert cuts <= set(ends)


def test_chunks_follow_sections() -> None:
    doc = document(
        *(block for name in "ABCD" for block in (headed(name), paragraph(sentences(8, name), name)))
    )
    chunks = split_document(doc, words, 128)
    assert [chunk.heading for chunk in chunks] == ["A", "B", "C", "D"]


def test_tiny_sections_are_merged_with_their_neighbours() -> None:
    doc = document(
        *(
            block
            for i in range(40)
            for block in (headed(f"Term {i}"), paragraph("A short explanation.", f"Term {i}"))
        )
    )
    lengths = [len(chunk.token_ids) for chunk in split_document(doc, words, 128)]
    assert min(lengths) > 30
    assert len(lengths) < 10


def test_a_heading_goes_with_what_follows_it() -> None:
    doc = document(
        headed("I"),
        paragraph(sentences(9, "one"), "I"),
        headed("II"),
        headed("II", "x"),
        paragraph(sentences(30, "two"), "II", "x"),
    )
    chunks = split_document(doc, words, 128)
    assert chunks[0].heading == "I"
    assert chunks[1].text.startswith("Manual\n\nII\n\nx\n\nThis is sentence number 0 about two.")
    assert not any(re.search(r"\n\n(II|x)\n\n$", chunk.text) for chunk in chunks)


def test_a_heading_is_not_left_alone_by_a_block_that_just_does_not_fit() -> None:
    doc = document(headed("A"), paragraph(sentences(13), "A"), headed("B"), paragraph("b", "B"))
    chunks = split_document(doc, words, 125)
    check_laws(doc, words, 125, chunks)
    assert "sentence number 0" in chunks[0].text


def test_no_chunk_ends_with_a_heading() -> None:
    doc = document(
        headed("A"), paragraph(sentences(6), "A"), headed("B"), paragraph(sentences(8), "B"),
    )  # fmt: skip
    chunks = split_document(doc, words, 128, min_tokens=110)
    check_laws(doc, words, 128, chunks)
    assert not any(chunk.text.endswith("\n\nB\n\n") for chunk in chunks)


def test_a_cut_between_blocks_is_better_than_one_inside() -> None:
    doc = document(paragraph(sentences(19)), paragraph(sentences(8, "another")))
    ends = [chunk.end for chunk in split_document(doc, words, 128)]
    assert len(sentences(19)) in ends


def test_a_line_is_not_left_alone_when_the_estimate_was_too_low() -> None:
    def dear_ends(text: str) -> list[int]:
        return words(text) + [0] * (text.endswith(SEPARATOR) and len(text) > 300) * 12

    doc = document(paragraph("A line"), paragraph(sentences(10)), paragraph(sentences(9)))
    limit = len(dear_ends("Manual\n\nA line\n\n" + sentences(10) + SEPARATOR)) - 1
    chunks = split_document(doc, dear_ends, limit)
    check_laws(doc, dear_ends, limit, chunks)
    assert "sentence number 0" in chunks[0].text


def test_code_stays_whole() -> None:
    code = "\n".join(f"    line{i} = {i}" for i in range(12))
    doc = document(paragraph(sentences(6)), Block(code, kind="code"), paragraph(sentences(6)))
    chunks = split_document(doc, words, 128)
    assert sum(code in chunk.text for chunk in chunks) == 1


def test_long_tables_are_cut_between_rows_and_keep_indents() -> None:
    rows = "\n".join(f"  name: item {i}; price: {i}.50" for i in range(200))
    doc = document(Block(rows, kind="table"))
    chunks = split_document(doc, words, 100)
    check_laws(doc, words, 100, chunks)
    for chunk in chunks:
        assert doc.text[chunk.start : chunk.end].startswith("  name: item")
        assert re.search(r"price: \d+\.50\n\n$", chunk.text)


def test_short_lines_in_front_of_a_heading_and_a_long_block() -> None:
    doc = document(paragraph("A line"), headed("A"), paragraph(sentences(12), "A"))
    chunks = split_document(doc, words, 128)
    check_laws(doc, words, 128, chunks)
    assert "sentence number 0" in chunks[0].text


def test_rows_are_not_cut_at_their_sentences() -> None:
    rows = "\n".join(f"text: It came. It went. It was {i}; price: 3" for i in range(60))
    doc = document(Block(rows, kind="table"))
    for chunk in split_document(doc, words, 100):
        assert doc.text[chunk.start : chunk.end].startswith("text: ")


@pytest.mark.parametrize("spans", [[(0, 2), (2, 5)], [(0, 3), (3, 5)], [(0, 2), (2, 2), (2, 5)]])
def test_parts_of_white_space_lose_nothing(spans: list[tuple[int, int]]) -> None:
    text = "  a b"
    joined = _without_blank(text, spans)
    assert "".join(text[start:end] for start, end in joined) == text
    assert all(text[start:end].strip() for start, end in joined)


@pytest.mark.parametrize("text", ["x" * 5000, "字" * 3000, "word " * 3000, "a\n" * 3000])
def test_text_without_sentences(text: str) -> None:
    doc = document(paragraph(text.strip()))
    check_laws(doc, words, 64, split_document(doc, words, 64))
    check_laws(doc, utf8, 64, split_document(doc, utf8, 64))


def test_a_breadcrumb_never_crowds_out_the_text() -> None:
    path = ("A very long heading of the outermost level " * 5, "inner")
    doc = document(headed(path[0]), headed(*path), paragraph(sentences(40), *path))
    chunks = split_document(doc, words, 60)
    check_laws(doc, words, 60, chunks)
    assert chunks[-1].text.startswith("inner\n\nThis")


def test_pages() -> None:
    doc = document(*(Block(sentences(9, f"p{i}"), (), page=i) for i in range(1, 6)))
    chunks = split_document(doc, words, 128)
    assert [chunk.page for chunk in chunks] == [1, 2, 3, 4, 5]


def test_limits_are_checked() -> None:
    doc = document(paragraph("text"))
    with pytest.raises(ConfigError, match="at least 16"):
        split_document(doc, words, 15)
    with pytest.raises(ConfigError, match="min_tokens"):
        split_document(doc, words, 64, 65)


@pytest.mark.parametrize("joiner", [" ", "\n\n", "\n"])
@pytest.mark.parametrize("kind", ["paragraph", "table"])
def test_tokenising_is_linear(joiner: str, kind: str) -> None:
    text = joiner.join(f"This is sentence number {i} of a long document." for i in range(20_000))
    pieces = text.split("\n\n")
    doc = document(*(Block(piece, kind=kind) for piece in pieces))  # type: ignore[arg-type]
    seen = 0

    def counting(piece: str) -> list[int]:
        nonlocal seen
        seen += len(piece)
        return words(piece)

    chunks = split_document(doc, counting, 512)
    assert seen < 3 * len(text)
    lengths = [len(chunk.token_ids) for chunk in chunks[:-1]]
    assert min(lengths) > 300
    assert max(lengths) <= 512


def split(text: str) -> list[str]:
    return [text[start:end].strip() for start, end in sentence_spans(text)]


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("Dr. Smith met J. R. Tolkien at 3.30 p.m. on Jan. 5. They talked.", 2),
        ("See Fig. 3 and No. 5. The answer is no. Then he left!", 3),
        ("Is it e.g. this, i.e. that? Yes... \"No.\" He went.", 4),
        ("Das kostet z. B. 3 Mio. Euro. Dann ging er, usw. usf. Ende.", 3),
        ("这是第一句。这是第二句！第三句？", 3),
        ("यह पहला है। यह दूसरा है।", 2),
        ("Это первое. Это второе? Да!", 3),
        ("version 1.2.3 of example.com/a.b?c=d works. Good.", 2),
        ("1. First item is long. 2. Second one.", 2),
        ("no end", 1),
    ],
)  # fmt: skip
def test_sentences(text: str, count: int) -> None:
    assert len(split(text)) == count, split(text)


@given(st.text(st.sampled_from("aB .!?。\"'()\n1"), max_size=80), st.integers(0, 10))
def test_sentences_cover_the_text(text: str, start: int) -> None:
    start = min(start, len(text))
    spans = sentence_spans(text, start)
    assert "".join(text[a:b] for a, b in spans) == text[start:]
    assert all(a < b for a, b in spans)
