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
"""Least and most tokens of a case that is asked a second time for its layers."""
LAYER_CASES = 2
"""Number of such cases: the longest prompt, and prompts in pieces."""
LAYER_DRAWS = 3
"""Further runs of PyTorch for these, in which linear layers round up or down by chance, a product before its bias is added, too. A row
whose own run happens not to err says little about what another may; rows of a head err together, by its decays and step sizes, and heads
are few: of 50 clean seeds of Falcon-H1 10 were refused with one run, at up to 1.13 of a bound."""

# --- multiples of the error of PyTorch's own run ---
ROW = {"float32": 48.0, "float16": 12.0}
"""Times PyTorch's own rounding error that any row may err, by the package's type. The error is that row's, or the root mean square over all
rows of the output."""
TAIL, TAIL_MEDIAN = 8.0, 4.0
"""Bounds of rows of a state in half precision, in PyTorch's largest row error (any row) and in its largest median (a part's median)."""
MEDIAN = 8.0
"""Times PyTorch's median row error (of the part, or `_above` of the output) that the median of a part's rows may be."""
LOGITS_MEDIAN = 2.0
"""MEDIAN for logits of a float16 package on a CPU, which sums in float32 as PyTorch does. Clean packages reach 1.3."""
CHANCE = 1e-3
"""That the median of n rows lies above what `_above` says of n when each row is a draw of PyTorch's own; multiples of that are allowed."""
SHARP_ROW, SHARP_MEDIAN = 6.0, 2.5
"""The same where layers read the runtime's own input. Of a state of fixed size also times what all of PyTorch's rows err in parts of their
size: numbers of a row share a step size, decays and a key, each rounded, so a large row may draw far more than PyTorch's own run of it did
(Falcon-H1: rows err up to 9 units of float16 there and up to 8 in ONNX Runtime, other rows than in PyTorch)."""
SHARP_MEAN = 1.5
"""Times the mean error of PyTorch's own run that the mean error of an output may be. It averages hundreds of numbers."""
SHARP_FEW = 2.0
"""More times that, in parts of the number of its draws: one token's logits err as one hidden state does, and a clean package reaches 1.7.
Rows are draws; of a state of fixed size heads are, of which Falcon-H1's six reach 1.58."""
FEWEST = 8
"""Least rows of a part for its median to be judged."""
NORMED = 2
"""Roundings of what a layer's products read, behind the norm and its weight, each by at most LAYER_UNIT of itself. Of a token of huge
activations one number is most of that, and its rounding a factor of the whole row that a state keeps in float16. PyTorch's runs round it
alike each time, so they may hardly err there: of SmolLM2's layer 29, where such a token has 512 of a row's norm of 638, values were 0.8 of
LAYER_UNIT off along their row, 1.01 and 1.16 of their bounds, on two kinds of processors. Logits read a norm, too: of SmolLM2 one number
makes 0.7 to 1.1 of a row of size 3,500. PyTorch rounds it twice, 0.5 along the row, ONNX Runtime once, 0.01: it was at 1.6 of its bound."""
ROUNDINGS = 64
"""Units in the last place of float32, halved, by which a sum may differ: a chunk has as many terms. Half precision's unit is 8,192 of
these."""
EVEN = 3.0
"""Ratio of a row's largest error to its root mean square error, for normally distributed errors: 2.5 to 3 for 64 to 256 numbers."""
UNIT = 2.0**-9
"""Of itself that a sum of features (`StateSpec.features`) may err in float16 on a GPU, beside what PyTorch's own run says: bfloat16's. By
layer sums of features times values, too, and half of it in their mean: on an H200 `assets/small`'s err 3.0 to 4.2 times what PyTorch's own
run does there, which keeps features in float32, 0.4 to 0.9 of this in parts of their mean size."""
LAYER_UNIT = 2.0**-11
"""Of itself that a row of a state of fixed size may err in float16 on a CPU, where layers read the runtime's own input: float16's unit.
One token makes most of many a row, so PyTorch's own run draws once there what it errs, and may hardly err where another does
(`assets/small` by its bodies: 1.13 of the bound without this; clean rows err 4 such units, PyTorch's own up to 6)."""
RESIDUAL_SUMS = 2
"""Sums that a layer adds to what it read, each rounded by at most LAYER_UNIT of itself: by so much what the next layer reads may err. A
token of huge activations has one number that is all of its row, so PyTorch's four runs may each happen to hardly err there: SmolLM2's first
token, 23,281, came out 14.9 off, one step of float16 of 16, where they erred by 1.1 at most."""
