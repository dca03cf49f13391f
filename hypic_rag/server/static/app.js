// The chat page.

import { getJson, setKey, stream } from "./api.js";
import { Documents } from "./documents.js";
import { $, el, plural } from "./dom.js";
import * as history from "./history.js";
import { TurnView } from "./turns.js";

const state = {
  info: null,
  conversations: history.load(),
  current: history.create(),
  running: null,
  problem: "",
  submitted: false,
};

/** The view of each turn; one per turn, so that text that's still coming reaches what is shown. */
const views = new WeakMap();

function viewOf(turn) {
  if (!views.has(turn)) views.set(turn, new TurnView(turn, actions));
  return views.get(turn);
}

const documents = new Documents({
  onChange: (count) => {
    if (state.info) state.info.documents = count;
    showWelcome();
  },
  onUpload: () => {
    if (matchMedia("(max-width: 52rem)").matches) openSide();
  },
});

// -- start

async function start() {
  try {
    state.info = await getJson("/v1/info");
  } catch (error) {
    if (error.status === 401) {
      askForKey();
      return;
    }
    state.problem = error.message;
    showWelcome();
    return;
  }
  state.problem = "";
  $("model").textContent = state.info.model;
  documents.configure(state.info);
  if (state.submitted) submit();
  try {
    await documents.refresh();
  } catch (error) {
    state.problem = error.message;
  }
  show();
}

function askForKey() {
  if (!$("login").open) $("login").showModal();
}

$("login").addEventListener("cancel", (event) => event.preventDefault());
$("login-form").addEventListener("submit", async (event) => {
  event.preventDefault();
  setKey($("key").value.trim());
  $("login-error").hidden = true;
  try {
    await getJson("/v1/info");
    $("login").close();
    start();
  } catch (error) {
    $("login-error").textContent = error.message;
    $("login-error").hidden = false;
    $("key").select();
  }
});

// -- what's shown

function show() {
  showConversations();
  $("messages").replaceChildren(...state.current.turns.map((turn) => viewOf(turn).node));
  $("top-title").textContent = state.current.title || "Ask your documents";
  showWelcome();
  scrollToEnd();
}

function showWelcome() {
  const empty = state.current.turns.length === 0;
  $("welcome").hidden = !empty;
  if (!empty) return;
  const parts = [];
  if (state.problem) {
    const again = el("button", { type: "button", className: "button" }, "Try again");
    again.addEventListener("click", start);
    parts.push(
      el("h1", {}, "Something is wrong"),
      el("p", { className: "error-text", role: "alert" }, state.problem),
      again,
    );
  } else if (!state.info) {
    parts.push(el("p", { className: "muted" }, "Connecting…"));
  } else if (state.info.documents === 0) {
    parts.push(el("h1", {}, "There is nothing to read yet"));
    if (state.info.read_only) {
      parts.push(el("p", { className: "muted" }, "The store is empty, and for reading only."));
    } else {
      const add = el("button", { type: "button", className: "button primary" }, "Add documents…");
      add.addEventListener("click", () => $("upload").click());
      const kinds = state.info.upload_suffixes.join(" ");
      parts.push(
        el("p", { className: "muted" }, "Add a document, then ask about it."),
        add,
        el("p", { className: "muted small" }, kinds),
      );
    }
  } else {
    parts.push(
      el("h1", {}, `Ask about ${plural(state.info.documents, "document")}`),
      el(
        "p",
        { className: "muted" },
        "Each was read once, when it came in. Answers start from what the model remembers of it.",
      ),
      suggestions(),
    );
  }
  $("welcome").replaceChildren(...parts);
}

function suggestions() {
  const buttons = state.info.suggestions.map((text) => {
    const button = el("button", { type: "button", className: "button" }, text);
    button.addEventListener("click", () => ask(text));
    return button;
  });
  return el("div", { className: "suggestions" }, ...buttons);
}

function showConversations() {
  const rows = state.conversations.map((item) => {
    const open = el(
      "button",
      { type: "button", className: "row-main" },
      el("span", {}, item.title || "Conversation"),
    );
    open.addEventListener("click", () => select(item));
    const remove = el(
      "button",
      { type: "button", className: "icon-button little", ariaLabel: `Delete ${item.title}` },
      "✕",
    );
    remove.addEventListener("click", () => removeConversation(item));
    const row = el("li", { className: "row" }, open, remove);
    if (item.id === state.current.id) row.setAttribute("aria-current", "true");
    return row;
  });
  $("conversations").replaceChildren(...rows);
  $("no-conversations").hidden = rows.length > 0;
}

function scrollToEnd() {
  $("main").scrollTop = $("main").scrollHeight;
}

/** Stay at the end while text comes, unless the reader has scrolled up. */
function follow(change) {
  const main = $("main");
  const atEnd = main.scrollHeight - main.scrollTop - main.clientHeight < 80;
  change();
  if (atEnd) scrollToEnd();
}

// -- conversations

function select(conversation) {
  state.running?.abort();
  state.current = conversation;
  closeSide();
  show();
  $("question").focus();
}

function newConversation() {
  select(history.create());
}

function removeConversation(item) {
  if (!confirm(`Delete the conversation “${item.title}”?`)) return;
  state.conversations = state.conversations.filter((other) => other.id !== item.id);
  history.save(state.conversations);
  if (item.id === state.current.id) newConversation();
  else showConversations();
}

function keep(conversation) {
  const others = state.conversations.filter((item) => item.id !== conversation.id);
  state.conversations = [conversation, ...others];
  history.save(state.conversations);
}

// -- asking

const actions = {
  open: (source, answer) => documents.open(source, answer),
  retry: (turn) => {
    state.current.turns = state.current.turns.filter((other) => other !== turn);
    show();
    ask(turn.question);
  },
};

async function ask(question) {
  if (state.running || !state.info) return;
  const conversation = state.current;
  const messages = history.messages(conversation, question);
  const turn = { question, answer: "", busy: true };
  conversation.turns.push(turn);
  conversation.title ||= question.slice(0, 80);
  const view = viewOf(turn);
  $("messages").append(view.node);
  showWelcome();
  scrollToEnd();
  setRunning(new AbortController());
  const { signal } = state.running;
  try {
    await complete(messages, turn, signal, () => follow(() => view.grow()), () => follow(() => view.update()));
    if ($("compare").checked) await compare(messages, turn, signal, view);
  } catch (error) {
    if (error.name === "AbortError") turn.stopped = true;
    else if (error.status === 401) askForKey();
    if (error.name !== "AbortError") turn.error = error.message;
  }
  turn.busy = false;
  setRunning(null);
  keep(conversation);
  follow(() => view.update());
  showConversations();
  $("top-title").textContent = state.current.title;
}

/** Stream one answer into ``turn``. */
async function complete(messages, turn, signal, grow, update, mode = undefined) {
  const body = { model: state.info.model, messages, stream: true };
  if (mode) body.hypic = { mode };
  const options = {
    method: "POST",
    headers: { "Content-Type": "application/json" },
    body: JSON.stringify(body),
    signal,
  };
  for await (const chunk of stream("/v1/chat/completions", options)) {
    const [choice] = chunk.choices;
    Object.assign(turn, chunk.hypic);
    if (choice.delta.content) {
      turn.answer += choice.delta.content;
      grow();
    } else if (chunk.hypic) {
      update();
    }
  }
}

async function compare(messages, turn, signal, view) {
  turn.busy = false;
  const compared = { answer: "", busy: true };
  turn.compared = compared;
  follow(() => view.update());
  try {
    await complete(messages, compared, signal, () => {}, () => {}, "full");
  } catch (error) {
    if (error.name === "AbortError") delete turn.compared;
    else compared.error = error.message;
  }
  compared.busy = false;
}

function setRunning(controller) {
  state.running = controller;
  $("send").hidden = Boolean(controller);
  $("stop").hidden = !controller;
  $("messages").setAttribute("aria-busy", String(Boolean(controller)));
}

// -- the composer

const question = $("question");

function fit() {
  question.style.height = "auto";
  question.style.height = `${question.scrollHeight + 2}px`;
}

function submit() {
  const text = question.value.trim();
  if (!text || state.running) return;
  state.submitted = !state.info; // asked as soon as the server has said what it serves
  if (state.submitted) return;
  question.value = "";
  fit();
  ask(text);
}

question.addEventListener("input", fit);
question.addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    submit();
  }
});
$("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  submit();
});
$("stop").addEventListener("click", () => {
  state.running?.abort();
  question.focus();
});
$("new").addEventListener("click", newConversation);
$("top-new").addEventListener("click", newConversation);

// -- the side, on a phone

function openSide() {
  $("side").classList.add("open");
  $("shade").hidden = false;
  $("side-open").setAttribute("aria-expanded", "true");
  $("side-close").focus();
}

function closeSide() {
  if (!$("side").classList.contains("open")) return;
  $("side").classList.remove("open");
  $("shade").hidden = true;
  $("side-open").setAttribute("aria-expanded", "false");
  $("side-open").focus();
}

$("side-open").addEventListener("click", openSide);
$("side-close").addEventListener("click", closeSide);
$("shade").addEventListener("click", closeSide);
addEventListener("keydown", (event) => {
  if (event.key === "Escape" && !document.querySelector("dialog[open]")) closeSide();
});

showWelcome();
show();
start();
