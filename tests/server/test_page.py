"""The chat page in a real browser."""

from __future__ import annotations

import os
import re
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from serving import Serve, Served

from hypic_rag import KnowledgeBase, Sampling
from hypic_rag.engine.decoding import DecodeBatch
from hypic_rag.engine.prompt import PromptFormat
from hypic_rag.server.settings import ApiKeys, ServerSettings

pytest.importorskip("playwright")

from playwright.sync_api import Browser, Page, Route, expect, sync_playwright

FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)
DESKTOP = {"width": 1280, "height": 800}
PHONE = {"width": 390, "height": 844}
QUESTION = "Who is the harbour master of Brindle?"
FERRY = "# The ferry\n\nThe ferry is run by Orla Finch. It leaves at nine, and again at noon.\n"

expect.set_options(timeout=60_000)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    chromium = shutil.which("chromium")
    if chromium is None:
        # Where everything has to run, a missing browser is a failure.
        (pytest.fail if "CI" in os.environ else pytest.skip)("Chromium isn't installed.")
    with sync_playwright() as playwright:
        opened = playwright.chromium.launch(executable_path=chromium, args=list(FLAGS))
        yield opened
        opened.close()


@pytest.fixture
def open_page(browser: Browser) -> Iterator[Callable[..., Page]]:
    """Opens pages; anything the browser complains about, or asks elsewhere for, is an error."""
    contexts = []
    problems: list[str] = []
    asked: list[str] = []
    urls: list[str] = []

    def start(served: Served, size: dict[str, int] = DESKTOP, **options: Any) -> Page:
        context = browser.new_context(viewport=size, **options)  # type: ignore[arg-type]
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(60_000)
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.on("request", lambda request: asked.append(request.url))
        urls.append(served.url)
        page.goto(served.url)
        return page

    yield start
    for context in contexts:
        context.close()
    assert problems == []
    assert [url for url in asked if not url.startswith(tuple(urls))] == []


@pytest.fixture
def served(new_kb: Callable[..., KnowledgeBase], documents: Path, serve: Serve) -> Served:
    kb = new_kb(chunk_tokens=48)
    kb.ingest(documents)
    return serve(kb, ServerSettings(max_tokens=16, suggestions=(QUESTION,)))


def ask(page: Page, question: str) -> None:
    page.get_by_label("Your question").fill(question)
    page.get_by_label("Your question").press("Enter")


def test_ask_and_open_the_source_at_the_passage(
    served: Served, open_page: Callable[..., Page]
) -> None:
    expected = served.kb.ask(QUESTION, sampling=Sampling(max_tokens=16))
    page = open_page(served)
    expect(page.get_by_role("heading", name="Ask about 3 documents")).to_be_visible()
    ask(page, QUESTION)
    expect(page.locator(".cost")).to_be_visible()
    if expected.text:
        expect(page.locator(".answer-text")).to_have_text(expected.text)
    cost = page.locator(".cost")
    expect(cost).to_contain_text(f"{expected.tokens.reused} tokens reused")
    expect(cost.locator(".ttft")).to_have_text(re.compile(r"\d+ ms|\d+\.\d s"))
    widths = [
        cost.locator(f".bar .{kind}").bounding_box()["width"]  # type: ignore[index]
        for kind in ("reused", "computed")
    ]
    share = expected.tokens.reused / expected.tokens.prompt
    assert widths[0] / sum(widths) == pytest.approx(share, abs=0.15)

    best = expected.sources[0]
    page.locator(".source-chip").first.click()
    panel = page.get_by_role("dialog")
    expect(panel).to_contain_text(best.document)
    cited = panel.locator(".passage.cited")
    expect(cited).to_have_count(1)
    expect(cited).to_contain_text(best.text.strip().splitlines()[-1])
    expect(cited).to_be_in_viewport()
    expect(cited).to_be_focused()
    page.keyboard.press("Escape")
    expect(panel).to_be_hidden()


@pytest.fixture
def talks_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """Answers take a minute, a word at a time."""

    def generate(self: DecodeBatch, context: Any, sampling: Sampling) -> Iterator[int]:
        words = PromptFormat(self.model).text(" the ferry and the mill")
        for number in range(3000):
            time.sleep(0.02)
            yield words[number % len(words)]

    monkeypatch.setattr(DecodeBatch, "generate", generate)


@pytest.mark.usefixtures("talks_long")
def test_the_answer_streams_and_can_be_stopped(
    served: Served, open_page: Callable[..., Page]
) -> None:
    page = open_page(served)
    ask(page, QUESTION)
    answer = page.locator(".answer-text")
    expect(answer).not_to_be_empty()
    early = answer.inner_text()
    expect(page.get_by_role("button", name="Stop")).to_be_visible()
    expect(answer).not_to_have_text(early)
    assert answer.inner_text().startswith(early.rstrip("▍"))
    page.get_by_role("button", name="Stop").click()
    expect(page.get_by_text("Stopped.")).to_be_visible()
    expect(page.get_by_role("button", name="Ask", exact=True)).to_be_visible()


@pytest.mark.usefixtures("talks_long")
def test_an_answer_goes_on_when_the_page_is_completed_meanwhile(
    served: Served, open_page: Callable[..., Page]
) -> None:
    page = open_page(served)
    expect(page.get_by_role("heading", name="Ask about 3 documents")).to_be_visible()
    held: list[Route] = []
    page.route("**/v1/documents", lambda route: held.append(route))
    page.reload()
    ask(page, QUESTION)
    answer = page.locator(".answer-text")
    expect(answer).not_to_be_empty()
    assert page.locator("#document-count").inner_text() == ""
    held[0].continue_()
    expect(page.locator("#document-count")).to_have_text("3")
    early = answer.inner_text()
    expect(answer).not_to_have_text(early)
    page.get_by_role("button", name="Stop").click()
    expect(page.get_by_text("Stopped.")).to_be_visible()


def test_a_question_that_comes_too_early_is_asked_in_time(
    served: Served, open_page: Callable[..., Page]
) -> None:
    page = open_page(served)
    expect(page.get_by_role("heading", name="Ask about 3 documents")).to_be_visible()
    held: list[Route] = []
    page.route("**/v1/info", lambda route: held.append(route))
    page.route("**/v1/documents", lambda route: None)  # it isn't needed for asking
    page.reload()
    ask(page, QUESTION)
    expect(page.get_by_text("Connecting…")).to_be_visible()
    assert page.locator(".question").count() == 0
    held[0].continue_()
    expect(page.locator(".question")).to_have_text(QUESTION)
    expect(page.locator(".cost")).to_be_visible()


def test_a_second_turn_and_the_conversation_after_reloading(
    served: Served, open_page: Callable[..., Page]
) -> None:
    page = open_page(served)
    page.get_by_role("button", name=QUESTION).click()  # a suggestion
    expect(page.locator(".cost")).to_have_count(1)
    ask(page, "Who made the wheel of the mill?")
    expect(page.locator(".cost")).to_have_count(2)
    if all(text for text in page.locator(".answer-text").all_inner_texts()):
        expect(page.locator(".cost").last).to_contain_text("conversation continued")
    page.reload()
    side = page.get_by_label("Conversations and documents")
    side.get_by_role("button", name=QUESTION, exact=True).click()
    expect(page.locator(".question")).to_have_text([QUESTION, "Who made the wheel of the mill?"])
    expect(page.locator(".cost")).to_have_count(2)
    page.get_by_role("button", name="New conversation").first.click()
    expect(page.locator(".question")).to_have_count(0)
    page.on("dialog", lambda dialog: dialog.accept())
    side.get_by_role("button", name=f"Delete {QUESTION}").click()
    expect(page.get_by_text("None yet.")).to_be_visible()


def test_upload_with_progress_and_ask_about_it(
    served: Served, open_page: Callable[..., Page], tmp_path: Path
) -> None:
    file = tmp_path / "ferry.md"
    more = "\n\n".join(f"On day {day} the ferry carried {day * 7} people." for day in range(30))
    file.write_text(FERRY + "\n" + more, encoding="utf-8")
    page = open_page(served)
    with page.expect_file_chooser() as chooser:
        page.get_by_role("button", name="Add documents…").click()
    chooser.value.set_files(file)
    uploads = page.get_by_label("Uploads")
    expect(uploads).to_contain_text(re.compile(r"\d+ of \d+ chunks turned into states"))
    expect(uploads).to_contain_text(re.compile(r"Ready: \d+ chunks\. Ask about it!"))
    expect(uploads.locator(".cell")).to_have_count(uploads.locator(".cell.done").count())
    expect(page.locator("#document-count")).to_have_text("4")
    ask(page, "Who runs the ferry?")
    expect(page.locator(".source-chip", has_text="The ferry").first).to_be_visible()
    expect(page.locator(".cost")).not_to_contain_text("No passage had a cached state")
    page.on("dialog", lambda dialog: dialog.accept())
    page.get_by_role("button", name="Delete The ferry").click()
    expect(page.locator("#document-count")).to_have_text("3")
    page.locator(".source-chip", has_text="The ferry").first.click()
    expect(page.get_by_text("This document is no longer in the store.")).to_be_visible()


def test_an_upload_that_fails_says_why(
    served: Served, open_page: Callable[..., Page], tmp_path: Path
) -> None:
    file = tmp_path / "broken.pdf"
    file.write_bytes(b"%PDF-1.4 nothing")
    page = open_page(served)
    page.locator("#file").set_input_files(file)
    expect(page.locator(".upload.failed")).to_contain_text("broken.pdf")
    page.get_by_role("button", name="Dismiss broken.pdf").click()
    expect(page.locator(".upload")).to_have_count(0)


def test_compare_with_full_recompute(served: Served, open_page: Callable[..., Page]) -> None:
    page = open_page(served)
    page.get_by_role("switch", name="Compare with full recompute").check()
    for number, question in enumerate((QUESTION, "And who made the wheel?"), 1):
        ask(page, question)
        comparison = page.locator(".comparison").nth(number - 1)
        expect(comparison.get_by_role("row")).to_have_count(4)
        expect(comparison.locator(".badge")).to_have_text(re.compile("The answers (agree|differ)"))
        computed = comparison.get_by_role("row", name="Tokens computed").get_by_role("cell")
        states, full = (int(text.replace(",", "")) for text in computed.all_inner_texts())
        assert states < full
    expected = served.kb.ask(QUESTION, sampling=Sampling(max_tokens=16))
    exact = served.kb.ask(QUESTION, sampling=Sampling(max_tokens=16), exact=True)
    says = "agree" if expected.text == exact.text else "differ"
    expect(page.locator(".badge").first).to_contain_text(says)


def test_an_empty_store(
    new_kb: Callable[..., KnowledgeBase], serve: Serve, open_page: Callable[..., Page]
) -> None:
    page = open_page(serve(new_kb()))
    expect(page.get_by_role("heading", name="There is nothing to read yet")).to_be_visible()
    ask(page, QUESTION)
    expect(page.get_by_role("alert")).to_contain_text("ingest some first")
    expect(page.get_by_role("button", name="Try again")).to_be_visible()


def test_errors_can_be_tried_again(served: Served, open_page: Callable[..., Page]) -> None:
    page = open_page(served)
    path = "**/v1/chat/completions"

    def refuse(route: Route) -> None:
        error = {"error": {"message": "The server is busy.", "code": "queue_full"}}
        route.fulfill(status=503, json=error)

    page.route(path, refuse)
    ask(page, QUESTION)
    expect(page.get_by_role("alert")).to_contain_text("The server is busy.")
    page.unroute(path)
    page.route(path, lambda route: route.abort())
    page.get_by_role("button", name="Try again").click()
    expect(page.get_by_role("alert")).to_contain_text("The server can't be reached.")
    page.unroute(path)
    page.get_by_role("button", name="Try again").click()
    expect(page.locator(".cost")).to_have_count(1)
    expect(page.locator(".question")).to_have_count(1)
    expect(page.get_by_role("alert")).to_have_count(0)


def test_a_server_with_keys_asks_for_one(
    new_kb: Callable[..., KnowledgeBase],
    documents: Path,
    serve: Serve,
    open_page: Callable[..., Page],
    tmp_path: Path,
) -> None:
    kb = new_kb(tenant="a")
    kb.ingest(documents)
    path = tmp_path / "keys.toml"
    path.write_text('[keys]\n"the-right-key" = "a"\n', encoding="utf-8")
    page = open_page(serve(kb, ServerSettings(keys=ApiKeys.load(path))))
    page.get_by_label("API key").fill("the-wrong-key")
    page.get_by_role("button", name="Continue").click()
    expect(page.get_by_role("alert")).to_contain_text("missing or wrong")
    page.get_by_label("API key").fill("the-right-key")
    page.get_by_label("API key").press("Enter")
    expect(page.get_by_role("heading", name="Ask about 3 documents")).to_be_visible()


def test_texts_are_never_markup(
    served: Served, open_page: Callable[..., Page], tmp_path: Path
) -> None:
    file = tmp_path / "bad.txt"
    file.write_text('Zebra <img src=x onerror="alert(1)"> <script>alert(2)</script>', "utf-8")
    served.kb.ingest(file)
    page = open_page(served)
    dialogs = []
    page.on("dialog", lambda dialog: (dialogs.append(dialog.message), dialog.dismiss()))
    ask(page, "<b id='bold'>Zebra</b> <img src=x onerror='alert(3)'>")
    expect(page.locator(".cost")).to_be_visible()
    page.locator(".source-chip").first.click()
    expect(page.locator(".passage.cited")).to_contain_text("onerror")
    assert page.locator("#messages img, #messages b, #source img, #source script").count() == 0
    assert dialogs == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", [DESKTOP, PHONE], ids=["desktop", "phone"])
def test_nothing_sticks_out_and_all_text_is_readable(
    served: Served, open_page: Callable[..., Page], size: dict[str, int], scheme: str
) -> None:
    page = open_page(served, size, color_scheme=scheme)
    expect(page.get_by_role("heading", name="Ask about 3 documents")).to_be_visible()
    check_looks(page)
    page.get_by_text("Compare with full recompute").click()
    ask(page, f"{QUESTION} {'Brindle' * 12}")
    expect(page.locator(".comparison .badge")).to_be_visible()
    check_looks(page)
    page.locator(".source-chip").first.click()
    expect(page.locator(".passage.cited")).to_be_visible()
    check_looks(page, "#source")
    page.keyboard.press("Escape")
    if size == PHONE:
        page.get_by_role("button", name="Conversations and documents").click()
        expect(page.get_by_role("button", name="Add documents…")).to_be_in_viewport()
        page.wait_for_timeout(400)
        check_looks(page, "#side")
        page.keyboard.press("Escape")
        expect(page.get_by_role("button", name="Add documents…")).not_to_be_visible()


def test_the_keyboard_is_enough(served: Served, open_page: Callable[..., Page]) -> None:
    page = open_page(served)
    expect(page.get_by_role("heading", name="Ask about 3 documents")).to_be_visible()
    page.keyboard.press("Tab")
    expect(page.get_by_role("link", name="Skip to the question")).to_be_focused()
    page.keyboard.press("Enter")
    expect(page.get_by_label("Your question")).to_be_focused()
    page.keyboard.type("Who is")
    page.keyboard.press("Shift+Enter")
    page.keyboard.type("the harbour master?")
    assert page.get_by_label("Your question").input_value() == "Who is\nthe harbour master?"
    page.keyboard.press("Tab")
    expect(page.get_by_role("button", name="Ask", exact=True)).to_be_focused()
    page.keyboard.press("Tab")
    page.keyboard.press("Space")
    expect(page.get_by_role("switch")).to_be_checked()
    page.keyboard.press("Space")
    page.keyboard.press("Shift+Tab")
    page.keyboard.press("Enter")
    expect(page.locator(".cost")).to_be_visible()
    page.locator(".source-chip").first.focus()
    page.keyboard.press("Enter")
    expect(page.get_by_role("dialog")).to_be_visible()
    page.keyboard.press("Escape")
    expect(page.locator(".source-chip").first).to_be_focused()


CHECK = """
(root) => {
  const wrong = [];
  const luminance = ([r, g, b]) => {
    const [x, y, z] = [r, g, b].map((v) => {
      v /= 255;
      return v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4;
    });
    return 0.2126 * x + 0.7152 * y + 0.0722 * z;
  };
  const parse = (color) => color.match(/[\\d.]+/g).map(Number);
  const ground = (node) => {
    for (let at = node; at; at = at.parentElement) {
      const color = parse(getComputedStyle(at).backgroundColor);
      if (color.length < 4 || color[3] === 1) return color;
    }
    return [255, 255, 255];
  };
  if (document.documentElement.scrollWidth > innerWidth) wrong.push("the page scrolls sideways");
  for (const node of document.querySelector(root).querySelectorAll("*")) {
    const box = node.getBoundingClientRect();
    const style = getComputedStyle(node);
    if (!box.width || style.visibility === "hidden") continue;
    if (node.closest(".visually-hidden, .skip, [disabled]")) continue;
    if (root === "body" && node.closest(".side") && innerWidth < 800) continue;
    if (box.right > innerWidth + 1) wrong.push(`sticks out: ${node.outerHTML.slice(0, 80)}`);
    const own = [...node.childNodes].some((child) => child.nodeType === 3 && child.data.trim());
    if (own) {
      const [a, b] = [luminance(parse(style.color)), luminance(ground(node))].sort((x, y) => y - x);
      const ratio = (a + 0.05) / (b + 0.05);
      if (ratio < 4.5) wrong.push(`contrast ${ratio.toFixed(2)}: ${node.outerHTML.slice(0, 80)}`);
    }
  }
  return wrong;
}
"""


def check_looks(page: Page, root: str = "body") -> None:
    assert page.evaluate(CHECK, root) == []
