/** The page's other thread: it holds the model, so that the page answers while it reads. */

import { Model, RunError, Sampling, prove, sentence, type Files } from "./index.js";

type Asked = { id: number; verb: string; [field: string]: any };

let model: Model | undefined;
let files: Files; // of the package
let stopped = false;
const { port1, port2 } = new MessageChannel();
/** Whether the page has said stop: its messages come between two tasks, so this waits for one. */
const asked = () => new Promise<boolean>((done) => {
  port1.onmessage = () => done(stopped);
  port2.postMessage(0);
});
const opened = () => {
  if (!model) throw new RunError("no package is open: choose or drop one first.");
  return model;
};

const verbs: Record<string, (asked: Asked, say: (said: object, moved?: Transferable[]) => void) => Promise<object | void>> = {
  async open({ base, folder, threads }, say) {
    files = base ? (name) => fetched(new URL(name, base).href) : async (name) => bytesOf(folder.get(name));
    model = await Model.open(files, { threads, progress: (done, total) => say({ done, total }), runtime: location.href });
    const calls = await files("calls.npz").catch(() => undefined);
    const generation = await files("generation_config.json").then((bytes) => JSON.parse(new TextDecoder().decode(bytes))).catch(() => undefined);
    return { manifest: model.manifest, memory: model.memory(), proof: Boolean(calls), generation };
  },
  async ask({ message, tokens, temperature, topK, topP, seed }, say) {
    const model = opened();
    const sampling = new Sampling(temperature, topK, topP, seed);
    const begun = performance.now();
    let first = 0, count = 0;
    for await (const text of model.ask(message, tokens, sampling, (done, total) => say({ done, total }), asked)) {
      first ||= performance.now();
      say({ text, memory: model.memory(), length: model.length, rate: count++ ? (1000 * (count - 1)) / (performance.now() - first) : 0, first: first - begun });
    }
    return { memory: model.memory(), length: model.length, cut: model.cut };
  },
  async read({ text }, say) {
    const whole = await opened().read(text, (done, total) => say({ done, total, memory: opened().memory(), length: opened().length }), asked);
    return { whole, memory: opened().memory(), length: opened().length };
  },
  async clear() {
    opened().start();
    return { memory: opened().memory(), length: 0 };
  },
  save: async () => ({ file: await opened().save() }),
  async load({ file }) {
    await opened().load(file);
    return { memory: opened().memory(), length: opened().length };
  },
  async prove({ file }, say) {
    const bytes = file ?? (await files("calls.npz").catch(() => undefined));
    if (!bytes) throw new RunError("this package has no calls.npz: choose one that still-export verify PACKAGE --record calls.npz made.");
    for await (const verdict of prove(opened(), bytes)) say({ verdict });
  },
};

const bytesOf = async (file: File | undefined) => file && new Uint8Array(await file.arrayBuffer());

/** A file of the network once, then of this browser's cache. */
async function fetched(url: string): Promise<Uint8Array<ArrayBuffer> | undefined> {
  const cache = await caches?.open("packages").catch(() => undefined);
  let found = await cache?.match(url);
  if (!found) {
    found = await fetch(url);
    if (!found.ok) return undefined;
    await cache?.put(url, found.clone()).catch(() => undefined); // a full disk: it is fetched again next time
  }
  return new Uint8Array(await found.arrayBuffer());
}

self.onmessage = async ({ data }: MessageEvent<Asked>) => {
  if (data.verb === "stop") {
    stopped = true;
    return;
  }
  stopped = false;
  const say = (said: object) => self.postMessage({ id: data.id, ...said });
  try {
    say({ ...(await verbs[data.verb]!(data, say)), ended: true });
  } catch (error) {
    say({ error: sentence(error), ended: true });
  }
};
