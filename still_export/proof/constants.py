"""Every number by which a proof judges, with its reason. Tolerances of near ties are in `still_kernels.ties`."""

from __future__ import annotations

PROOF_VERSION = 13
"""Version of the judge: cases, reference and bounds. It grows with every change that could change a verdict."""

# --- absolute ---
USELESS = 1.0
"""PyTorch's own run is useless as a measure of rounding if the largest error of its median token reaches this many standard deviations of
that token's logits. Own runs that round activations to 8 bits reach 0.2."""
ALIKE = 0.9
"""Least cosine, and least ratio of sizes, between what a layer outputs in PyTorch and in the graph, if the right tensors were found. A
fault that exceeds it also moves the logits."""

# --- which cases are judged by layer ---
SOME = (16, 330)
"""Least and most tokens of a case that is compared by layer."""
LAYER_CASES = 2
"""Number of such cases: the longest prompt, and prompts in pieces."""
LAYER_DRAWS = 3
"""Further PyTorch runs for these cases, with stochastic rounding in linear layers, also of products before the bias is added. One run's
error of a row may be small by chance, and rows of a head err together, by its decays and step sizes: with one run 10 of 50 clean seeds
of Falcon-H1 were refused, at up to 1.13 of a bound."""

# --- multiples of the error of PyTorch's own run ---
ROW = {"float32": 48.0, "float16": 12.0}
"""Allowed error of any row by the package's type, in multiples of PyTorch's own rounding error: the row's, or the root mean square over all
rows of the output."""
TAIL, TAIL_MEDIAN = 8.0, 4.0
"""Bounds of rows of a state in half precision: multiples of PyTorch's largest row error for any row, and of its largest median for the
median of a part."""
MEDIAN = 8.0
"""Allowed median of a part's rows, in multiples of PyTorch's median row error (of the part, or `_above` of the output)."""
LOGITS_MEDIAN = 2.0
"""MEDIAN for logits of a float16 package on a CPU, which sums in float32 as PyTorch does. Clean packages reach 1.3."""
CHANCE = 1e-3
"""Probability that the median of n rows exceeds the quantile `_above(n)` of PyTorch's row errors if rows err alike. Multiples of that
quantile are allowed."""
SHARP_ROW, SHARP_MEDIAN = 6.0, 2.5
"""ROW and MEDIAN if layers read the runtime's own input. For states of fixed size also multiples of the relative error of all PyTorch's
rows: numbers of a row share a step size, decays and a key, each rounded, so a large row may err far more than in PyTorch's own run
(Falcon-H1: rows err up to 9 units of float16 in PyTorch and up to 8 in ONNX Runtime, but different rows)."""
SHARP_MEAN = 1.5
"""Allowed mean error of an output, in multiples of that of PyTorch's own run. It averages hundreds of numbers."""
SHARP_FEW = 2.0
"""Added to SHARP_MEAN, divided by the number of independent draws: the logits of one token err together, and clean packages reach 1.7. A
draw is a row, or a head of a state of fixed size; Falcon-H1's six heads reach 1.58."""
FEWEST = 8
"""Least rows of a part for its median to be judged."""
NORMED = 2
"""Roundings of a linear layer's input after the norm and its weight, each by at most LAYER_UNIT of itself. In a token of huge activations
one number dominates the input, so its rounding scales a whole row of a state in float16. PyTorch's runs all round it alike and may hardly
err there. In layer 29 of SmolLM2, where one number has 512 of a row's norm of 638, values were 0.8 of LAYER_UNIT off along their row, 1.01
and 1.16 of their bounds on two kinds of processors. The same holds for logits: in SmolLM2 one number is 0.7 to 1.1 of a row of size 3,500;
PyTorch rounds it twice (0.5 along the row), ONNX Runtime once (0.01), which was 1.6 of the bound."""
ROUNDINGS = 64
"""Units in the last place of float32, halved, by which a sum may differ: a chunk has as many terms. Half precision's unit is 8,192 of
these."""
EVEN = 3.0
"""Ratio of a row's largest error to its root mean square error, for normally distributed errors: 2.5 to 3 for 64 to 256 numbers."""
UNIT = 2.0**-9
"""Allowed relative error of a sum of features (`StateSpec.features`) in float16 on a GPU, added to PyTorch's own: bfloat16's unit. By layer
it also applies to sums of features times values, and half of it to their mean. On an H200 those of `assets/small` err 3.0 to 4.2 times
PyTorch's own run, whose features are float32, which is 0.4 to 0.9 of this unit relative to their mean size."""
LAYER_UNIT = 2.0**-11
"""Allowed relative error of a row of a state of fixed size in float16 on a CPU, if layers read the runtime's own input: float16's unit. One
token often dominates a row, so PyTorch's own run may hardly err there by chance (`assets/small` by its bodies: 1.13 of the bound without
this; clean rows err 4 such units, PyTorch's own up to 6)."""
RESIDUAL_SUMS = 2
"""Sums that a layer adds to its input, each rounded by at most LAYER_UNIT of itself; the next layer's input may err by as much. In a token
of huge activations one number dominates the row, so all four PyTorch runs may hardly err there by chance: SmolLM2's first token, 23,281,
was 14.9 off, one step of float16 of 16, where they erred by at most 1.1."""
