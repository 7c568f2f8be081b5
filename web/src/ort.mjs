/** onnxruntime-web's module, kept where src/heap.ts finds it. */
import make from "./ort-wasm-simd-threaded.mjs";

export default async (settings) => (globalThis.stillWasm = await make(settings));
