/** A package in Node: node run.mjs FOLDER '{"prompt": "...", "tokens": 20, "temperature": 0, "seed": 0}' -> JSON. For tests.
 *  '{"texts": [[1, 2, 3, 4]], "pieces": [1, 3]}': the likeliest token behind each token from the last piece's end on, one list a text. */
import { readFile } from "node:fs/promises";
import { join } from "node:path";
import { Model, Sampling, prove, sentence } from "./dist/index.js";

const [folder, asked] = [process.argv[2], JSON.parse(process.argv[3] ?? "{}")];
const files = async (name) => new Uint8Array(await readFile(join(folder, name)));
const said = {};
try {
  const model = await Model.open(files, { runtime: new URL("dist/page/", import.meta.url).href, threads: asked.threads ?? 1 });
  if (asked.texts) {
    said.likeliest = [];
    for (const ids of asked.texts) {
      model.start();
      for (const [i, end] of asked.pieces.entries()) await model.feed(ids.slice(asked.pieces[i - 1] ?? 0, end));
      const found = [];
      for (const token of ids.slice(asked.pieces.at(-1))) {
        const logits = await model.feed([token]);
        found.push(logits.reduce((best, x, i) => (x > logits[best] ? i : best), 0));
      }
      said.likeliest.push(found);
    }
    console.log(JSON.stringify(said));
    process.exit(0);
  }
  const sampling = () => new Sampling(asked.temperature ?? 0, asked.topK ?? 0, asked.topP ?? 1, asked.seed ?? 0);
  const all = async (pieces) => { const found = []; for await (const piece of pieces) found.push(piece); return found; };
  const ids = model.encode(asked.prompt ?? "Once upon a time", true);
  said.ids = ids;
  said.tokens = await all(model.generate(ids, asked.tokens ?? 16, sampling()));
  if (asked.snapshot) {
    model.start();
    await model.prefill(ids.slice(0, -1));
    const file = await model.save();
    await (await import("node:fs/promises")).writeFile(asked.snapshot, file);
    model.start();
    await model.load(file);
    said.again = await all(model.generate(ids.slice(-1), asked.tokens ?? 16, sampling()));
  }
  if (asked.chat) {
    model.start();
    said.answers = [];
    for (const message of asked.chat) said.answers.push((await all(model.ask(message, asked.tokens ?? 16, sampling()))).join(""));
    said.length = model.length;
  }
  if (asked.calls) said.verdicts = await all(prove(model, await files(asked.calls)));
} catch (error) {
  said.error = sentence(error);
}
console.log(JSON.stringify(said));
process.exit(0);
