"""verify's report as JUnit XML, which CI services show test by test."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from xml.etree import ElementTree

Found = dict[str, str]
"""By name of a test, what failed; empty: it passed."""


def junit(content: Mapping[str, Any], package: str) -> str:
    """A suite for every case with a test for every output, and one for what holds of the whole.

    Args:
        content: Of verify's report.json.
        package: Its name, for the suites.
    """
    cases: dict[str, Found] = {}
    for each in content["outputs"]:
        place = f"{'median' if each['by_median'] else 'error'} {each['worst']:.1e} at {list(each['worst_place'])}"
        failure = "" if each["passed"] else f"{place} in call {each['worst_call']}, allowed {each['bound']:.1e}"
        cases.setdefault(each["case"], {})[each["output"]] = failure
    chosen = content["selections"]
    wrong = f"{chosen['wrong']} differ without a near tie" if chosen["wrong"] else ""
    many = (
        f"{chosen['near_ties']} differ by a near tie, expected {chosen['expected']:.1f}" if chosen["too_many"] else ""
    )
    checks = {each["name"]: "" if each["passed"] else each["detail"] or "no" for each in content["checks"]}
    cases["whole package"] = {"selections": wrong, "near ties": many, **checks}
    root = ElementTree.Element("testsuites", {"name": f"still-export verify {package}", **_counts(*cases.values())})
    for name, found in cases.items():
        suite = ElementTree.SubElement(root, "testsuite", {"name": name, **_counts(found)})
        for test, failure in found.items():
            entry = ElementTree.SubElement(suite, "testcase", classname=f"{package}.{name}", name=test)
            if failure:
                ElementTree.SubElement(entry, "failure", message=failure)
    ElementTree.indent(root)
    return ElementTree.tostring(root, encoding="unicode", xml_declaration=True) + "\n"


def _counts(*suites: Found) -> dict[str, str]:
    tests = [failure for found in suites for failure in found.values()]
    return {"tests": str(len(tests)), "failures": str(sum(map(bool, tests))), "errors": "0"}
