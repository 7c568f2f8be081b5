"""The picture of README: a step's time, a prompt's and peak memory by context, of the first table of docs/notebook/onnxruntime.md.

python -m tools.picture
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE, PICTURE = ROOT / "docs/notebook/onnxruntime.md", ROOT / "docs/notebook/results/beside-peers.svg"
MODEL = "SmolLM2-135M, 2 softmax layers"
FIGURES = ("reading the context, s", "a further token, ms", "peak memory, MB")
RUNTIMES = ("still-export", "llama.cpp", "onnxruntime-genai")


def rows(text: str) -> list[dict[str, str | float]]:
    """Figures of MODEL in a page's table: runtime, context, figure, value."""
    found: list[dict[str, str | float]] = []
    for line in text.splitlines():
        if not line.startswith(f"| {MODEL} |"):
            continue
        context, *cells = (cell.strip().replace(",", "") for cell in line.strip("|").split("|")[1:])
        keys = [(figure, runtime) for figure in FIGURES for runtime in RUNTIMES]
        found += [
            {"figure": figure, "runtime": runtime, "context": float(context), "value": float(cell)}
            for (figure, runtime), cell in zip(keys, cells, strict=True)
            if cell
        ]
    return found


def draw(figures: list[dict[str, str | float]]) -> str:
    """The figures as lines side by side, an SVG that needs no script."""
    import altair
    import vl_convert

    base = altair.Chart(altair.Data(values=figures)).mark_line(point=True)
    lines = base.encode(
        x=altair.X("context:Q", title="context, tokens", axis=altair.Axis(tickCount=4)),
        y=altair.Y("value:Q", title=None, axis=altair.Axis(tickCount=4)),
        color=altair.Color("runtime:N", sort=RUNTIMES, legend=altair.Legend(title=None, orient="bottom")),
    ).properties(width=230, height=170)
    column = altair.Column("figure:N", sort=list(FIGURES), title=None)
    chart = lines.encode(column=column).resolve_scale(y="independent").properties(title=f"{MODEL}, int4, two threads")
    return vl_convert.vegalite_to_svg(chart.properties(background="white").to_json())


def main() -> int:
    """Write the picture."""
    PICTURE.write_text(draw(rows(PAGE.read_text(encoding="utf-8"))), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
