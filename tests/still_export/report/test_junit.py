"""verify's verdict for CI: what services that read JUnit XML see, and the workflow that makes it."""

import copy
import shlex
from pathlib import Path
from xml.etree import ElementTree

import typer
import yaml

from still_export.cli import main as cli
from still_export.report.junit import junit
from tests.docs.pages import ROOT
from tests.still_export.report.test_report import PROOF

WORKFLOW = ROOT / ".github" / "workflows" / "verify.yml"


def test_every_output_is_a_test() -> None:
    root = ElementTree.fromstring(junit(PROOF, "package"))
    suites = {suite.get("name"): suite for suite in root}
    cases = dict.fromkeys(", ".join(filter(None, [each.get("run"), each["case"]])) for each in PROOF["outputs"])
    assert list(suites) == [*cases, "whole package", "not seen"] and len(cases) > 1
    assert [test.get("name") for test in suites["whole package"]] == ["selections", "state is restored"]
    count = len(PROOF["outputs"]) + 2 + len(PROOF["not_asked"])
    assert root.get("tests") == str(count) == str(len(root.findall(".//testcase")))
    assert root.get("failures") == "0" and not root.findall(".//failure")


def test_what_failed_says_where() -> None:
    content = copy.deepcopy(PROOF)
    content["outputs"][-1] |= {"passed": False, "worst": 0.5, "worst_place": (0, 2, 7), "worst_call": 3}
    content["selections"] |= {"wrong": 1, "near_ties": 9}
    content["checks"][0] |= {"passed": False, "what": "row 3 <differs>"}
    root = ElementTree.fromstring(junit(content, "package"))
    failed = {
        t.get("name"): t.find("failure").get("message") for t in root.iter("testcase") if t.find("failure") is not None
    }  # type: ignore[union-attr]
    assert failed == {
        "present_kv_state.1": "error 5.0e-01 at [0, 2, 7] in call 3, allowed 1.0e-04",
        "selections": "1 differ without a near tie",
        "state is restored": "row 3 <differs>",
    }
    assert root.get("failures") == "3" == str(sum(int(suite.get("failures", "0")) for suite in root))


def test_a_decoder_of_others_has_checks_and_what_is_not_seen() -> None:
    check = {"name": "two rows", "passed": False, "what": "logits off by 1"}
    content = {"checks": [check, {"name": "a prompt of 7", "passed": True, "what": ""}], "unseen": ["padding: none"]}
    root = ElementTree.fromstring(junit(content, "decoder"))
    assert [each.get("message") for each in root.iter("failure")] == ["logits off by 1"] and root.get("failures") == "1"
    assert [each.get("message") for each in root.iter("skipped")] == ["padding: none"]
    assert root.get("tests") == "3" == str(len(root.findall(".//testcase"))) and root.get("skipped") == "1"


def test_the_workflow_calls_verbs_and_flags_that_exist() -> None:
    content = yaml.safe_load(WORKFLOW.read_text(encoding="utf-8"))
    called = content[True]["workflow_call"]["inputs"]  # "on" is a boolean in YAML 1.1
    (job,) = content["jobs"].values()
    verbs = {
        verb: typer.main.get_command(cli.app(verb)).commands[verb]  # type: ignore[attr-defined]
        for verb in ("export", "verify")
    }
    typed = [line for step in job["steps"] for line in step.get("run", "").replace("\\\n", " ").splitlines()]
    lines = [line for line in typed if line.strip().startswith("still-export ")]
    assert [shlex.split(line)[1] for line in lines] == ["export", "verify", "verify"]
    for line in lines:
        _, verb, *words = shlex.split(line)
        known = {name for parameter in verbs[verb].params for name in (*parameter.opts, *parameter.secondary_opts)}
        assert {word for word in words if word.startswith("-")} <= known
    written = {Path(word) for word in shlex.split(lines[1]) if word.startswith("proof/")}
    (upload,) = [step["with"]["path"] for step in job["steps"] if "upload-artifact" in step.get("uses", "")]
    assert written < {Path(line) for line in upload.split()}
    used = {word.split(".")[1] for word in WORKFLOW.read_text().replace("}", " ").split() if word.startswith("inputs.")}
    assert used == set(called), "every input is used, and declared"


def test_inputs_are_never_pasted_into_a_shell() -> None:
    content = yaml.safe_load(WORKFLOW.read_text(encoding="utf-8"))
    steps = [step for job in content["jobs"].values() for step in job["steps"]]
    assert not [step for step in steps if "${{" in step.get("run", "")]
