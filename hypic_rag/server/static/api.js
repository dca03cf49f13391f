// Requests to the server. Every failure becomes an ApiError with a message for people.

const KEY = "hypic-key";

export class ApiError extends Error {
  constructor(message, status, code) {
    super(message);
    this.status = status;
    this.code = code;
  }
}

export function setKey(key) {
  sessionStorage.setItem(KEY, key);
}

export async function getJson(path, options = {}) {
  const response = await request(path, options);
  return response.json();
}

/** The data of a server-sent event stream, one parsed value at a time, up to [DONE]. */
export async function* stream(path, options = {}) {
  const response = await request(path, options);
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let text = "";
  let complete = false;
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done && complete) return;
      if (done) {
        throw new ApiError("The connection broke before the end.", 0, "incomplete");
      }
      text += value;
      let end;
      while ((end = text.indexOf("\n\n")) >= 0) {
        const event = text.slice(0, end);
        text = text.slice(end + 2);
        if (event === "data: [DONE]") complete = true;
        if (complete || !event.startsWith("data: ")) continue;
        const data = JSON.parse(event.slice(6));
        if (data.error) throw new ApiError(data.error.message, 0, data.error.code);
        yield data;
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

async function request(path, options) {
  const headers = new Headers(options.headers);
  const key = sessionStorage.getItem(KEY);
  if (key) headers.set("Authorization", `Bearer ${key}`);
  let response;
  try {
    response = await fetch(path, { ...options, headers });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError("The server can't be reached. Is it still running?", 0, "unreachable");
  }
  if (response.ok) return response;
  let told = {};
  try {
    told = (await response.json()).error;
  } catch {
    // Not our server's error: a proxy's, perhaps.
  }
  throw new ApiError(
    told.message || `The server answered with status ${response.status}.`,
    response.status,
    told.code,
  );
}
