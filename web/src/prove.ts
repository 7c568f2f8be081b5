/** PyTorch's answers, as `still-export verify PACKAGE --record calls.npz` wrote them, beside this browser's. */

import { unzipSync } from "fflate";
import * as ort from "onnxruntime-web/wasm";

import { type Model, RunError } from "./runner.js";

/** Of float32, as still_export/proof/constants.py has them: absolute ones by output, and a relative one. */
const ABSOLUTE = { logits: 5e-2, state: 2e-2 }, RELATIVE = 1e-3;

/** A case, its largest errors beside PyTorch, and whether every number keeps its bound. */
export interface Verdict { name: string; passed: boolean; logits: number; state: number; calls: number }

type Call = Record<string, string>;
interface Entry { name: string; feeds: Call[]; expected: Call[] }

/** An array of an .npz file, unpacked when it is asked for. */
function tensorOf(file: Uint8Array, key: string): ort.Tensor {
  try {
    const bytes = unzipSync(file, { filter: ({ name }) => name === `${key}.npy` })[`${key}.npy`]!.slice();
    const length = new DataView(bytes.buffer).getUint16(8, true);
    const head = new TextDecoder().decode(bytes.subarray(10, 10 + length));
    const kind = /'descr': '.([a-z]\d)'/.exec(head)![1]!;
    const dims = /\(([^)]*)\)/.exec(head)![1]!.split(",").filter((d) => d.trim()).map(Number);
    const data = bytes.slice(10 + length).buffer;
    if (kind === "f4") return new ort.Tensor("float32", new Float32Array(data), dims);
    if (kind === "i8") return new ort.Tensor("int64", new BigInt64Array(data), dims);
    return new ort.Tensor("uint8", new Uint8Array(data), dims);
  } catch (error) {
    if (/alloc/.test(String(error))) throw error;
    throw new RunError("this file holds no recorded calls, or is damaged: make it with still-export verify PACKAGE --record calls.npz.");
  }
}

/** Compare every recorded call; one verdict a case. */
export async function* prove(model: Model, file: Uint8Array<ArrayBuffer>): AsyncGenerator<Verdict> {
  const head = JSON.parse(new TextDecoder().decode(tensorOf(file, "head").data as Uint8Array)) as { format: number; cases: Entry[] };
  for (const entry of head.cases) {
    const verdict: Verdict = { name: entry.name, passed: true, logits: 0, state: 0, calls: entry.feeds.length };
    for (const [i, feed] of entry.feeds.entries()) await compare(model, file, feed, entry.expected[i]!, verdict);
    yield verdict;
  }
}

async function compare(model: Model, file: Uint8Array, feed: Call, expected: Call, verdict: Verdict): Promise<void> {
  const given: Record<string, ort.Tensor> = {};
  for (const [name, key] of Object.entries(feed)) if (model.session.inputNames.includes(name)) given[name] = tensorOf(file, key);
  const counts = given["new_tokens"]!.data as BigInt64Array;
  const found = await model.session.run(given);
  for (const [name, key] of Object.entries(expected)) {
    const wanted = tensorOf(file, key), actual = found[name];
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
