// Documents: the list, uploads with progress, and the panel that shows a source.

import { getJson, stream } from "./api.js";
import { $, el, plural, shortName } from "./dom.js";

const MANY_CELLS = 48;
const READ = "Read for this answer";
const MADE_FROM = "What the answer was made from";

export class Documents {
  constructor({ onChange, onUpload }) {
    this.onChange = onChange;
    this.onUpload = onUpload;
    this.readOnly = false;
    $("upload").addEventListener("click", () => $("file").click());
    $("file").addEventListener("change", () => {
      this.add([...$("file").files]);
      $("file").value = "";
    });
    $("source-close").addEventListener("click", () => $("source").close());
    $("source").addEventListener("click", (event) => {
      if (event.target === $("source")) $("source").close();
    });
    this.listenForDrops();
  }

  configure(info) {
    this.readOnly = info.read_only;
    $("upload-area").hidden = info.read_only;
    $("file").accept = info.upload_suffixes.join(",");
  }

  async refresh() {
    const all = await everyDocument();
    $("document-count").textContent = all.length ? all.length.toLocaleString("en") : "";
    $("no-documents").hidden = all.length > 0;
    $("documents").replaceChildren(...all.map((item) => this.row(item)));
    this.onChange(all.length);
  }

  row(item) {
    const name = item.title || shortName(item.source);
    const open = el(
      "button",
      { type: "button", className: "row-main", title: item.source },
      el("span", {}, name),
      el("span", { className: "muted small" }, shortName(item.source)),
    );
    open.addEventListener("click", () => this.open({ document_id: item.id, document: item.source }));
    const row = el("li", { className: "row" }, open);
    if (!this.readOnly) {
      const remove = el(
        "button",
        { type: "button", className: "icon-button little", ariaLabel: `Delete ${name}` },
        "✕",
      );
      remove.addEventListener("click", () => this.remove(item, name));
      row.append(remove);
    }
    return row;
  }

  async remove(item, name) {
    if (!confirm(`Delete “${name}” from the store?`)) return;
    try {
      await getJson(`/v1/documents/${item.id}`, { method: "DELETE" });
    } catch (error) {
      alert(error.message);
    }
    await this.refresh();
    $("upload").focus();
  }

  // -- uploads

  async add(files) {
    if (this.readOnly || !files.length) return;
    this.onUpload();
    for (const file of files) await this.upload(file);
  }

  async upload(file) {
    const status = el("span", { className: "small" }, "Sending…");
    const cells = el("div", { className: "cells", ariaHidden: "true" });
    const dismiss = el(
      "button",
      { type: "button", className: "icon-button little", ariaLabel: `Dismiss ${file.name}`, hidden: true },
      "✕",
    );
    const line = el("div", { className: "upload-line" }, el("strong", {}, file.name), dismiss);
    const item = el("li", { className: "upload" }, line, cells, status);
    dismiss.addEventListener("click", () => item.remove());
    $("uploads").append(item);
    const form = new FormData();
    form.append("stream", "true");
    form.append("file", file);
    try {
      for await (const event of stream("/v1/documents", { method: "POST", body: form })) {
        if (event.object === "document.progress") this.progress(event, cells, status);
        else status.textContent = outcome(event);
      }
    } catch (error) {
      item.classList.add("failed");
      cells.hidden = true;
      status.textContent = error.message;
    }
    dismiss.hidden = false;
    await this.refresh().catch(() => {});
  }

  /** One cell per chunk, filled as its state is made. */
  progress({ states, total }, cells, status) {
    const count = Math.min(total, MANY_CELLS);
    const done = total ? Math.floor((states / total) * count) : 0;
    cells.replaceChildren(
      ...Array.from({ length: count }, (_, index) =>
        el("span", { className: index < done ? "cell done" : "cell" }),
      ),
    );
    status.textContent =
      states < total
        ? `${states} of ${plural(total, "chunk")} turned into states`
        : "Making it searchable…";
  }

  listenForDrops() {
    let depth = 0;
    const hasFiles = (event) => event.dataTransfer?.types.includes("Files") && !this.readOnly;
    const show = (on) => document.body.classList.toggle("dropping", on);
    addEventListener("dragenter", (event) => {
      if (hasFiles(event)) show(++depth > 0);
    });
    addEventListener("dragleave", (event) => {
      if (hasFiles(event)) show(--depth > 0);
    });
    addEventListener("dragover", (event) => {
      if (hasFiles(event)) event.preventDefault();
    });
    addEventListener("drop", (event) => {
      if (!hasFiles(event)) return;
      event.preventDefault();
      depth = 0;
      show(false);
      this.add([...event.dataTransfer.files]);
    });
  }

  // -- one document

  /** Show a document; if the source is a passage of it, at that passage, with the answer marked. */
  async open(source, answer = "") {
    $("source-title").textContent = source.title || shortName(source.document);
    $("source-meta").textContent = source.document;
    $("source-body").replaceChildren(el("p", { className: "muted" }, "Loading…"));
    if (!$("source").open) $("source").showModal();
    try {
      if (!source.document_id) throw { status: 404 };
      const found = await getJson(`/v1/documents/${source.document_id}`);
      $("source-title").textContent = found.title || shortName(found.source);
      this.show(found.chunks, source, answer);
    } catch (error) {
      const gone = error.status === 404;
      const notice = gone ? "This document is no longer in the store." : error.message;
      $("source-body").replaceChildren(
        el("p", { className: "error-text" }, notice),
        source.text ? passage(source, MADE_FROM, answer) : el("p"),
      );
    }
  }

  show(chunks, source, answer) {
    const cited = chunks.find((chunk) => chunk.id === source.id);
    const parts = chunks.map((chunk) => passage(chunk, chunk === cited ? READ : "", answer));
    if (source.text && !cited) {
      const notice = el("p", { className: "error-text" }, "The document has changed since.");
      parts.unshift(notice, passage(source, MADE_FROM, answer));
    }
    $("source-body").replaceChildren(...parts);
    const target = $("source-body").querySelector(".cited");
    if (target) {
      target.scrollIntoView({ block: "start" });
      target.focus({ preventScroll: true });
    } else {
      $("source-body").scrollTop = 0;
    }
  }
}

/** The list of documents, which the server gives in pages. */
async function everyDocument() {
  const all = [];
  for (let more = true; more; ) {
    const after = all.length ? `?after=${encodeURIComponent(all.at(-1).id)}` : "";
    const page = await getJson(`/v1/documents${after}`);
    all.push(...page.data);
    more = page.has_more && page.data.length > 0;
  }
  return all;
}

function passage(chunk, tag, answer) {
  const page = chunk.page ? `Page ${chunk.page}` : "";
  const label = [tag, page].filter(Boolean).join(" · ");
  const text = chunk.text.trim();
  const node = el(
    "div",
    { className: tag ? "passage cited" : "passage" },
    label ? el("span", { className: "tag" }, label) : null,
    ...(tag ? marked(text, answer) : [text]),
  );
  if (tag) node.tabIndex = -1;
  return node;
}

/** The text, with the places marked where it says what the answer says. */
function marked(text, answer) {
  const words = answer.trim().replace(/[.!]+$/, "");
  if (words.length < 3 || words.length > 200) return [text];
  const parts = [];
  const lower = text.toLowerCase();
  const wanted = words.toLowerCase();
  let from = 0;
  for (let at; (at = lower.indexOf(wanted, from)) >= 0; from = at + wanted.length) {
    parts.push(text.slice(from, at), el("mark", {}, text.slice(at, at + wanted.length)));
  }
  return [...parts, text.slice(from)];
}

function outcome({ change, chunks }) {
  const count = plural(chunks, "chunk");
  if (change === "unchanged") return `Was here already: ${count}`;
  return change === "updated" ? `Updated: ${count}. Ask about it!` : `Ready: ${count}. Ask about it!`;
}
