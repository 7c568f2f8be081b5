"""Write the page of the ledger from the records in proofs/. usage: python -m tools.ledger [RECORD ...]

Records that are named, from `still-export prove` here or on another machine, are read, checked and kept in proofs/ first.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from still_export.proof.ledger import table
from still_export.proof.records import read_record, read_records, write_record

ROOT = Path(__file__).resolve().parents[1]
PROOFS, PAGE = ROOT / "proofs", ROOT / "docs/reference/ledger.md"
HEAD = """# Ledger

What was shown, by the machine that showed it: one record in `proofs/` a row, the newest of each. **Stale** names the rooms whose sources
changed since. `still-export prove PACKAGE` makes a record on any machine; `python -m tools.ledger RECORD` keeps it and writes this page.

"""


def page() -> str:
    """The page's text."""
    return HEAD + table(read_records(PROOFS))


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("records", nargs="*", type=Path)
    for path in parser.parse_args(arguments).records:
        write_record(read_record(path), PROOFS)
    PAGE.write_text(page(), encoding="utf-8")


if __name__ == "__main__":
    main()
