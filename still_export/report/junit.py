"""verify's report as JUnit XML, which CI services show test by test."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from still_export.package.staging import write_whole

Found = dict[str, str]
"""What failed, by name of the test; "": it passed."""


def write_junit(content: Mapping[str, Any], package: str, path: Path) -> None:
    """Write `junit` to a file in an existing folder, atomically."""
    write_whole(path, junit(content, package))


def junit(content: Mapping[str, Any], package: str) -> str:
    """A suite per case with a test per output, and one suite for checks of the whole. What was not checked is skipped.

    Args:
        content: verify's report.json, of a package or of another exporter's decoder.
    """
    cases: dict[str, Found] = {}
    for each in content.get("outputs", ()):
        place = f"error {each['worst']:.1e} at {list(each['worst_place'])}"
        failure = "" if each["passed"] else f"{place} in call {each['worst_call']}, allowed {each['bound']:.1e}"
        case = ", ".join(filter(None, [each.get("run"), each["case"]]))
        cases.setdefault(case, {})[each["output"]] = failure
    checks = {each["name"]: "" if each["passed"] else each["what"] or "no" for each in content["checks"]}
    if chosen := content.get("selections"):
        wrong = f"{chosen['wrong']} differ without a near tie" if chosen["wrong"] else ""
        checks = {"selections": wrong, **checks}
    cases["whole package"] = checks
    unseen = [*content.get("unseen", ()), *content.get("not_asked", ())]
    counts = _counts(*cases.values(), unseen=len(unseen))
    root = ElementTree.Element("testsuites", {"name": f"still-export verify {package}", **counts})
    for name, found in cases.items():
        suite = ElementTree.SubElement(root, "testsuite", {"name": name, **_counts(found)})
        for test, failure in found.items():
            entry = ElementTree.SubElement(suite, "testcase", classname=f"{package}.{name}", name=test)
            if failure:
                ElementTree.SubElement(entry, "failure", message=failure)
    if unseen:
        suite = ElementTree.SubElement(root, "testsuite", {"name": "not seen", **_counts(unseen=len(unseen))})
        for line in unseen:
            entry = ElementTree.SubElement(
                suite, "testcase", classname=f"{package}.not seen", name=line.partition(":")[0]
            )
            ElementTree.SubElement(entry, "skipped", message=line)
    ElementTree.indent(root)
    return ElementTree.tostring(root, encoding="unicode", xml_declaration=True) + "\n"


def _counts(*suites: Found, unseen: int = 0) -> dict[str, str]:
    tests = [failure for found in suites for failure in found.values()]
    found = {"tests": len(tests) + unseen, "failures": sum(map(bool, tests)), "errors": 0, "skipped": unseen}
    return {name: str(count) for name, count in found.items()}
