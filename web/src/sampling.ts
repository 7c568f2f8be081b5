/** How the next token is chosen: the same draws as still_export/runtime/sampling.py, NumPy's generator included. */

const M32 = 0xffffffffn, M64 = (1n << 64n) - 1n, M128 = (1n << 128n) - 1n;
const MULTIPLIER = 0x2360ed051fc65da44385df649fccf645n;

/** NumPy's default_rng(seed).random(): PCG64 seeded by SeedSequence. */
export function random(seed: number): () => number {
  const mixer = (constant: bigint, factor: bigint) => (value: bigint) => {
    const first = value ^ constant;
    constant = (constant * factor) & M32;
    const mixed = (first * constant) & M32;
    return mixed ^ (mixed >> 16n);
  };
  const entropy: bigint[] = [];
  for (let rest = BigInt(seed); rest || !entropy.length; rest >>= 32n) entropy.push(rest & M32);
  const hash = mixer(0x43b0d7e5n, 0x931e8875n);
  const mix = (x: bigint, y: bigint) => {
    const found = (x * 0xca01f9ddn - y * 0x4973f715n) & M32;
    return found ^ (found >> 16n);
  };
  const pool = [0, 1, 2, 3].map((i) => hash(entropy[i] ?? 0n));
  for (let from = 0; from < 4; from++) for (let to = 0; to < 4; to++) if (from !== to) pool[to] = mix(pool[to]!, hash(pool[from]!));
  const out = mixer(0x8b51f9ddn, 0x58f38dedn);
  const words = [...Array(8).keys()].map((i) => out(pool[i % 4]!));
  const long = (i: number) => words[2 * i]! | (words[2 * i + 1]! << 32n);
  const increment = ((((long(2) << 64n) | long(3)) << 1n) | 1n) & M128;
  let state = 0n;
  const step = () => (state = (state * MULTIPLIER + increment) & M128);
  step();
  state += (long(0) << 64n) | long(1);
  step();
  return () => {
    step();
    const word = ((state >> 64n) ^ state) & M64, turn = state >> 122n;
    const drawn = ((word >> turn) | (word << ((64n - turn) & 63n))) & M64;
    return Number(drawn >> 11n) * 2 ** -53;
  };
}

/** The first of the likeliest tokens. */
export function likeliest(logits: Float32Array): number {
  let best = 0;
  for (let i = 1; i < logits.length; i++) if (logits[i]! > logits[best]!) best = i;
  return best;
}

/** Temperature 0 is greedy; topK 0 and topP 1 keep all tokens. */
export class Sampling {
  private draw: () => number;

  constructor(readonly temperature = 0, readonly topK = 0, readonly topP = 1, seed = 0) {
    this.draw = random(seed);
  }

  /** Next token by logits [V]. */
  choose(logits: Float32Array): number {
    const most = logits[likeliest(logits)]!;
    const weight = Float64Array.from(logits, (x) => Math.exp((x - most) / this.temperature));
    let tokens = [...weight.keys()];
    if (this.topK || this.topP < 1) {
      tokens.sort((a, b) => weight[b]! - weight[a]! || a - b);
      if (this.topK) tokens = tokens.slice(0, this.topK);
      const whole = tokens.reduce((sum, t) => sum + weight[t]!, 0);
      let before = 0;
      tokens = tokens.filter((t) => {
        const kept = before < this.topP * whole;
        before += weight[t]!;
        return kept;
      });
    }
    const mass = new Float64Array(tokens.length);
    tokens.reduce((sum, t, i) => (mass[i] = sum + weight[t]!), 0);
    const drawn = this.draw();
    const place = mass.findIndex((m) => m / mass[mass.length - 1]! > drawn);
    return tokens[place < 0 ? tokens.length - 1 : place]!;
  }
}
