/** A package of `still-export --to web` in onnxruntime-web: opening, reading, answering, snapshots. Mirrors still_export/runtime. */

import { Tokenizer } from "@huggingface/tokenizers";
import * as ort from "onnxruntime-web/wasm";

import { Heap, type HeapTensor } from "./heap.js";
import { Sampling, likeliest } from "./sampling.js";

export interface Growth { dimension: string; axis: number; rows: number; per: number; lag: number; fixed: boolean }
export interface State { name: string; shape: (number | string)[]; dtype: "float32"; in_place: boolean; growth: Growth | null }
export interface Manifest {
  format_version: number;
  target: string;
  model: { vocab_size: number; layers: number; hidden_size: number; heads: number; kv_heads: number; head_dim: number };
  capacity: { capacity_tokens: number; bounded: boolean };
  prefill_tokens: number;
  states: State[];
  eos_token_ids: number[];
  chat: Record<string, string> | null;
  files: Record<string, { sha256: string; size_bytes: number }>;
}
/** Where a package's files come from; rejects, or gives undefined, where one is not there. */
export type Files = (name: string) => Promise<Uint8Array<ArrayBuffer> | undefined>;
export type Progress = (done: number, total: number) => void;
export type Stopped = () => boolean | Promise<boolean>;
export type Arrays = Record<string, ort.Tensor>;

/** What is wrong, in one sentence for people. */
export class RunError extends Error {}

const FORMAT = "still-export state 1";
const SPARE_TOKENS = 256;
const SIMD = Uint8Array.from([0, 97, 115, 109, 1, 0, 0, 0, 1, 5, 1, 96, 0, 1, 123, 3, 2, 1, 0, 10, 10, 1, 8, 0, 65, 0, 253, 15, 253, 98, 11]);

/** `runtime`: where ort.mjs and onnxruntime-web's files lie. */
export interface Options { runtime: string; threads?: number; progress?: Progress }

const hex = (bytes: ArrayBuffer) => [...new Uint8Array(bytes)].map((b) => b.toString(16).padStart(2, "0")).join("");
export const sha256 = async (bytes: Uint8Array<ArrayBuffer>) => hex(await crypto.subtle.digest("SHA-256", bytes));
const size = (dims: readonly number[]) => dims.reduce((a, b) => a * b, 1);

/** The sentence of an error of the browser's or the runtime's. */
export function sentence(error: unknown): string {
  const text = error instanceof Error ? error.message : String(error);
  if (error instanceof RunError) return text;
  if (error instanceof RangeError || /memory|alloc|^\d+$/i.test(text)) {
    return "this tab is out of memory: close other tabs, take a smaller package, or read a shorter text.";
  }
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

export async function readManifest(files: Files): Promise<Manifest> {
  const bytes = await files("manifest.json").catch(() => undefined);
  if (!bytes) throw new RunError("this is no package: it has no manifest.json. Make one with still-export MODEL --to web.");
  let manifest: Manifest;
  try { manifest = JSON.parse(new TextDecoder().decode(bytes)) as Manifest; } catch {
    throw new RunError("manifest.json of this package is damaged: copy or export the package again.");
  }
  if (manifest.format_version !== 2 || manifest.target !== "web") {
    throw new RunError(`this package is for ${manifest.target ?? "nothing known"}, not for browsers: still-export lower PACKAGE --to web.`);
  }
  return manifest;
}

/** A package's model; one sequence. */
export class Model {
  length = 0;
  room = 0;
  private readonly heap: Heap;
  private readonly logits: HeapTensor;
  private states: Record<string, HeapTensor> = {};
  /** Where a call writes states that it may not write in place. */
  private spare: Record<string, HeapTensor> = {};

  private constructor(readonly manifest: Manifest, readonly session: ort.InferenceSession, readonly tokenizer: Tokenizer | null) {
    this.heap = new Heap(session);
    this.logits = this.heap.tensor("float32", [1, 1, manifest.model.vocab_size]);
    this.start();
  }

  /** Open a package.
   *  @throws RunError The package is none, or damaged, or this browser cannot run it. */
  static async open(files: Files, options: Options): Promise<Model> {
    if (!WebAssembly.validate(SIMD)) throw new RunError("this browser has no WebAssembly SIMD: take one of 2023 or later.");
    const manifest = await readManifest(files);
    const names = Object.keys(manifest.files).filter((n) => n.endsWith(".data"));
    const total = names.reduce((sum, n) => sum + manifest.files[n]!.size_bytes, 0);
    let done = 0;
    const externalData = [];
    for (const name of names) {
      externalData.push({ path: name, data: await wanted(files, manifest, name) });
      options.progress?.((done += manifest.files[name]!.size_bytes), total);
    }
    const graph = await wanted(files, manifest, "model.onnx");
    let tokenizer = null;
    if (manifest.files["tokenizer.json"]) {
      const read = async (name: string) => JSON.parse(new TextDecoder().decode(await wanted(files, manifest, name)));
      tokenizer = new Tokenizer(await read("tokenizer.json"), await read("tokenizer_config.json"));
    }
    ort.env.logLevel = "error";
    ort.env.wasm.numThreads = options.threads ?? 0;
    ort.env.wasm.wasmPaths = { mjs: new URL("ort.mjs", options.runtime).href, wasm: new URL("ort-wasm-simd-threaded.wasm", options.runtime).href };
    // Weights in few bits are dequantized when the graph is loaded, not on every call (docs/notebook/web.md).
    const asked = { executionProviders: ["wasm"], externalData, extra: { session: { disable_quant_qdq: "1" } } };
    const session = await ort.InferenceSession.create(graph, asked).catch((error) => { throw new RunError(sentence(error)); });
    return new Model(manifest, session, tokenizer);
  }

  /** Shapes of the states with room for `tokens` tokens. */
  shapes(tokens: number): { name: string; dims: number[]; in_place: boolean }[] {
    const capacity = this.manifest.capacity.capacity_tokens;
    const rows = (g: Growth) => g.rows * Math.max(0, Math.ceil((g.fixed ? capacity : tokens) / g.per) - g.lag);
    const resolved = (s: State) => s.shape.map((d) => (typeof d === "number" ? d : d === "batch" ? 1 : rows(s.growth!)));
    return this.manifest.states.map((s) => ({ name: s.name, dims: resolved(s), in_place: s.in_place }));
  }

  /** Bytes of the states now, and of full attention's keys and values after as many tokens. */
  memory(): { state: number; attention: number } {
    const { layers, kv_heads, head_dim } = this.manifest.model;
    const state = Object.values(this.states).reduce((sum, t) => sum + t.bytes, 0);
    return { state, attention: 2 * 4 * layers * kv_heads * head_dim * this.length };
  }

  /** Forget everything. */
  start(): void {
    this.length = 0;
    this.resize(0, false);
  }

  /** Make room for `tokens` more tokens, keeping the state. */
  reserve(tokens: number): void {
    const { capacity_tokens, bounded } = this.manifest.capacity;
    const needed = this.length + tokens;
    if (bounded && needed > capacity_tokens) {
      throw new RunError(`${needed} tokens exceed this package's capacity of ${capacity_tokens} tokens: begin anew, or read a shorter text.`);
    }
    if (needed <= this.room) return;
    const ample = this.room ? needed + Math.max(SPARE_TOKENS, needed >> 3) : needed;
    this.resize(bounded ? Math.min(ample, capacity_tokens) : ample);
  }

  private resize(tokens: number, keep = true): void {
    const states: Record<string, HeapTensor> = {}, spare: Record<string, HeapTensor> = {};
    const held = keep ? this.states : {};
    for (const { name, dims, in_place } of this.shapes(tokens)) {
      const same = held[name]?.size === size(dims);
      states[name] = same ? held[name]! : this.heap.tensor("float32", dims);
      if (!in_place) spare[name] = same ? this.spare[name]! : this.heap.tensor("float32", dims);
    }
    // Nothing was changed so far, should memory have ended.
    for (const [name, state] of Object.entries(this.states)) {
      if (states[name] === state) continue;
      if (keep) copyRows(state.floats, state.dims, states[name]!.floats, states[name]!.dims);
      state.free();
      this.spare[name]?.free();
    }
    [this.states, this.spare, this.room] = [states, spare, tokens];
  }

  /** Outputs of one call over all its inputs. */
  async infer(feed: Arrays): Promise<Arrays> {
    return this.session.run(feed).catch((error) => { throw new RunError(sentence(error)); });
  }

  /** Logits [V] after `ids`. */
  async feed(ids: number[]): Promise<Float32Array> {
    this.reserve(ids.length);
    const given = { input_ids: ids, new_tokens: [ids.length], past_length: [this.length] };
    const inputs: Record<string, HeapTensor> = {}, outputs: Record<string, HeapTensor> = { logits: this.logits };
    for (const [name, values] of Object.entries(given)) {
      inputs[name] = this.heap.tensor("int64", name === "input_ids" ? [1, values.length] : [1]);
      inputs[name].write(values);
    }
    for (const [name, state] of Object.entries(this.states)) {
      inputs[`past_${name}`] = state;
      outputs[`present_${name}`] = this.spare[name] ?? state;
    }
    try {
      await this.heap.run(inputs, outputs);
    } catch (error) {
      throw new RunError(sentence(error));
    } finally {
      for (const name of Object.keys(given)) inputs[name]!.free();
    }
    for (const [name, spare] of Object.entries(this.spare)) [this.states[name], this.spare[name]] = [spare, this.states[name]!];
    this.length += ids.length;
    return this.logits.floats.slice();
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
      const token = sampling.temperature === 0 ? likeliest(logits) : sampling.choose(logits);
      if (this.manifest.eos_token_ids.includes(token)) return;
      yield token;
      if (i + 1 === count || (await stopped?.())) return;
      logits = await this.feed([token]);
    }
  }

  /** Digest of graph, weights and states: what a snapshot's numbers depend on (still_export/runtime/snapshot.py). */
  async digest(): Promise<string> {
    const files = Object.keys(this.manifest.files).filter((n) => n.endsWith(".onnx") || n.endsWith(".data")).sort();
    const hashes = files.map((n) => `${JSON.stringify(n)}: "${this.manifest.files[n]!.sha256}"`).join(", ");
    const states = this.manifest.states.map((s) => `["${s.name}", "${s.dtype}", [${s.shape.map((d) => `"${d}"`).join(", ")}]]`);
    return sha256(new TextEncoder().encode(`[{${hashes}}, [${states.join(", ")}]]`));
  }

  /** What was read, as a file that `still-export run --load-state` takes too. */
  async save(place: string, unread: number[] = []): Promise<Uint8Array<ArrayBuffer>> {
    const shapes = Object.fromEntries(this.shapes(this.length).map((s) => [s.name, s.dims]));
    const said = { length: this.length, package: await this.digest(), place, unread };
    const head: Record<string, unknown> = { __metadata__: { format: FORMAT, still_export: JSON.stringify(said) } };
    let end = 0;
    const parts: Float32Array[] = [];
    for (const name of Object.keys(shapes).sort()) {
      const cut = new Float32Array(size(shapes[name]!));
      copyRows(this.states[name]!.floats, this.states[name]!.dims, cut, shapes[name]!);
      parts.push(cut);
      head[name] = { dtype: "F32", shape: shapes[name], data_offsets: [end, (end += 4 * cut.length)] };
    }
    let text = JSON.stringify(head);
    text += " ".repeat(-new TextEncoder().encode(text).length & 7);
    const bytes = new TextEncoder().encode(text);
    const file = new Uint8Array(8 + bytes.length + end);
    new DataView(file.buffer).setBigUint64(0, BigInt(bytes.length), true);
    file.set(bytes, 8);
    parts.reduce((at, part) => (file.set(new Uint8Array(part.buffer), at), at + part.byteLength), 8 + bytes.length);
    return file;
  }

  /** Go on from what `save` wrote; where its text stops, and its tokens that were not read. Nothing changes where it throws. */
  async load(file: Uint8Array<ArrayBuffer>): Promise<{ place: string; unread: number[] }> {
    const wrong = new RunError("this file is no saved state: a page's button or still-export run --save-state makes one.");
    let head: Record<string, { data_offsets: [number, number] }>, said: { length: number; package: string; place: string; unread: number[] };
    let begin: number;
    try {
      begin = 8 + Number(new DataView(file.buffer, file.byteOffset).getBigUint64(0, true));
      const { __metadata__, ...rest } = JSON.parse(new TextDecoder().decode(file.subarray(8, begin)));
      if (__metadata__.format !== FORMAT) throw wrong;
      [head, said] = [rest, JSON.parse(__metadata__.still_export)];
    } catch {
      throw wrong;
    }
    if (said.package !== (await this.digest())) throw new RunError("this state is of another package, or another export of the model: read the text again.");
    const parts = this.shapes(said.length).map(({ name, dims }) => {
      const [from, to] = head[name]?.data_offsets ?? [0, -1];
      if (to - from !== 4 * size(dims) || begin + to > file.length) throw wrong;
      return { name, floats: new Float32Array(file.slice(begin + from, begin + to).buffer) };
    });
    this.resize(said.length, false);
    for (const { name, floats } of parts) this.states[name]!.floats.set(floats);
    this.length = said.length;
    return { place: said.place, unread: said.unread };
  }
}

/** Copy what two arrays whose shapes differ in one dimension share, from their beginning. */
function copyRows(read: Float32Array, from: readonly number[], write: Float32Array, to: readonly number[]): void {
  const axis = Math.max(0, from.findIndex((d, i) => d !== to[i]));
  const inner = size(from.slice(axis + 1));
  const [old, now] = [inner * from[axis]!, inner * to[axis]!];
  for (let i = 0; i < size(from.slice(0, axis)); i++) write.set(read.subarray(i * old, i * old + Math.min(old, now)), i * now);
}

/** A chat that goes on; each message is read behind what the model has read already. */
export class Chat {
  unread: number[] = [];
  place: "text" | "user" | "answer" = "text";

  constructor(readonly model: Model) {}

  encode(text: string, special = false): number[] {
    if (!this.model.tokenizer) throw new RunError("this package has no tokenizer, so it cannot answer text.");
    return this.model.tokenizer.encode(text, { add_special_tokens: special }).ids;
  }

  private get format(): Record<string, string> {
    return this.model.manifest.chat ?? { start: "", user_to_assistant: "", assistant_to_user: "" };
  }

  /** Read a document as the beginning of the first message. False: stopped; what was read stays. */
  async read(text: string, progress?: Progress, stopped?: Stopped): Promise<boolean> {
    this.model.start();
    const ids = this.encode(this.format["start"] + text, !this.model.manifest.chat);
    this.place = "user";
    this.unread = [];
    return (await this.model.prefill(ids, progress, stopped)) !== undefined;
  }

  /** The answer to a message, in pieces of text as they become certain. */
  async *ask(message: string, count: number, sampling: Sampling, progress?: Progress, stopped?: Stopped): AsyncGenerator<string> {
    const before = { text: this.format["start"]!, user: "", answer: this.format["assistant_to_user"]! }[this.place];
    const plain = this.place === "text" && !this.model.manifest.chat;
    const prompt = [...this.unread, ...this.encode(before + message + this.format["user_to_assistant"], plain)];
    this.model.reserve(prompt.length + count);
    const begun = this.model.length;
    let [seen, shown, given, halted]: [number[], number, number, boolean] = [[], 0, 0, false];
    const halt = async () => (halted ||= (await stopped?.()) ?? false);
    const decode = (ids: number[]) => (ids.length ? this.model.tokenizer!.decode(ids, { skip_special_tokens: true }) : "");
    const rest = () => decode(seen).slice(decode(seen.slice(0, shown)).length);
    this.place = "answer";
    for await (const token of this.model.generate(prompt, count, sampling, progress, halt)) {
      seen.push(token);
      given++;
      const piece = rest();
      if (piece && !piece.endsWith("\ufffd")) {
        [seen, shown] = [seen.slice(shown), seen.length - shown];
        yield piece;
      }
    }
    // The last token was not read, unless the model's own end came behind it; stopped early, a part of the prompt was not.
    this.unread = !given ? prompt.slice(this.model.length - begun) : halted || given === count ? seen.slice(-1) : [];
    if (rest()) yield rest();
  }

  save = () => this.model.save(this.place, this.unread);

  async load(file: Uint8Array<ArrayBuffer>): Promise<void> {
    const { place, unread } = await this.model.load(file);
    [this.place, this.unread] = [place as Chat["place"], unread];
  }
}
