"""Everyday answers of a package beside those of PyTorch in float32.

  python -m tools.benchmarks.everyday DIR --reference BASE [--overlay ADAPTER ...]

Prints how many of the 329 questions are answered rightly, how many of PyTorch's right answers are kept, and how many replies have its text.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from transformers import AutoTokenizer

import still_export
from still_export.models.load import load_model
from still_export.texts.everyday import REPLY_TOKENS, compared, questions
from still_export.texts.replies import everyday_replies


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("package", type=Path)
    parser.add_argument("--reference", required=True, help="the model that the package was exported from")
    parser.add_argument("--overlay", action="append", default=[])
    options = parser.parse_args()
    asked = questions()
    package = still_export.load(str(options.package))
    found = [
        package.generate([{"role": "user", "content": each.ask}], max_tokens=REPLY_TOKENS, temperature=0).text
        for each in asked
    ]
    model = load_model(options.reference, overlays=options.overlay, dtype="float32").eval()
    base = everyday_replies(model, AutoTokenizer.from_pretrained(options.package), list(asked))
    result = compared(asked, [reply.strip() for reply in found], [reply.strip() for reply in base])
    print(f"{result.said()}; {result.right} right")


if __name__ == "__main__":
    main()
