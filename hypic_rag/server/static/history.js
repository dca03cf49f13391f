// Conversations, kept in this browser only.

const STORE = "hypic-conversations";
const MOST = 40;

export function load() {
  try {
    const held = JSON.parse(localStorage.getItem(STORE));
    return Array.isArray(held) ? held : [];
  } catch {
    return [];
  }
}

/** Save the conversations, newest first; the oldest go when the browser has no more room. */
export function save(conversations) {
  let kept = conversations.filter((item) => item.turns.length).slice(0, MOST);
  while (kept.length) {
    try {
      localStorage.setItem(STORE, JSON.stringify(kept));
      return;
    } catch {
      kept = kept.slice(0, -1);
    }
  }
  localStorage.removeItem(STORE);
}

export function create() {
  return { id: `${Date.now()}-${Math.random().toString(36).slice(2)}`, title: "", turns: [] };
}

/** The messages to send for the next question: turns that failed or said nothing are left out. */
export function messages(conversation, question) {
  const said = [];
  for (const turn of conversation.turns) {
    if (turn.answer && !turn.error) {
      said.push({ role: "user", content: turn.question });
      said.push({ role: "assistant", content: turn.answer });
    }
  }
  said.push({ role: "user", content: question });
  return said;
}
