/** States kept in the runtime's own memory: onnxruntime-web's interface copies each through JavaScript, twice a call.
 *
 * Its wasm has the calls to bind one buffer as past and present; its interface does not show them. So `ort.mjs` beside it keeps the
 * module that it loads, and this calls those of onnxruntime-web 1.30, whose version package.json pins. */

import type { InferenceSession } from "onnxruntime-web/wasm";

interface Wasm {
  HEAPU8: Uint8Array<ArrayBuffer>;
  _malloc(bytes: number): number;
  _free(at: number): void;
  stringToUTF8(text: string, at: number, bytes: number): void;
  UTF8ToString(at: number): string;
  setValue(at: number, value: number, type: string): void;
  getValue(at: number, type: string): number;
  _OrtCreateTensor(type: number, at: number, bytes: number, dims: number, rank: number, location: number): number;
  _OrtReleaseTensor(tensor: number): number;
  _OrtGetLastError(code: number, message: number): void;
  _OrtRun(session: number, names: number, values: number, count: number, outNames: number, outCount: number, outValues: number, options: number): number | Promise<number>;
}

const TYPES = { float32: 1, int64: 7 } as const;
const CPU = 1;

/** A tensor in the runtime's memory. */
export class HeapTensor {
  readonly size: number;
  readonly bytes: number;
  private readonly at: number;
  readonly handle: number;

  constructor(private readonly wasm: Wasm, type: keyof typeof TYPES, readonly dims: readonly number[]) {
    this.size = dims.reduce((a, b) => a * b, 1);
    this.bytes = this.size * (type === "int64" ? 8 : 4);
    this.at = wasm._malloc(Math.max(8, this.bytes));
    if (!this.at) throw new RangeError("out of memory");
    wasm.HEAPU8.fill(0, this.at, this.at + this.bytes);
    const shape = wasm._malloc(4 * dims.length + 4);
    dims.forEach((d, i) => wasm.setValue(shape + 4 * i, d, "i32"));
    this.handle = wasm._OrtCreateTensor(TYPES[type], this.at, this.bytes, shape, dims.length, CPU);
    wasm._free(shape);
  }

  /** The numbers, until the memory grows: not to be kept over a call. */
  get floats(): Float32Array<ArrayBuffer> {
    return new Float32Array(this.wasm.HEAPU8.buffer, this.at, this.size);
  }

  write(values: number[]): void {
    new BigInt64Array(this.wasm.HEAPU8.buffer, this.at, this.size).set(values.map(BigInt));
  }

  free(): void {
    this.wasm._OrtReleaseTensor(this.handle);
    this.wasm._free(this.at);
  }
}

/** The runtime's memory, and calls of one session on tensors in it. */
export class Heap {
  private readonly wasm: Wasm;
  private readonly session: number;
  private readonly names = new Map<string, number>();

  constructor(session: InferenceSession) {
    this.wasm = (globalThis as unknown as { stillWasm: Wasm }).stillWasm;
    this.session = (session as unknown as { handler: { sessionId: number } }).handler.sessionId;
  }

  tensor(type: keyof typeof TYPES, dims: readonly number[]): HeapTensor {
    return new HeapTensor(this.wasm, type, dims);
  }

  /** One call; inputs are read and outputs written where they lie.
   *  @throws Error What the runtime says. */
  async run(inputs: Record<string, HeapTensor>, outputs: Record<string, HeapTensor>): Promise<void> {
    const { wasm } = this;
    const [given, wanted] = [Object.entries(inputs), Object.entries(outputs)];
    const place = wasm._malloc(8 * (given.length + wanted.length) + 8);
    try {
      const put = (entries: [string, HeapTensor][], at: number) => entries.forEach(([name, tensor], i) => {
        wasm.setValue(at + 4 * i, this.name(name), "*");
        wasm.setValue(at + 4 * (entries.length + i), tensor.handle, "*");
      });
      const out = place + 8 * given.length;
      put(given, place);
      put(wanted, out);
      const [values, outValues] = [place + 4 * given.length, out + 4 * wanted.length];
      const code = await wasm._OrtRun(this.session, place, values, given.length, out, wanted.length, outValues, 0);
      if (!code) return;
      const said = out + 8 * wanted.length;
      wasm._OrtGetLastError(said, said + 4);
      throw new Error(wasm.UTF8ToString(wasm.getValue(said + 4, "*")));
    } finally {
      wasm._free(place);
    }
  }

  private name(text: string): number {
    if (!this.names.has(text)) {
      const bytes = new TextEncoder().encode(text).length + 1;
      this.names.set(text, this.wasm._malloc(bytes));
      this.wasm.stringToUTF8(text, this.names.get(text)!, bytes);
    }
    return this.names.get(text)!;
  }
}
