/** States kept in the runtime's own memory: onnxruntime-web's interface copies each through JavaScript, twice a call, and does not show
 * the calls of its wasm that bind one buffer as past and present. `ort.mjs` beside it keeps the module that it loads, and this calls those
 * of onnxruntime-web 1.30, whose version package.json pins. */

import type { InferenceSession } from "onnxruntime-web/wasm";

type Wasm = Record<`_${string}` | `stack${string}`, (...numbers: number[]) => number> & {
  HEAPU8: Uint8Array<ArrayBuffer>;
  stringToUTF8(text: string, at: number, bytes: number): void;
  UTF8ToString(at: number): string;
};
const loaded = () => (globalThis as unknown as { stillWasm: Wasm }).stillWasm;

const TYPES = { float32: { number: 1, bytes: 4 }, int64: { number: 7, bytes: 8 } };
const CPU = 1;

export const size = (dims: readonly number[]) => dims.reduce((a, b) => a * b, 1);

/** A tensor of zeros in the runtime's memory. */
export class HeapTensor {
  readonly bytes: number;
  readonly handle: number;
  private readonly at: number;

  constructor(type: keyof typeof TYPES, readonly dims: readonly number[]) {
    const wasm = loaded();
    this.bytes = size(dims) * TYPES[type].bytes;
    this.at = wasm._malloc!(this.bytes + 4 * dims.length); // the dimensions behind the numbers
    if (!this.at) throw new RangeError("out of memory");
    const shape = this.at + this.bytes;
    wasm.HEAPU8.fill(0, this.at, shape);
    new Int32Array(wasm.HEAPU8.buffer, shape, dims.length).set(dims);
    this.handle = wasm._OrtCreateTensor!(TYPES[type].number, this.at, this.bytes, shape, dims.length, CPU);
  }

  /** Of whole numbers. */
  static of(values: number[], dims = [values.length]): HeapTensor {
    const tensor = new HeapTensor("int64", dims);
    new BigInt64Array(loaded().HEAPU8.buffer, tensor.at, values.length).set(values.map(BigInt));
    return tensor;
  }

  /** The numbers, until the memory grows: not to be kept over a call. */
  get floats(): Float32Array<ArrayBuffer> {
    return new Float32Array(loaded().HEAPU8.buffer, this.at, this.bytes / 4);
  }

  free(): void {
    loaded()._OrtReleaseTensor!(this.handle);
    loaded()._free!(this.at);
  }
}

/** One call of a session; inputs are read and outputs written where they lie.
 *  @throws Error What the runtime says. */
export function run(session: InferenceSession, inputs: Record<string, HeapTensor>, outputs: Record<string, HeapTensor>): void {
  const wasm = loaded(), stack = wasm.stackSave!();
  const text = (name: string) => {
    const at = wasm.stackAlloc!(3 * name.length + 1);
    wasm.stringToUTF8(name, at, 3 * name.length + 1);
    return at;
  };
  const list = (pointers: number[]) => {
    const at = wasm.stackAlloc!(4 * pointers.length);
    new Uint32Array(wasm.HEAPU8.buffer, at, pointers.length).set(pointers);
    return at;
  };
  const names = (tensors: object) => list(Object.keys(tensors).map(text));
  const handles = (tensors: Record<string, HeapTensor>) => list(Object.values(tensors).map((tensor) => tensor.handle));
  const [given, wanted] = [Object.keys(inputs).length, Object.keys(outputs).length];
  const { sessionId } = (session as unknown as { handler: { sessionId: number } }).handler;
  try {
    if (!wasm._OrtRun!(sessionId, names(inputs), handles(inputs), given, names(outputs), wanted, handles(outputs), 0)) return;
    const said = list([0, 0]);
    wasm._OrtGetLastError!(said, said + 4);
    throw new Error(wasm.UTF8ToString(new Uint32Array(wasm.HEAPU8.buffer, said + 4, 1)[0]!));
  } finally {
    wasm.stackRestore!(stack);
  }
}
