"""The launches of still::SelectBlocks: still_kernels.plan says what the parts mean. Integers and texts only: no torch, no Triton."""

from __future__ import annotations

from still_graphs.ops.select_blocks import SELECT_BLOCKS
from still_kernels.plan import Branch, Check, Launch, Let, Loop, Plan, Region

FEW = "T <= 8"
"""So few tokens that the sums, not the GEMMs, are what a call waits for."""
SCORED = "top_blocks > init_blocks + local_blocks + 1"


def _steps(few: str, first: str, count: str) -> tuple[Launch, ...]:
    """Scores and choices of `count` tokens from `first` on."""
    own = {"first": first, "chunk": "span"}
    tiles = f"HK * ceil_div({count}, {'few' if few else 'many'}_tokens)"
    grid = (f"parts if {SCORED} else 0", tiles, "B")
    return (
        Launch("multiply", grid) if few else Launch("normalize", grid, first=first),
        Launch(f"score{few}", (f"splits if {SCORED} else 0", tiles, "B"), **own),
        Launch(f"choose{few}", (count, "HK", "B"), **own),
    )


PLAN = Plan(
    SELECT_BLOCKS,
    key={
        "dtype": "dtype",
        "head_dim": "D",
        "group": "pow2(H // HK)",
        **{a.name: a.name for a in SELECT_BLOCKS.attributes},
        "count_dtype": "count_dtype",
    },
    constants=(
        "few_tokens",  # of one program of a step
        "many_tokens",  # of a prompt
        "few_programs",  # that fill the chip
        "few_parts",  # of a normalizer
        "many_parts",
        "mean_parts",  # numbers of which one mean is the sum
        "mean_rows",  # sums of a program
        "few_rows",  # queries of a program
        "many_rows",
        "span_tokens",  # of a prompt that workspace is for
    ),
    checks=(
        Check("HK > 0 and H % max(HK, 1) == 0", "query has H={H} heads, which is no multiple of HK={HK} of key."),
        Check("N * D < 2147483648", "the state has N={N} rows of D={D}; offsets in one head of it have 32 bits."),
    ),
    define={
        "span": f"T if {FEW} else min(T, span_tokens)",
        "tiles": f"ceil_div(span, few_tokens if {FEW} else many_tokens)",
        "fill": "ceil_div(few_programs, B * HK * tiles)",
        # Programs that share the means of one tile of tokens.
        "splits": "max(1, min(ceil_div(N, 64), fill))",
        "parts": f"min(splits, few_parts if {FEW} else many_parts)",
        # Kept means, fine and coarse, and room behind them: up to 128 are read at a time, whatever there is.
        "NM": "ceil_div(N, 128) * 128",
        "NC": "ceil_div(N * mean_stride, 128 * lse_stride) * 128",
        "NB": "ceil_div(ceil_div(N * mean_stride, block_size), 4) * 4",
    },
    workspace=(
        Region("part_ml", "float32", ("B", "HK * tiles", "parts", f"few_rows if {FEW} else many_rows", 2), SCORED),
        Region("product", "float32", ("B", "HK * tiles", "few_rows", "N"), f"{SCORED} and {FEW}"),
        Region("mean", "T", ("B", "HK", "mean_parts", "NM", "D"), f"{SCORED} and not ({FEW})"),
        Region("coarse", "T", ("B", "HK", "mean_parts", "NC", "D"), f"{SCORED} and not ({FEW})"),
        Region("best", "float32", ("B", "span", "HK", "NB"), SCORED),
        Region("tail", "float32", ("B", "span", "HK", "NB"), SCORED),
    ),
    arguments={
        **{name: name for name in ("T", "H", "HK", "N", "NM", "NC", "NB")},
        "S": "block_slots",
        "NS": "parts",
        "scale": "rsqrt(D)",
    },
    steps=(
        Launch("add", ("(T + 2 * mean_stride - 2) // mean_stride", "HK", "B")),
        Branch(
            FEW,
            _steps("_few", "0", "T"),
            (
                Launch("mean", (f"ceil_div(N, mean_rows) if {SCORED} else 0", "HK", "B")),
                Loop(
                    "first",
                    "0",
                    "T",
                    "span",
                    (Let("count", "min(span, T - first)"), *_steps("", "first", "count")),
                ),
            ),
        ),
    ),
)
