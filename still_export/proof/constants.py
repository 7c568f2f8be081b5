"""The numbers by which a proof judges, with their reasons. Tolerances of near ties are in `still_kernels.ties`."""

from __future__ import annotations

PROOF_VERSION = 19
"""Version of the judge: cases, reference and bounds. It grows with every change that could change a verdict."""
TIMES = 48.0
"""Allowed error of a row, in multiples of PyTorch's own in the same type. Two correct orders of summation differ by up to 12 times a row's
usual error; a wrong graph in float32 differs by thousands."""
DISTURBED, FEW_TIMES = 2, 8.0
"""Own runs with disturbed inputs, for cases of which nothing is more than FEW_TIMES beyond its bound."""
ROUNDINGS = 64
"""Roundings of float32, of half a unit each, by which a number may differ even if PyTorch errs less: a chunk has as many terms."""
USELESS = 1.0
"""PyTorch's own run says nothing about rounding if the largest error of its median token reaches this many standard deviations of that
token's logits."""
OP_TIMES, OP_UNITS = 2.0, 1.0
"""Allowed error of a kernel: this multiple of its function body's error, and units of the type beside it."""
DISTURBANCES, OP_MOVED = 8, 8.0
"""Runs of a function body with disturbed inputs, for a kernel beyond its bound, and how many times as far as they move a row it may be off:
several roundings in a row, and the largest of thousands of rows beside a mean of squares."""
NEAR_CODE, STORED_DRAWS, STORED_TIMES = 2.0**-17, 4, 2.0
"""Distance from halfway between two numbers of a cache's type, in parts of a row's largest number, within which a runtime in float32 may
store either: rounding moves a number of a few layers by a millionth. STORED_DRAWS own runs of cases beyond their bounds store each such
number both ways, half of them at a time. A row may be off STORED_TIMES as far as any of a call's output is in one of them: which numbers a
row reads that another run stores otherwise, and how many, is chance."""
FEW_OUTPUTS = 4
"""Such runs are made if one of so many outputs is beyond its bound, or fewer."""
FLOAT32 = 5e-2
"""Allowed error of a log-probability in float32, nats: ten times the largest rounding error that was seen. A token
may be twice as far behind the likeliest."""
