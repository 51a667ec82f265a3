"use strict";
// The page of a server: a chat with one of the memories, and what is in it.

const find = id => document.getElementById(id);
const LISTED = 50;
const IN_PATHS = /^[^/]*[^/.][^/]*$/; // names that can be a part of a path
let model = null;
let running = null; // the AbortController of the answer under way

// Requests.

function headers(more) {
  const key = sessionStorage.getItem("key");
  return { ...(key ? { Authorization: `Bearer ${key}` } : {}), ...more };
}

async function request(path, options = {}) {
  const response = await fetch(path, { ...options, headers: headers(options.headers) });
  if (response.ok) return response;
  const body = await response.json().catch(() => null);
  const error = new Error(body?.error?.message ?? `status ${response.status}`);
  error.status = response.status;
  throw error;
}

const send = (method, path, body) =>
  request(path, { method, headers: { "Content-Type": "application/json" }, body: JSON.stringify(body) });
const json = async path => (await request(path)).json();
const here = (rest = "") => `v1/memories/${encodeURIComponent(find("memory").value)}${rest}`;

function show(error) {
  if (error?.name === "AbortError") return;
  if (error?.status === 401) return login();
  find("error").textContent = error ? error.message : "";
  find("error").hidden = !error;
}

// Run what a control does; errors are shown.
const on = (id, kind, action) =>
  find(id).addEventListener(kind, async event => {
    try {
      show(null);
      await action(event);
    } catch (error) {
      show(error);
    }
  });

function login() {
  find("refused").hidden = !sessionStorage.getItem("key");
  sessionStorage.removeItem("key");
  find("login").hidden = false;
  find("main").hidden = true;
  find("key").focus();
}

// The list of memories.

async function listMemories(chosen) {
  const { data } = await json("v1/memories");
  const select = find("memory");
  const wanted = chosen ?? select.value ?? null;
  const known = data.map(each => ({
    value: IN_PATHS.test(each.name ?? "") ? each.name : each.id,
    text: each.name ?? `${each.id.slice(0, 12)}…`,
  }));
  if (!known.length) known.push({ value: "me", text: "me" });
  select.replaceChildren(...known.map(each => new Option(each.text, each.value)));
  const last = wanted || localStorage.getItem("memory");
  if (known.some(each => each.value === last)) select.value = last;
  localStorage.setItem("memory", select.value);
}

function clearLog() {
  running?.abort();
  for (const each of find("log").querySelectorAll(".message")) each.remove();
  find("hint").hidden = false;
}

async function choose(name) {
  await listMemories(name);
  clearLog();
  find("query").value = "";
  await showMemory();
}

// The panel.

const plural = (count, word) => `${count.toLocaleString("en")} ${word}${count === 1 ? "" : "s"}`;
const when = seconds => new Date(seconds * 1000).toLocaleString(undefined, { dateStyle: "medium", timeStyle: "short" });

function bytes(count) {
  if (!count) return "none";
  return count < 1e6 ? `${(count / 1e3).toFixed(1)} KB` : `${(count / 1e6).toFixed(1)} MB`;
}

async function showMemory() {
  let memory = null;
  try {
    memory = await json(here());
  } catch (error) {
    if (error.status !== 404) throw error;
  }
  const is_empty = !memory?.bytes;
  for (const id of ["download", "fork"]) find(id).disabled = is_empty;
  find("delete").disabled = !memory;
  find("written").textContent = is_empty ? "never" : when(memory.updated_at);
  find("bytes").textContent = bytes(memory?.bytes);
  find("stored").textContent = find("size").textContent = plural(memory?.tokens ?? 0, "token");
  if (memory) await showSentences();
  else find("sentences").replaceChildren();
}

async function showSentences() {
  const query = find("query").value.trim();
  let found;
  try {
    found = await json(here(`/sentences?limit=${LISTED}${query ? `&query=${encodeURIComponent(query)}` : ""}`));
  } catch (error) {
    find("facts").hidden = error.status === 400; // a memory without sentences
    if (error.status === 400) return;
    throw error;
  }
  find("stored").textContent = find("size").textContent = plural(found.total, "sentence");
  const shown = query ? found.data : found.data.reverse();
  find("sentences").replaceChildren(...shown.map(sentenceItem));
  const hidden = found.total - shown.length;
  find("more").hidden = hidden <= 0;
  find("more").textContent = `${plural(hidden, "other")} not shown; the search finds them.`;
}

function sentenceItem(sentence) {
  const item = document.createElement("li");
  const text = document.createElement("span");
  text.textContent = sentence.text;
  const time = document.createElement("time");
  if (sentence.written_at) {
    time.dateTime = new Date(sentence.written_at * 1000).toISOString();
    time.textContent = when(sentence.written_at);
  }
  const button = document.createElement("button");
  button.type = "button";
  button.textContent = "Forget";
  button.setAttribute("aria-label", `Forget: ${sentence.text}`);
  button.addEventListener("click", () => forget(sentence.text).catch(show));
  item.append(text, time, button);
  return item;
}

// Ask in the dialog. Returns null if it was cancelled, else the name, or "" without a field.
function ask(title, text, ok, name = null) {
  const dialog = find("dialog");
  find("dialog-title").textContent = title;
  find("dialog-text").textContent = text;
  find("dialog-ok").textContent = ok;
  find("dialog-field").hidden = name === null;
  find("dialog-name").value = name ?? "";
  find("dialog-name").required = name !== null;
  dialog.returnValue = "";
  dialog.showModal();
  if (name !== null) find("dialog-name").select();
  else find("dialog-ok").focus();
  return new Promise(done => {
    dialog.addEventListener("close", () => done(dialog.returnValue ? find("dialog-name").value.trim() : null), { once: true });
  });
}

async function forget(text) {
  const why = "Earlier versions of the memory are deleted, as they contain it. Downloads and forks keep it.";
  if ((await ask("Forget this sentence?", `“${text}” ${why}`, "Forget")) === null) return;
  show(null);
  await send("POST", here("/forget"), { text });
  find("query").value = "";
  say("Forgotten.");
  await showMemory();
}

const say = text => { find("status").textContent = text; };

// The chat.

function addMessage(role, text) {
  find("hint").hidden = true;
  const message = document.createElement("div");
  message.className = `message ${role}`;
  const who = document.createElement("b");
  who.textContent = role === "user" ? "You" : "Model";
  const content = document.createElement("span");
  content.textContent = text;
  message.append(who, content);
  find("log").append(message);
  find("log").scrollTop = find("log").scrollHeight;
  return message;
}

// Yield the data of the events in a stream.
async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    rest += value;
    const parts = rest.split("\n\n");
    rest = parts.pop();
    for (const part of parts) {
      const data = part.split("\n").find(line => line.startsWith("data: "))?.slice(6);
      if (data && data !== "[DONE]") yield JSON.parse(data);
    }
  }
}

async function answer(text) {
  addMessage("user", text);
  const message = addMessage("assistant", "");
  const log = find("log");
  running = new AbortController();
  setRunning(true);
  let is_complete = false;
  try {
    const body = { model, user: find("memory").value, stream: true, messages: [{ role: "user", content: text }] };
    const response = await request("v1/chat/completions", {
      method: "POST",
      headers: { "Content-Type": "application/json" },
      body: JSON.stringify(body),
      signal: running.signal,
    });
    for await (const event of events(response)) {
      if (event.error) throw new Error(event.error.message);
      const [choice] = event.choices;
      const follows = log.scrollTop + log.clientHeight > log.scrollHeight - 40;
      message.lastChild.textContent += choice.delta.content ?? "";
      if (follows) log.scrollTop = log.scrollHeight;
      is_complete ||= choice.finish_reason !== null;
    }
  } finally {
    running = null;
    setRunning(false);
    message.classList.toggle("cut", !is_complete);
    say(is_complete ? `Model: ${message.lastChild.textContent}` : "The answer was stopped.");
  }
  await listMemories();
  await showMemory();
}

function setRunning(is_running) {
  find("send").hidden = is_running;
  find("stop").hidden = !is_running;
  find("log").setAttribute("aria-busy", String(is_running));
  if (!is_running) find("message").focus();
}

// Controls.

on("composer", "submit", async event => {
  event.preventDefault();
  const text = find("message").value.trim();
  if (!text || running) return;
  find("message").value = "";
  await answer(text);
});
find("message").addEventListener("keydown", event => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    find("composer").requestSubmit();
  }
});
on("stop", "click", () => running?.abort());
on("memory", "change", () => choose(find("memory").value));
on("new", "click", async () => {
  const name = await ask("New memory", "It is empty, and other memories are not read by it.", "Create", "");
  if (!name) return;
  const made = await (await send("POST", "v1/memories", { name })).json();
  await choose(IN_PATHS.test(name) ? name : made.id);
});
on("fork", "click", async () => {
  const name = await ask("Fork this memory", "The copy goes on by itself.", "Fork", `${find("memory").value} 2`);
  if (!name) return;
  const made = await (await send("POST", here("/fork"), { name })).json();
  await choose(IN_PATHS.test(name) ? name : made.id);
});
on("delete", "click", async () => {
  const name = find("memory").value;
  if ((await ask("Delete this memory?", `“${name}” and all its versions are deleted for good.`, "Delete")) === null) return;
  await request(here(), { method: "DELETE" });
  await choose("");
  say("Deleted.");
});
on("download", "click", async () => {
  const content = await (await request(here("/content"))).blob();
  const link = document.createElement("a");
  link.href = URL.createObjectURL(content);
  link.download = `${find("memory").value}.mem`;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
});
on("upload", "click", () => find("file").click());
on("file", "change", async () => {
  const [file] = find("file").files;
  find("file").value = "";
  if (!file) return;
  const text = `“${file.name}” becomes the newest version of this memory.`;
  if ((await ask("Upload a memory?", text, "Upload")) === null) return;
  await request(here("/content"), { method: "PUT", headers: { "Content-Type": "application/octet-stream" }, body: file });
  await choose(find("memory").value);
  say("Uploaded.");
});
on("dialog-cancel", "click", () => find("dialog").close(""));
on("search", "submit", async event => {
  event.preventDefault();
  await showSentences();
});
on("query", "search", showSentences);
on("login", "submit", async event => {
  event.preventDefault();
  sessionStorage.setItem("key", find("key").value.trim());
  find("key").value = "";
  await start();
});

async function start() {
  const { data } = await json("v1/models");
  model = data[0].id;
  find("model").textContent = model;
  await choose(null);
  find("login").hidden = true;
  find("main").hidden = false;
  find("message").focus();
}

if (matchMedia("(max-width: 860px)").matches) find("panel").open = false;
start().catch(show);
