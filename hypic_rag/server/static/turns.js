// One turn of a conversation: question, answer, sources, cost, comparison.

import { el, plural, seconds, shortName } from "./dom.js";

export class TurnView {
  constructor(turn, actions) {
    this.turn = turn;
    this.actions = actions;
    this.text = el("div", { className: "answer-text" });
    this.extras = el("div");
    this.answer = el("article", { className: "answer", ariaLabel: "Answer" }, this.text, this.extras);
    this.node = el(
      "section",
      { className: "turn" },
      el("div", { className: "question", ariaLabel: "Question" }, turn.question),
      this.answer,
    );
    this.update();
  }

  /** Show the turn as it is now. */
  update() {
    const { turn } = this;
    this.answer.classList.toggle("busy", Boolean(turn.busy));
    this.answer.classList.toggle("failed", Boolean(turn.error));
    this.answer.setAttribute("aria-busy", String(Boolean(turn.busy)));
    this.text.dataset.empty = turn.busy || turn.error ? "" : "The model gave no answer.";
    this.text.textContent = turn.answer;
    this.extras.replaceChildren(
      ...[this.problem(), this.sources(), this.cost(), this.comparison()].filter(Boolean),
    );
  }

  /** Show text that has just come, and nothing else. */
  grow() {
    this.text.textContent = this.turn.answer;
  }

  problem() {
    const { turn } = this;
    if (turn.stopped) return el("p", { className: "warning" }, "Stopped.");
    if (!turn.error) return null;
    const again = el("button", { type: "button", className: "button" }, "Try again");
    again.addEventListener("click", () => this.actions.retry(turn));
    return el("div", { role: "alert" }, el("p", { className: "error-text" }, turn.error), again);
  }

  sources() {
    const { sources } = this.turn;
    if (!sources?.length) return null;
    const chips = sources.map((source, index) => {
      const place = source.page ? `, page ${source.page}` : "";
      const name = source.title || shortName(source.document);
      const chip = el(
        "button",
        { type: "button", className: "source-chip", title: source.document },
        `${index + 1} · ${name}${place}`,
      );
      chip.addEventListener("click", () => this.actions.open(source, this.turn.answer));
      return chip;
    });
    const label = el("span", { className: "label muted small" }, "Read for this answer");
    return el("div", { className: "sources" }, label, ...chips);
  }

  cost() {
    const { tokens, timings, warnings, conversation } = this.turn;
    if (!tokens) return null;
    const reused = el("span", { className: "reused" });
    const computed = el("span", { className: "computed" });
    reused.style.flex = `${tokens.reused} 0 0`;
    computed.style.flex = `${tokens.computed} 0 0`;
    const bar = el(
      "div",
      {
        className: "bar",
        role: "img",
        ariaLabel: `${tokens.reused} of ${tokens.prompt} prompt tokens reused`,
      },
      ...(tokens.reused ? [reused] : []),
      ...(tokens.computed ? [computed] : []),
    );
    const carried = conversation === "continued" ? " (conversation continued)" : "";
    const legend = el(
      "div",
      { className: "legend" },
      el("span", { className: "dot reused" }, `${plural(tokens.reused, "token")} reused${carried}`),
      el("span", { className: "dot computed" }, `${tokens.computed.toLocaleString("en")} computed`),
      el(
        "span",
        { className: "end" },
        "First token after ",
        el("strong", { className: "ttft" }, seconds(timings.server_ttft_s)),
      ),
    );
    const notes = (warnings ?? []).map((text) => el("p", { className: "warning" }, text));
    return el("div", { className: "cost" }, bar, legend, ...notes);
  }

  comparison() {
    const { compared } = this.turn;
    if (!compared) return null;
    if (compared.busy) {
      return el("p", { className: "comparison small" }, "Recomputing everything to compare…");
    }
    if (compared.error) {
      return el("p", { className: "comparison error-text" }, `No comparison: ${compared.error}`);
    }
    const { turn } = this;
    const row = (name, values) =>
      el("tr", {}, el("th", { scope: "row" }, name), ...values.map((value) => el("td", {}, value)));
    const both = [turn, compared];
    const head = ["", "From states", "Full recompute"].map((name) => el("th", { scope: "col" }, name));
    const table = el(
      "table",
      {},
      el("caption", {}, "Compared with full recompute"),
      el("thead", {}, el("tr", {}, ...head)),
      el(
        "tbody",
        {},
        row("First token", both.map((one) => seconds(one.timings.ttft_s))),
        row("Whole answer", both.map((one) => seconds(one.timings.total_s))),
        row("Tokens computed", both.map((one) => one.tokens.computed.toLocaleString("en"))),
      ),
    );
    const agree = turn.answer === compared.answer;
    const factor = compared.timings.ttft_s / turn.timings.ttft_s;
    const faster =
      factor >= 1.05 ? `First token ${factor.toFixed(1)}× sooner from states.` : "";
    return el(
      "div",
      { className: "comparison" },
      table,
      el(
        "span",
        { className: `badge ${agree ? "good" : "bad"}` },
        agree ? "✓ The answers agree" : "≠ The answers differ",
      ),
      faster ? el("span", { className: "small" }, faster) : null,
      agree
        ? null
        : el(
            "div",
            { className: "other-answer" },
            el("strong", {}, "Full recompute says: "),
            compared.answer || "(nothing)",
          ),
    );
  }
}
