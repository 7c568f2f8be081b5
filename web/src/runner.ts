/** A package of `still-export --to web` in onnxruntime-web: opening, reading, answering, snapshots. Mirrors still_export/runtime. */

import { Tokenizer } from "@huggingface/tokenizers";
import * as ort from "onnxruntime-web/wasm";
import { Chat, type Message, type Place, type Templates } from "./chat.js";
import { HeapTensor, run, size } from "./heap.js";
import type { Sampling } from "./sampling.js";

interface Growth { rows: number; per: number; lag: number; fixed: boolean }
export interface Manifest {
  format_version: number;
  target: string;
  model: Record<"vocab_size" | "layers" | "hidden_size" | "kv_heads" | "head_dim", number>;
  capacity: { capacity_tokens: number; bounded: boolean };
  prefill_tokens: number;
  states: { name: string; shape: (number | string)[]; dtype: "float32"; growth: Growth | null }[];
  eos_token_ids: number[];
  state_identity: string;
  chat: Templates | null;
  files: Record<string, { sha256: string; size_bytes: number }>;
}
/** Where a package's files come from; rejects, or gives undefined, where one is not there. */
export type Files = (name: string) => Promise<Uint8Array<ArrayBuffer> | undefined>;
export type Progress = (done: number, total: number) => void;
export type Stopped = () => boolean | Promise<boolean>;

/** What is wrong, in one sentence for people. */
export class RunError extends Error {}

/** A state to go back to, and the tokens behind the chat's beginning that it has read. */
interface Point { file: Uint8Array<ArrayBuffer> | undefined; place: Place; unread: number[]; read: number[] }

const FORMAT = "still-export state 1";
const SPARE_TOKENS = 256;
const FAR = 65_536; // tokens of a conversation without a limit, for what it would take
const TAIL = 32; // tokens of a prompt that may end with the mark of reasoning
const SIMD = Uint8Array.from([0, 97, 115, 109, 1, 0, 0, 0, 1, 5, 1, 96, 0, 1, 123, 3, 2, 1, 0, 10, 10, 1, 8, 0, 65, 0, 253, 15, 253, 98, 11]);

export interface Options { runtime: string; threads?: number; progress?: Progress } // runtime: where ort.mjs and its wasm lie

const hex = (bytes: ArrayBuffer) => [...new Uint8Array(bytes)].map((b) => b.toString(16).padStart(2, "0")).join("");
const sha256 = async (bytes: Uint8Array<ArrayBuffer>) => hex(await crypto.subtle.digest("SHA-256", bytes));
const decoded = (bytes: Uint8Array) => JSON.parse(new TextDecoder().decode(bytes));

/** The sentence of an error of the browser's or the runtime's. */
export function sentence(error: unknown): string {
  const text = error instanceof Error ? error.message : String(error);
  if (error instanceof RunError) return text;
  const full = error instanceof RangeError || /memory|alloc|^\d+$/i.test(text);
  if (full) return "this tab is out of memory: close other tabs, take a smaller package, or read a shorter text.";
  return `the model cannot be run: ${text.split("\n")[0]}`;
}

async function wanted(files: Files, manifest: Manifest, name: string): Promise<Uint8Array<ArrayBuffer>> {
  const entry = manifest.files[name];
  const bytes = entry && (await files(name).catch(() => undefined));
  if (!entry || !bytes) throw new RunError(`${name} is missing from this package: copy or export it again.`);
  if (bytes.length !== entry.size_bytes || (await sha256(bytes)) !== entry.sha256) {
    throw new RunError(`${name} is not the file that was exported (its SHA-256 differs): copy or export the package again.`);
  }
  return bytes;
}

/** A package's model; one sequence. */
export class Model {
  length = 0;
  room = 0;
  place: Place = "text"; // where what was read stops: in plain text, inside a user's message, after an answer
  unread: number[] = []; // tokens behind it
  cut = false; // the last answer had as many tokens as it might
  private states: Record<string, HeapTensor> = {};
  private readonly chat: Chat | undefined;
  private said: Message[] = []; // since the first of `points`
  private known: number[] = []; // tokens behind it that the state has read
  private points: Point[] = []; // where the chat begins, and how far its beginning is the same in every turn

  private constructor(readonly manifest: Manifest, readonly session: ort.InferenceSession, readonly tokenizer?: Tokenizer) {
    this.chat = manifest.chat ? new Chat(manifest.chat) : undefined;
    this.start();
  }

  /** Open a package.
   *  @throws RunError The package is none, or damaged, or this browser cannot run it. */
  static async open(files: Files, options: Options): Promise<Model> {
    if (!WebAssembly.validate(SIMD)) throw new RunError("this browser has no WebAssembly SIMD: take one of 2023 or later.");
    const manifest: Manifest | undefined = await files("manifest.json").then((bytes) => decoded(bytes!)).catch(() => undefined);
    if (!manifest) throw new RunError("this is no package: it has no manifest.json that can be read. Make one with still-export MODEL --to web.");
    if (manifest.format_version !== 2 || manifest.target !== "web") {
      throw new RunError(`this package is for ${manifest.target ?? "nothing known"}, not for browsers: still-export lower PACKAGE --to web.`);
    }
    const names = Object.keys(manifest.files).filter((n) => n.endsWith(".data"));
    const total = names.reduce((sum, n) => sum + manifest.files[n]!.size_bytes, 0);
    const externalData: { path: string; data: Uint8Array }[] = [];
    for (const path of names) {
      externalData.push({ path, data: await wanted(files, manifest, path) });
      options.progress?.(externalData.reduce((sum, { data }) => sum + data.length, 0), total);
    }
    const graph = await wanted(files, manifest, "model.onnx");
    const read = async (name: string) => decoded(await wanted(files, manifest, name));
    const tokens = manifest.files["tokenizer.json"] && new Tokenizer(await read("tokenizer.json"), await read("tokenizer_config.json"));
    ort.env.logLevel = "error";
    ort.env.wasm.numThreads = options.threads ?? 0;
    ort.env.wasm.wasmPaths = { mjs: new URL("ort.mjs", options.runtime).href, wasm: new URL("ort-wasm-simd-threaded.wasm", options.runtime).href };
    // Weights in few bits are dequantized when the graph is loaded, not on every call (docs/notebook/web.md).
    const asked = { executionProviders: ["wasm"], externalData, extra: { session: { disable_quant_qdq: "1" } } };
    return new Model(manifest, await ort.InferenceSession.create(graph, asked), tokens);
  }

  /** Dimensions of the states with room for `tokens` tokens. */
  private shapes(tokens: number): [string, number[]][] {
    const { capacity: { capacity_tokens }, states } = this.manifest;
    const rows = (g: Growth) => g.rows * Math.max(0, Math.ceil((g.fixed ? capacity_tokens : tokens) / g.per) - g.lag);
    return states.map((s) => [s.name, s.shape.map((d) => (typeof d === "number" ? d : d === "batch" ? 1 : rows(s.growth!)))]);
  }

  /** Bytes of the states now; of them, and of full attention's keys and values, after `tokens`: the capacity, or where there is none FAR. */
  memory(): { now: number; tokens: number; state: number; attention: number } {
    const { layers, kv_heads, head_dim } = this.manifest.model, { bounded, capacity_tokens } = this.manifest.capacity;
    const tokens = Math.max(this.length, bounded ? capacity_tokens : FAR);
    const state = 4 * this.shapes(tokens).reduce((sum, [, dims]) => sum + size(dims), 0);
    const now = Object.values(this.states).reduce((sum, { bytes }) => sum + bytes, 0);
    return { now, tokens, state, attention: 2 * 4 * layers * kv_heads * head_dim * tokens };
  }

  /** Forget everything. */
  start(): void {
    [this.length, this.place, this.unread, this.said] = [0, "text", [], []];
    this.points = [{ file: undefined, place: "text", unread: [], read: [] }];
    this.resize(0, false);
  }

  /** Make room for `tokens` more tokens, keeping the state. */
  reserve(tokens: number): void {
    const { capacity_tokens, bounded } = this.manifest.capacity;
    const needed = this.length + tokens, most = bounded ? capacity_tokens : Infinity;
    if (needed > most) throw new RunError(`${needed} tokens exceed this package's capacity of ${most} tokens: begin anew or read less.`);
    if (needed > this.room) this.resize(Math.min(most, needed + (this.room && Math.max(SPARE_TOKENS, needed >> 3))));
  }

  private resize(tokens: number, keep = true): void {
    const after: Record<string, HeapTensor> = {};
    for (const [name, dims] of this.shapes(tokens)) {
      const held = keep && this.states[name];
      after[name] = held && size(held.dims) === size(dims) ? held : new HeapTensor("float32", dims);
    }
    // Nothing was changed so far, should memory have ended.
    for (const [name, state] of Object.entries(this.states)) if (after[name] !== state) {
      if (keep) copyRows(state, after[name]!);
      state.free();
    }
    [this.states, this.room] = [after, tokens];
  }

  /** Logits [V] after `ids`. */
  async feed(ids: number[]): Promise<Float32Array> {
    this.reserve(ids.length);
    const count = ids.length;
    const given = { input_ids: HeapTensor.of(ids, [1, count]), new_tokens: HeapTensor.of([count]), past_length: HeapTensor.of([this.length]) };
    const logits = new HeapTensor("float32", [1, 1, this.manifest.model.vocab_size]);
    const under = (kind: string) => Object.fromEntries(Object.entries(this.states).map(([name, state]) => [`${kind}_${name}`, state]));
    try {
      run(this.session, { ...given, ...under("past") }, { logits, ...under("present") });
      this.length += count;
      return logits.floats.slice();
    } finally {
      [...Object.values(given), logits].forEach((tensor) => tensor.free());
    }
  }

  /** Read a text in pieces; logits [V] of its last token. `stopped` is asked between pieces, and gives undefined. */
  async prefill(ids: number[], progress?: Progress, stopped?: Stopped): Promise<Float32Array | undefined> {
    const { vocab_size } = this.manifest.model;
    if (!ids.length || ids.some((t) => !(t >= 0 && t < vocab_size))) throw new RunError(`a prompt needs tokens of 0..${vocab_size - 1}.`);
    this.reserve(ids.length);
    let logits: Float32Array | undefined;
    for (let at = 0; at < ids.length; at += this.manifest.prefill_tokens) {
      if (await stopped?.()) return undefined;
      logits = await this.feed(ids.slice(at, at + this.manifest.prefill_tokens));
      progress?.(Math.min(at + this.manifest.prefill_tokens, ids.length), ids.length);
    }
    return logits;
  }

  /** Tokens that follow `prompt`, at most `count`, up to one of the model's ends. The last one is not fed to the model. */
  async *generate(prompt: number[], count: number, sampling: Sampling, progress?: Progress, stopped?: Stopped): AsyncGenerator<number> {
    let logits = await this.prefill(prompt, progress, stopped);
    for (let i = 0; i < count && logits; i++) {
      const token = sampling.choose(logits);
      if (this.manifest.eos_token_ids.includes(token)) return;
      yield token;
      if (i + 1 === count || (await stopped?.())) return;
      logits = await this.feed([token]);
    }
  }

  /** Digest of what a snapshot's numbers depend on (still_export/runtime/snapshot.py). */
  async digest(): Promise<string> {
    return sha256(new TextEncoder().encode(`["${this.manifest.state_identity}"]`));
  }

  /** What was read, as a file that `still-export run --load-state` takes too. */
  async save(): Promise<Uint8Array<ArrayBuffer>> {
    this.resize(this.length); // rows that hold nothing stay behind
    const said = { length: this.length, package: await this.digest(), place: this.place, unread: this.unread };
    const head: Record<string, unknown> = { __metadata__: { format: FORMAT, still_export: JSON.stringify(said) } };
    const states = Object.entries(this.states);
    let end = 0;
    for (const [name, { dims, bytes }] of states) head[name] = { dtype: "F32", shape: dims, data_offsets: [end, (end += bytes)] };
    const text = new TextEncoder().encode(JSON.stringify(head));
    const begin = 8 + 8 * Math.ceil(text.length / 8);
    const file = new Uint8Array(begin + end).fill(32, 8, begin);
    new DataView(file.buffer).setBigUint64(0, BigInt(begin - 8), true);
    file.set(text, 8);
    states.reduce((at, [, { floats }]) => (new Float32Array(file.buffer, at).set(floats), at + floats.byteLength), begin);
    return file;
  }

  /** Go on from what `save` wrote. Nothing changes where it throws. */
  async load(file: Uint8Array<ArrayBuffer>): Promise<void> {
    await this.put(file);
    [this.said, this.points] = [[], [{ file, place: this.place, unread: this.unread, read: [] }]];
  }

  private async put(file: Uint8Array<ArrayBuffer>): Promise<void> {
    const wrong = new RunError("this file is no saved state: a page's button or still-export run --save-state makes one.");
    let head: any, said: any, begin: number; // of JSON
    try {
      begin = 8 + Number(new DataView(file.buffer, file.byteOffset).getBigUint64(0, true));
      head = decoded(file.subarray(8, begin));
      said = JSON.parse(head.__metadata__.still_export);
      if (head.__metadata__.format !== FORMAT) throw wrong;
    } catch {
      throw wrong;
    }
    if (said.package !== (await this.digest())) throw new RunError("this state is of another package, or another export of the model: read the text again.");
    const parts = this.shapes(said.length).map(([name, dims]): [string, Float32Array] => {
      const [from, to] = head[name]?.data_offsets ?? [0, -1];
      if (to - from !== 4 * size(dims) || begin + to > file.length) throw wrong;
      return [name, new Float32Array(file.slice(begin + from, begin + to).buffer)];
    });
    this.resize(said.length, false);
    for (const [name, floats] of parts) this.states[name]!.floats.set(floats);
    [this.length, this.place, this.unread] = [said.length, said.place, said.unread];
  }

  encode(text: string, special = false): number[] {
    if (!this.tokenizer) throw new RunError("this package has no tokenizer, so it cannot answer text.");
    return this.tokenizer.encode(text, { add_special_tokens: special }).ids;
  }

  /** Read a document as the beginning of the first message. False: stopped; what was read stays. */
  async read(text: string, progress?: Progress, stopped?: Stopped): Promise<boolean> {
    this.start();
    const whole = await this.prefill(this.encode((this.chat?.opening() ?? "") + text, !this.chat), progress, stopped);
    this.place = "user";
    this.points = [{ file: await this.save(), place: "user", unread: [], read: [] }];
    return Boolean(whole);
  }

  /** The tokens of a chat behind its beginning. */
  private chatIds(said: Message[]): number[] {
    const { place, unread } = this.points[0]!;
    const text = this.chat ? this.chat.behind(said, place) : said.map((message) => message.content).join("");
    return [...unread, ...this.encode(text, place === "text" && !this.chat)];
  }

  /** Go back to the last point that `ids` go on from; how many of them it has read. */
  private async back(ids: number[]): Promise<number> {
    const point = this.points.filter(({ read }) => begins(ids, read)).at(-1)!;
    if (point.file) await this.put(point.file);
    else {
      this.length = 0;
      this.resize(0, false);
    }
    return point.read.length;
  }

  /** The answer to a message, in pieces of text as they become certain. The chat is written anew; what of it was read is not read again. */
  async *ask(message: string, count: number, sampling: Sampling, progress?: Progress, stopped?: Stopped): AsyncGenerator<string> {
    const said = [...this.said, { role: "user", content: message }];
    const ids = this.chatIds(said);
    this.reserve(Math.max(0, ids.length - this.known.length) + count);
    let read = this.said.length && begins(ids, this.known) ? this.known.length : await this.back(ids);
    // Templates drop thoughts that an answer began with: what every later turn begins with too is kept.
    const later = this.chat?.thoughts ? this.chatIds([...said, { role: "assistant", content: "." }, { role: "user", content: "." }]) : ids;
    const settled = ids.findIndex((token, i) => token !== later[i]);
    const opened = Boolean(this.chat?.opens(this.tokenizer?.decode(ids.slice(-TAIL), { skip_special_tokens: false }) ?? ""));
    const [from, begun] = [read, this.length], tokens: number[] = [];
    const text = () => (tokens.length ? this.tokenizer!.decode(tokens, { skip_special_tokens: true }) : "");
    let shown = 0;
    this.place = "answer";
    try {
      if (settled > read) {
        if (!(await this.prefill(ids.slice(read, settled), progress, stopped))) return;
        read = settled;
        this.points = [this.points[0]!, { file: await this.save(), place: "answer", unread: [], read: ids.slice(0, settled) }];
      }
      for await (const token of this.generate(ids.slice(read), count, sampling, progress, stopped)) {
        tokens.push(token);
        if (text().endsWith("\ufffd")) continue; // half a character
        yield text().slice(shown);
        shown = text().length;
      }
    } finally {
      // The last token, unless the model's own end came behind it; of a prompt that was stopped, the rest.
      this.cut = tokens.length === count;
      const whole = [...ids, ...tokens], end = from + this.length - begun;
      [this.known, this.unread] = [whole.slice(0, end), whole.slice(end)];
      const answer = this.tokenizer?.decode(tokens, { skip_special_tokens: !this.chat?.thoughts }) ?? "";
      this.said = [...said, this.chat ? this.chat.message(answer, opened) : { role: "assistant", content: answer }];
    }
    if (text().length > shown) yield text().slice(shown);
  }
}

/** Whether `ids` begin with all of `first`, and have more. */
const begins = (ids: number[], first: number[]) => first.length < ids.length && first.every((token, i) => token === ids[i]);

/** Copy what two states whose shapes differ in one dimension share, from their beginning. */
function copyRows(read: HeapTensor, write: HeapTensor): void {
  const axis = Math.max(0, read.dims.findIndex((d, i) => d !== write.dims[i]));
  const inner = size(read.dims.slice(axis + 1));
  const [old, now] = [inner * read.dims[axis]!, inner * write.dims[axis]!];
  const [from, to] = [read.floats, write.floats];
  for (let i = 0; i < size(read.dims.slice(0, axis)); i++) to.set(from.subarray(i * old, i * old + Math.min(old, now)), i * now);
}
