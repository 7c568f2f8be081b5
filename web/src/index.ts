export { Model, RunError, sentence, type Files, type Manifest, type Options, type Progress } from "./runner.js";
export { Chat, type Message, type Templates } from "./chat.js";
export { prove, type Verdict } from "./prove.js";
export { Sampling } from "./sampling.js";
