/** The page: a chat with the model in this tab (data-mode="local"), or with the server that it came from (data-mode="api"). */

import { markdown } from "./markdown.js";

const $ = (id) => document.getElementById(id);
const local = document.documentElement.dataset.mode === "local";
const IDLE = $("status").textContent;
const megabytes = (bytes) => `${(bytes / 1e6).toFixed(1)} MB`;

const say = (text) => ($("status").textContent = text);
const complain = (text) => ($("error").textContent = text);
const NEAR = 40; // pixels from the end of the conversation
const WORDS = 0.75; // of English, a token
const MOST = 512; // tokens of an answer, where Settings say nothing
let busy = true;
let ready = false;
let [topP, topK] = [1, 0];
let capacity, used = 0; // tokens of a conversation, and of this one

function show(running) {
  busy = running;
  for (const id of ["send", "clear", "save", "prove", "document", "load", "calls"]) $(id).disabled = busy || !ready;
  $("folder").disabled = busy && ready;
  $("stop").disabled = !busy || !ready;
  if (!busy) $("progress").hidden = true;
}

/** A line of the conversation; `said` is its text. */
function add(kind, text = "") {
  const line = Object.assign(document.createElement("div"), { className: kind, said: text });
  if (kind !== "assistant") line.textContent = text;
  $("log").append(line);
  $("log").scrollTop = $("log").scrollHeight;
  return line;
}

/** Show an answer so far, at most once a frame, and follow it unless the reader has scrolled away. */
function grow(line, text) {
  line.said += text;
  line.frame ??= requestAnimationFrame(() => draw(line));
}

function draw(line) {
  const log = $("log"), follows = log.scrollHeight - log.scrollTop - log.clientHeight < NEAR;
  cancelAnimationFrame(line.frame);
  line.frame = undefined;
  line.replaceChildren(markdown(line.said));
  if (follows) log.scrollTop = log.scrollHeight;
}

/** Below an answer: `text`, and buttons. */
function foot(line, text) {
  const log = $("log"), follows = log.scrollHeight - log.scrollTop - log.clientHeight < NEAR;
  const made = Object.assign(document.createElement("div"), { className: "foot", textContent: text });
  const button = (label, className, act) => {
    const one = Object.assign(document.createElement("button"), { type: "button", textContent: label, className });
    one.addEventListener("click", () => act(one));
    made.append(one);
  };
  button("Copy", "copy", async (one) => (one.textContent = (await copied(line.said)) ? "Copied" : "Not copied: select the text"));
  if (!local) button("Answer again", "again", again);
  line.append(made);
  if (follows) log.scrollTop = log.scrollHeight;
}

/** Whether a text is in the clipboard, which pages without TLS may reach by a selection only. */
async function copied(text) {
  if (navigator.clipboard) return navigator.clipboard.writeText(text).then(() => true, () => false);
  const area = Object.assign(document.createElement("textarea"), { value: text });
  document.body.append(area);
  area.select();
  const done = document.execCommand("copy");
  area.remove();
  return done;
}

const longest = () => Math.round($("most").valueAsNumber) || Math.max(1, Math.min(MOST, Math.floor((capacity || Infinity) / 4)));
const rounded = (number) => Number(number.toPrecision(2)).toLocaleString("en");
const inWords = (tokens) => `about ${rounded(WORDS * Math.max(0, tokens))} words`;

/** Show how long a conversation may be, or how much longer, after some tokens. */
function hold(tokens = used) {
  used = tokens;
  const whole = capacity ? `Holds ${capacity.toLocaleString("en")} tokens of a conversation, ${inWords(capacity)}.` : "Holds conversations of any length.";
  $("holds").textContent = capacity && used ? `Room for ${inWords(capacity - used)} more in this conversation.` : whole;
}

/** Show the model, and set what its publisher samples with.
 *  generation: Fields of generation_config.json; without do_sample it means the likeliest token. */
function introduce(name, tokens, generation = {}) {
  document.title = $("name").textContent = name;
  capacity = tokens;
  $("most").placeholder = longest();
  hold();
  const { do_sample, temperature = 1, top_p = 1, top_k = 0 } = generation;
  [topP, topK] = [top_p, top_k];
  $("temperature").value = do_sample ? temperature : 0;
  $("temperature").dispatchEvent(new Event("input"));
}

/** Run something that takes a while; its error becomes a sentence, and nothing that was said is lost. */
async function during(doing, work) {
  if (busy && ready) return;
  complain("");
  show(true);
  if (doing) say(doing);
  try {
    await work();
  } catch (error) {
    complain(error.message);
    say(ready ? "Ready: go on, or try again." : IDLE);
  }
  show(false);
}

// ---- the model in this tab

let worker, numbers = 0;
const calls = new Map();

function begin() {
  const made = new Worker("worker.js", { type: "module" });
  made.onerror = (event) => {
    event.preventDefault();
    if (made === worker) ready = false;
    for (const [id, call] of calls) if (call.to === made && calls.delete(id)) {
      call.reject(new Error("this tab is out of memory, or the page's files are damaged: reload the page and choose the package again. What was said stays above."));
    }
  };
  made.onmessage = ({ data }) => {
    const call = calls.get(data.id);
    if (!call) return;
    measure(data);
    if (!data.ended) return call.told?.(data);
    calls.delete(data.id);
    data.error ? call.reject(new Error(data.error)) : call.resolve(data);
  };
  return made;
}

const ask = (verb, fields = {}, told, to = worker) => new Promise((resolve, reject) => {
  const id = ++numbers;
  calls.set(id, { resolve, reject, told, to });
  to.postMessage({ id, verb, ...fields });
});

function measure({ memory, length, rate, first, done, total }) {
  if (memory) {
    const most = Math.max(memory.state, memory.attention, 1);
    $("state-bar").style.width = `${(100 * memory.state) / most}%`;
    $("attention-bar").style.width = `${(100 * memory.attention) / most}%`;
    const now = `${megabytes(memory.now)}${length === undefined ? "" : ` after ${length.toLocaleString("en")} tokens`}`, far = memory.tokens.toLocaleString("en");
    $("memory").textContent = `State: ${now}, ${megabytes(memory.state)} after ${far}`;
    $("attention").textContent = `Full attention would hold: ${megabytes(memory.attention)} after ${far} tokens`;
  }
  if (rate) $("rate").textContent = `${rate.toFixed(1)} tokens a second, first after ${(first / 1000).toFixed(1)} s`;
  if (total) {
    $("progress").hidden = done === total;
    $("progress").max = total;
    $("progress").value = done;
  }
}

/** Open a package in a worker of its own: where it cannot be opened, the conversation goes on with the model that was there. */
const open = (source) => during("Opening the package: reading and checking its files.", async () => {
  const next = begin();
  const threads = crossOriginIsolated ? Math.min(4, navigator.hardwareConcurrency) : 1;
  const { manifest, proof, generation } = await ask("open", { ...source, threads }, undefined, next).catch((error) => {
    next.terminate();
    throw error;
  });
  worker?.terminate();
  [worker, ready] = [next, true];
  if ($("log").childElementCount) add("note", "Another model, which has not read what is above.");
  const { model: { layers, hidden_size, family }, capacity: room, config } = manifest;
  introduce(config?.model?.split("/").filter(Boolean).at(-1) ?? family, room.bounded && room.capacity_tokens, generation);
  say(`Ready: ${layers} layers of ${hidden_size}${proof ? ", with recorded calls" : ""}, ${threads} thread${threads > 1 ? "s" : ""}.`);
}).then(() => ready && $("message").focus());

const named = (files) => new Map([...files].map((f) => [(f.webkitRelativePath || f.name).split("/").slice(-1)[0], f]));

async function dropped(event) {
  event.preventDefault();
  const entry = event.dataTransfer.items[0]?.webkitGetAsEntry();
  const file = event.dataTransfer.files[0];
  if (!entry?.isDirectory) return file && chosen(file);
  const reader = entry.createReader(), found = [];
  for (let part; (part = await new Promise((done, fail) => reader.readEntries(done, fail))).length; ) found.push(...part);
  const files = found.filter((e) => e.isFile).map((e) => new Promise((done, fail) => e.file(done, fail)));
  await open({ folder: named(await Promise.all(files)) });
}

const chosen = (file) => (/\.npz$/.test(file.name) ? prove(file) : /\.safetensors$/.test(file.name) ? load(file) : read(file));
const bytes = async (file) => new Uint8Array(await file.arrayBuffer());

const read = (file) => during(`Reading ${file.name}.`, async () => {
  $("log").replaceChildren();
  const { whole, length } = await ask("read", { text: await file.text() });
  add("note", `${file.name}: ${whole ? "read" : "read in part"}, ${length.toLocaleString("en")} tokens.`);
  say("Ready: ask about the document.");
});

const load = (file) => during(`Opening ${file.name}.`, async () => {
  const { length } = await ask("load", { file: await bytes(file) });
  $("log").replaceChildren();
  add("note", `${file.name}: ${length.toLocaleString("en")} tokens read before.`);
  say("Ready: ask about what was read.");
});

const save = () => during("Saving what was read.", async () => {
  const { file } = await ask("save");
  const link = Object.assign(document.createElement("a"), { href: URL.createObjectURL(new Blob([file])), download: "reading.safetensors" });
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 60_000);
  say(`Saved ${megabytes(file.length)}: this file opens here and with still-export run --load-state.`);
});

const prove = (file) => during("Running the recorded calls.", async () => {
  const body = $("proof").tBodies[0];
  body.replaceChildren();
  $("proof").hidden = false;
  let [cases, failed] = [0, 0];
  const given = file && await bytes(file);
  await ask("prove", { file: given }, ({ verdict }) => {
    if (!verdict) return;
    cases++;
    failed += !verdict.passed;
    const row = body.insertRow();
    for (const text of [verdict.name, verdict.logits.toExponential(1), verdict.state.toExponential(1)]) row.insertCell().textContent = text;
    Object.assign(row.insertCell(), { textContent: verdict.passed ? "passed" : "FAILED", className: verdict.passed ? "" : "wrong" });
  });
  say(failed ? `Not proven: ${failed} of ${cases} cases differ from PyTorch.` : `Proven: ${cases} cases agree with PyTorch.`);
});

// ---- the server that the page came from

const TALK = "still-export talk"; // of this tab, kept over a reload
const SALT = Array.from(crypto.getRandomValues(new Uint8Array(16)), String).join("-"); // nobody else's requests share this talk's states
const turns = [];
let model, leaving;

async function request(path, body) {
  const key = $("api-key").value;
  const headers = { "content-type": "application/json", ...(key && { authorization: `Bearer ${key}` }) };
  const sent = { method: body ? "POST" : "GET", headers, body: body && JSON.stringify(body), signal: leaving?.signal };
  const answer = await fetch(path, sent).catch(unreachable);
  if (answer.ok) {
    $("key").hidden = true;
    return answer;
  }
  if (answer.status === 401) $("key").hidden = false;
  throw new Error((await answer.json().catch(() => ({})))?.error?.message ?? `the server answered ${answer.status}.`);
}

function unreachable(error) {
  if (error.name === "AbortError") throw error;
  const port = location.port && location.port !== "8000" ? ` --port ${location.port}` : "";
  throw new Error(`The server does not answer. Start it again where it ran, then send again: still-export serve ${model ?? "DIR"}${port}`);
}

function keep() {
  try {
    sessionStorage.setItem(TALK, JSON.stringify({ turns, used, system: $("system").value, most: $("most").value }));
  } catch {
    // no storage, or more than it holds: the talk ends with the page
  }
}

/** Show the conversation of before a reload. */
function restore() {
  const { turns: kept = [], used: before = 0, system = "", most = "" } = JSON.parse(sessionStorage.getItem(TALK) ?? "{}");
  [used, $("system").value, $("most").value] = [before, system, most];
  for (const { role, content } of kept) {
    turns.push({ role, content });
    const line = add(role, content);
    if (role === "user") continue;
    draw(line);
    foot(line, "");
  }
  $("log").scrollTop = $("log").scrollHeight;
}

/** Ask the server for its model. */
async function meet() {
  const [{ id, max_model_len, generation_config }] = (await (await request("/v1/models")).json()).data;
  model = id;
  introduce(id, max_model_len, generation_config);
}

/** The answer to a message, written into `line`; whether it was cut, and a sentence about its speed. */
async function served(message, line) {
  let [cut, told, first, last] = [false, ""];
  const begin = performance.now();
  leaving = new AbortController();
  if (!model) await meet();
  const system = $("system").value.trim();
  const messages = [...(system ? [{ role: "system", content: system }] : []), ...turns, { role: "user", content: message }];
  const sampling = { temperature: $("temperature").valueAsNumber, top_p: topP, top_k: topK };
  const asked = { model, messages, stream: true, stream_options: { include_usage: true }, max_tokens: longest(), ...sampling };
  if ($("api-key").value) asked.cache_salt = SALT;
  const answer = await request("/v1/chat/completions", asked);
  let rest = "";
  try {
    for await (const part of answer.body.pipeThrough(new TextDecoderStream())) {
      const lines = (rest + part).split("\n");
      rest = lines.pop();
      for (const said of lines.filter((l) => l.startsWith("data: {"))) {
        const { error, choices, usage } = JSON.parse(said.slice(6));
        if (error) throw new Error(error.message);
        if (usage) {
          told = spoken(usage, first - begin, last - first);
          hold(usage.total_tokens);
        }
        const { delta: { content, reasoning_content } = {}, finish_reason } = choices[0] ?? {};
        if (content || reasoning_content) first ??= performance.now(), last = performance.now();
        if (reasoning_content) say("Thinking.");
        cut ||= finish_reason === "length";
        grow(line, content ?? "");
      }
    }
  } catch (error) {
    if (error.name !== "AbortError") throw error.name === "TypeError" ? new Error("The server stopped in the middle of its answer.") : error;
    told = "stopped here";
  }
  turns.push({ role: "user", content: message }, { role: "assistant", content: line.said });
  keep();
  return { cut, told };
}

function spoken({ completion_tokens: tokens }, first_ms, rest_ms) {
  if (!(first_ms >= 0)) return "an empty answer";
  const rate = tokens > 1 && rest_ms > 0 ? `, ${((1000 * (tokens - 1)) / rest_ms).toFixed(1)} tokens a second` : "";
  return `${tokens.toLocaleString("en")} tokens, first after ${(first_ms / 1000).toFixed(1)} s${rate}`;
}

/** Ask for the last answer once more. */
function again() {
  if (busy) return;
  const [{ content: message }] = turns.slice(-2);
  const lines = [...$("log").children], mine = lines.findLast((l) => l.className === "user");
  const before = [...turns], below = lines.slice(lines.indexOf(mine) + 1);
  turns.splice(-2);
  below.forEach((l) => l.remove());
  answering(message, mine, () => {
    turns.splice(0, turns.length, ...before);
    $("log").append(...below);
  });
}

// ---- what both have

/** Answer a message, whose line is `mine`; `undo` where no word of an answer comes. */
const answering = (message, mine, undo) => during("Answering.", async () => {
  const line = add("assistant");
  try {
    const sampling = { temperature: $("temperature").valueAsNumber, topK, topP, seed: crypto.getRandomValues(new Uint32Array(1))[0] };
    const { cut, told = "" } = local
      ? await ask("ask", { message, tokens: longest(), ...sampling }, ({ text }) => grow(line, text ?? ""))
      : await served(message, line);
    draw(line);
    foot(line, told);
    if (cut) add("note cut", "The answer was cut here: it is as long as Settings let it be.");
    say("Ready.");
  } catch (error) {
    draw(line);
    if (line.said) add("note", "The answer broke off here. It is no part of the conversation.");
    else line.remove();
    undo(line);
    throw error;
  }
}).then(() => $("message").focus());

$("form").addEventListener("submit", (event) => {
  event.preventDefault();
  const message = $("message").value.trim();
  if (!message || busy) return;
  $("message").value = "";
  const mine = add("user", message);
  answering(message, mine, (line) => {
    if (!line.said) mine.remove();
    $("message").value ||= message;
  });
});
$("message").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey) {
    event.preventDefault();
    $("form").requestSubmit();
  }
});
$("temperature").addEventListener("input", () => ($("temperature-shown").textContent = $("temperature").value));
$("stop").addEventListener("click", () => (local ? worker.postMessage({ verb: "stop" }) : leaving?.abort()));
$("clear").addEventListener("click", () => during("", async () => {
  if (local) await ask("clear");
  turns.length = 0;
  keep();
  $("log").replaceChildren();
  hold(0);
  say("Ready: a new conversation.");
}));

if (local) {
  const inputs = { folder: (files) => open({ folder: named(files) }), document: ([f]) => read(f), load: ([f]) => load(f), calls: ([f]) => prove(f) };
  for (const [id, use] of Object.entries(inputs)) $(id).addEventListener("change", async ({ target }) => {
    if (target.files.length) await use([...target.files]);
    target.value = "";
  });
  $("save").addEventListener("click", save);
  $("prove").addEventListener("click", () => prove());
  addEventListener("dragover", (event) => event.preventDefault());
  addEventListener("drop", dropped);
  // The service worker keeps the page for the next visit without a network, and isolates it, which threads need.
  const kept = await navigator.serviceWorker?.register("sw.js").then(() => navigator.serviceWorker.ready).catch(() => undefined);
  const from = new URLSearchParams(location.search).get("package");
  if (kept && !crossOriginIsolated && !sessionStorage.getItem("isolated")) {
    sessionStorage.setItem("isolated", "tried");
    location.reload();
  } else if (from) await open({ base: new URL(from.replace(/\/?$/, "/"), location.href).href });
  else show(false);
} else {
  ready = true;
  restore();
  show(false);
  say("Ready.");
  await meet().catch((error) => ($("key").hidden ? complain(error.message) : say("This server asks for a key.")));
}
document.documentElement.dataset.loaded = "yes";
