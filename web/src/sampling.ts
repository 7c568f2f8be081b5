/** How the next token is chosen: the same draws as still_export/runtime/sampling.py, NumPy's generator included. */

const u = BigInt.asUintN;
const MULTIPLIER = 0x2360ed051fc65da44385df649fccf645n;

/** NumPy's default_rng(seed).random(): PCG64 seeded by SeedSequence. */
function random(seed: number): () => number {
  const folded = (word: bigint) => u(32, word) ^ (u(32, word) >> 16n);
  const hashed = (constant: bigint, factor: bigint) => (word: bigint) => {
    const first = word ^ constant;
    constant = u(32, constant * factor);
    return folded(first * constant);
  };
  const hash = hashed(0x43b0d7e5n, 0x931e8875n), out = hashed(0x8b51f9ddn, 0x58f38dedn);
  const pool = [0n, 32n, 64n, 96n].map((at) => hash(u(32, BigInt(seed) >> at)));
  for (let from = 0; from < 4; from++) {
    for (let to = 0; to < 4; to++) if (from !== to) pool[to] = folded(pool[to]! * 0xca01f9ddn - hash(pool[from]!) * 0x4973f715n);
  }
  const words = [...pool, ...pool].map((word) => out(word));
  const wide = (at: number) => [1, 0, 3, 2].reduce((sum, i) => (sum << 32n) | words[at + i]!, 0n);
  const increment = u(128, (wide(4) << 1n) | 1n);
  const next = (state: bigint) => u(128, state * MULTIPLIER + increment);
  let state = next(increment + wide(0));
  return () => {
    state = next(state);
    const word = u(64, (state >> 64n) ^ state), turn = state >> 122n;
    return Number(u(64, (word >> turn) | (word << (64n - turn))) >> 11n) * 2 ** -53;
  };
}

/** Temperature 0 is greedy; topK 0 and topP 1 keep all tokens. */
export class Sampling {
  constructor(readonly temperature = 0, readonly topK = 0, readonly topP = 1, seed = 0, private readonly draw = random(seed)) {}

  /** Next token by logits [V]. */
  choose(logits: Float32Array): number {
    const best = logits.reduce((most, x, i) => (x > logits[most]! ? i : most), 0);
    if (this.temperature === 0) return best;
    const weight = Float64Array.from(logits, (x) => Math.exp((x - logits[best]!) / this.temperature));
    let tokens = [...weight.keys()];
    if (this.topK || this.topP < 1) tokens = tokens.sort((a, b) => weight[b]! - weight[a]! || a - b).slice(0, this.topK || undefined);
    let sum = 0;
    const mass = tokens.map((token) => (sum += weight[token]!)); // up to each token, with it
    const last = this.topP < 1 ? mass.findIndex((m) => m >= this.topP * sum) : mass.length - 1;
    const drawn = this.draw();
    return tokens[mass.findIndex((m, i) => i === last || m / mass[last]! > drawn)]!;
  }
}
