/** PyTorch's answers, as `still-export verify PACKAGE --record calls.npz` wrote them, beside this browser's. */

import * as ort from "onnxruntime-web/wasm";

import { type Model, RunError } from "./runner.js";

/** Of float32, as still_export/proof/tolerance.py has them: absolute ones by output, and a relative one. */
const ABSOLUTE = { logits: 5e-2, state: 2e-2 }, RELATIVE = 1e-3;

/** A case, its largest errors beside PyTorch, and whether every number keeps its bound. `tries`: prompts that near ties called for. */
export interface Verdict { name: string; passed: boolean; logits: number; state: number; calls: number; tries: number }

type Call = Record<string, string>;
interface Entry { name: string; feeds: Call[]; expected: Call[] }

/** Arrays of an .npz file, read when they are asked for. */
class Archive {
  private places = new Map<string, { method: number; from: number; size: number }>();

  constructor(private readonly bytes: Uint8Array<ArrayBuffer>) {
    const view = new DataView(bytes.buffer, bytes.byteOffset, bytes.byteLength);
    const long = (at: number) => Number(view.getBigUint64(at, true));
    let end = bytes.length - 22;
    while (end >= 0 && view.getUint32(end, true) !== 0x06054b50) end--;
    if (end < 0) throw new RunError("this file holds no recorded calls: make it with still-export verify PACKAGE --record calls.npz.");
    let at = view.getUint32(end + 16, true);
    for (let left = view.getUint16(end + 10, true); left; left--) {
      let [size, from] = [view.getUint32(at + 20, true), view.getUint32(at + 42, true)];
      const [name, extra, comment] = [28, 30, 32].map((o) => view.getUint16(at + o, true)) as [number, number, number];
      let more = at + 46 + name;
      if (size === 0xffffffff) size = long(more + 4 + (view.getUint32(at + 24, true) === 0xffffffff ? 8 : 0));
      more = from + 26;
      from += 30 + view.getUint16(more, true) + view.getUint16(more + 2, true);
      const key = new TextDecoder().decode(bytes.subarray(at + 46, at + 46 + name)).replace(/\.npy$/, "");
      this.places.set(key, { method: view.getUint16(at + 10, true), from, size });
      at += 46 + name + extra + comment;
    }
  }

  async tensor(key: string): Promise<ort.Tensor> {
    const place = this.places.get(key);
    if (!place) throw new RunError("the recorded calls are damaged: copy the file again.");
    let bytes = this.bytes.slice(place.from, place.from + place.size);
    if (place.method) {
      const plain = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate-raw"));
      bytes = new Uint8Array(await new Response(plain).arrayBuffer());
    }
    const length = new DataView(bytes.buffer).getUint16(8, true);
    const head = new TextDecoder().decode(bytes.subarray(10, 10 + length));
    const kind = /'descr': '.([a-z]\d)'/.exec(head)![1]!;
    const dims = /\(([^)]*)\)/.exec(head)![1]!.split(",").filter((d) => d.trim()).map(Number);
    const data = bytes.slice(10 + length).buffer;
    if (kind === "f4") return new ort.Tensor("float32", new Float32Array(data), dims);
    if (kind === "i8") return new ort.Tensor("int64", new BigInt64Array(data), dims);
    return new ort.Tensor("uint8", new Uint8Array(data), dims);
  }
}

/** Compare every recorded call; one verdict a case. */
export async function* prove(model: Model, file: Uint8Array<ArrayBuffer>): AsyncGenerator<Verdict> {
  const archive = new Archive(file);
  const head = JSON.parse(new TextDecoder().decode((await archive.tensor("head")).data as Uint8Array)) as { format: number; cases: Entry[][] };
  for (const tries of head.cases) {
    let verdict: Verdict | undefined;
    for (const [number, entry] of tries.entries()) {
      verdict = { name: entry.name, passed: true, logits: 0, state: 0, calls: entry.feeds.length, tries: number + 1 };
      for (const [i, feed] of entry.feeds.entries()) await compare(model, archive, feed, entry.expected[i]!, verdict);
      if (verdict.passed) break;
    }
    if (verdict) yield verdict;
  }
}

async function compare(model: Model, archive: Archive, feed: Call, expected: Call, verdict: Verdict): Promise<void> {
  const given: Record<string, ort.Tensor> = {};
  for (const [name, key] of Object.entries(feed)) if (model.session.inputNames.includes(name)) given[name] = await archive.tensor(key);
  const counts = given["new_tokens"]!.data as BigInt64Array;
  const found = await model.infer(given);
  for (const [name, key] of Object.entries(expected)) {
    const wanted = await archive.tensor(key), actual = found[name];
    if (wanted.type !== "float32" || !actual) continue;
    const kind = name === "logits" ? "logits" : "state";
    const [a, b] = [wanted.data as Float32Array, actual.data as Float32Array];
    const row = a.length / counts.length;
    let worst = 0;
    if (a.length !== b.length) verdict.passed = false;
    for (let i = 0; i < a.length; i++) {
      // A sequence that brings no token has logits that nobody defines.
      if (a[i] === b[i] || (kind === "logits" && !counts[Math.floor(i / row)])) continue;
      const error = Math.abs(a[i]! - b[i]!);
      worst = Math.max(worst, error);
      if (!(error <= ABSOLUTE[kind] || error <= RELATIVE * Math.abs(a[i]!))) verdict.passed = false;
    }
    verdict[kind] = Math.max(verdict[kind], worst);
  }
}
