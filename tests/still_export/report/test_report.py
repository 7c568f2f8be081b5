"""Reports: what is on the pages, that nothing else is needed to see them, and how they look in a real browser."""

import copy
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from still_export import doctor
from still_export.cli.main import main
from still_export.errors import ConfigError
from still_export.report import bench, evaluate, inspect, linearize, verify
from still_export.report.description import Bars, Lines, Plots, Report, Table
from still_export.report.render import check_report, number, render, write_report
from tests.still_export.verbs import call

needs_libraries = pytest.mark.skipif(
    not all(doctor.version(name) for name in ("altair", "vl-convert-python")), reason="needs still-export[report]"
)

MACHINE = {"system": "a machine <with> 2 processors"}
COMMAND = "still-export verify 'a <package>'"


def output(case: str, name: str, error: float = 1e-6, passed: bool = True) -> dict[str, Any]:
    return {
        "case": case,
        "output": name,
        "max_abs": error,
        "mean_abs": error / 10,
        "own_mean_abs": 0.0,
        "bound": 1e-4,
        "worst": error,
        "worst_call": 1,
        "worst_place": (0, 1),
        "passed": passed,
        "run": "graph in float32",
    }


PROOF: dict[str, Any] = {
    "passed": True,
    "top1_agreement": 1.0,
    "pytorch_top1_agreement": 1.0,
    "selections": {"compared": 640, "near_ties": 2, "wrong": 0, "expected": 1.5},
    "checks": [{"name": "state is restored", "passed": True, "what": ""}],
    "first_diverging_layer": None,
    "not_asked": ["more than 5 sequences in one call"],
    "asked": ["graph in float32: seed 1"],
    "nearest": {**output("prefill 1", "logits"), "share": 0.1},
    "outputs": [
        output(case, name)
        for case in ("prefill 1", "prefill 65")
        for name in (
            "logits",
            *(f"present_{state}.{layer}" for state in ("window_key", "kv_state") for layer in (0, 1)),
        )
    ],
}


def proof() -> Report:
    return verify.page(PROOF, "ONNX Runtime", "package", MACHINE, COMMAND)


def failed_proof() -> Report:
    content = copy.deepcopy(PROOF)
    content |= {"passed": False, "verdict": "FAILED: its weights", "first_diverging_layer": 1}
    content["checks"][0] |= {"passed": False, "what": "row 3 differs"}
    content["selections"]["wrong"] = 3
    broken = [
        entry
        for entry in content["outputs"]
        if entry["case"] == "prefill 65" and entry["output"] == "present_kv_state.1"
    ]
    broken[0] |= {"passed": False, "worst": 0.5, "max_abs": 0.5}
    return verify.page(content, "ONNX Runtime", "package", MACHINE, COMMAND)


def measurement(busy: bool = False) -> Report:
    row = {"prefill_s": 0.5, "decode_ms": 12.5, "peak_mb": 300.0, "batch": 1, "state_mb": 1.0}
    rows = [{**row, "length": length} for length in (1024, 4096)]
    content = {
        "package": "package",
        "threads": 2,
        "batch": 1,
        "runtime": "ort",
        "provider": "cpu",
        "busy": busy,
        "load": "other programs used up to 0.1 of 2 processors meanwhile",
        "rows": rows,
        "beside": rows[:1],
        "state": [{"tokens": n, "state_bytes": n << 8, "full_attention_cache_bytes": n << 12} for n in (1024, 4096)],
    }
    return bench.page(content, "left out: 8000 tokens", MACHINE, COMMAND)


def test_figures_of_a_busy_machine_are_no_headline() -> None:
    quiet, (table,) = measurement(), [part for part in measurement().parts if isinstance(part, Table)]
    assert "12.5 ms" in quiet.verdict and "0.1 of 2" in quiet.findings[0] and table.columns.count("±") == 2
    busy = measurement(busy=True)
    assert not re.search(r"\d", busy.verdict.partition(" (")[0])


def test_bars_show_the_change_not_the_level() -> None:
    """Levels of 1.000 and 1.012 bits per byte are bars of the same height."""
    bits = {"still": {"text": 1.012}, "teacher": {"text": 1.0}, "no_linear_part": {"text": 1.5}}
    (bars,) = Bars.of_changes("Bits per byte", "text", bits)
    assert bars.groups == {"text": {"still": pytest.approx(1.2), "no linear part": pytest.approx(50)}}
    assert "against teacher" in bars.title and bars.y.endswith("%")
    assert Bars.of_changes("Bits per byte", "text", {"still": {"text": 1.0}}) == []
    assert "1.1000 bits per byte (+10.0%), needle 44% (100% of it); teacher: 1.0000" in evaluation().verdict
    assert "after LoRA 1.1000 (+10.0%)" in linearization().verdict
    costs = {name: {"size, MB": 1.0, "decode 64, ms": 2.0, "used by other programs, %": 11.0} for name in "abc"}
    plots = [each.title for each in evaluate._trades(costs, {name: {"bits/byte": 1.0} for name in costs})]
    assert plots == ["bits/byte over size, MB"]


def evaluation() -> Report:
    variants = ("teacher", "still", "no_salient_tokens")
    content: dict[str, Any] = {
        "bits_per_byte": {variant: {"book.txt @ 1024": 1.0 + i / 10} for i, variant in enumerate(variants)},
        "perplexity": {
            variant: {"book.txt": {"0-1024": 9.5 + i, "1024-2048": 9.0 + i}} for i, variant in enumerate(variants)
        },
        "retrieval": {variant: {"needle": {1024: [1.0, 0.5], 2048: [0.25, 0.0]}} for variant in variants},
        "prompts": 8,
        "costs": {"int4": {"size, MB": 122.0, "decode 2048, ms": 11.2}},
    }
    return evaluate.page(content, "MODEL", 2, MACHINE, COMMAND)


def linearization() -> Report:
    losses = [1.0 / step for step in range(1, 1001)]
    stage = {
        "steps": 1000,
        "tokens": 8_192_000,
        "seconds": 60.0,
        "losses": losses,
        "validation": [[500, 0.1], [1000, 0.05]],
    }
    plan = {
        "budget": "loss 2%, time 15",
        "base": {"found": 8, "asked": 9},
        "reached": {"found": 0, "asked": 0},
        "loss": 0.01,
        "state": 0.4,
        "minutes": 21.0,
        "softmax_layers": [3, 7],
        "promises": {"loss": "met", "state": "met", "found": "NOT MEASURED", "time": "NOT met"},
    }
    content = {
        "plan": plan,
        "recipe": {"base": "BASE", "texts": ["corpus.txt"], "start": None},
        "bits_per_byte": {"teacher": 1.0, "after attention transfer": 1.2, "after LoRA": 1.1},
        "stages": [
            {"name": "transfer", **stage, "parts": [0.1, 0.2, 0.05], "stopped_early": False},
            {"name": "finetune", **stage, "parts": [0.1], "stopped_early": True},
        ],
    }
    return linearize.page(content, "STILL", MACHINE, COMMAND)


def test_the_page_of_a_training_says_what_was_promised() -> None:
    (table,) = [part for part in linearization().parts if part.title.startswith("Budget: loss 2%")]
    assert [row[3] for row in table.rows] == ["met", "met", "NOT MEASURED", "NOT met"]
    assert [row[1] for row in table.rows] == ["2%", "any", "any", "15 minutes"]
    assert table.failed == {2, 3} and table.rows[3][2] == "21.0 minutes"
    assert linearization().findings[1] == "Layers that stay softmax: 3, 7."


def test_the_page_says_what_was_trained() -> None:
    stage = {"steps": 20, "tokens": 40_960}
    attention, lora = {"name": "transfer", **stage}, {"name": "finetune", **stage}
    assert "No linear part" not in linearize.trained({"mixer": "still"}, [attention, lora])
    quick = linearize.trained({"mixer": "still", "finetune_maps": False}, [lora])
    assert "LoRA" in quick and "20 steps over 40,960 tokens" in quick and "No linear part was trained" in quick
    assert "No linear part" not in linearize.trained({"mixer": "still", "finetune_maps": True}, [lora])
    assert "No linear part" not in linearize.trained({"mixer": "gla"}, [lora])
    assert linearize.trained({"mixer": "still"}, [{**lora, "steps": 0}]).startswith(
        "Nothing was trained. No linear part"
    )


def inspection() -> Report:
    found: dict[str, Any] = {
        "target": "onnx",
        "model": {"family": "llama", "layers": 3, "parameters": 1e6, "dtype": "float32", "linearized": False},
        "capacity": {"capacity_tokens": 4096, "bounded": True, "overflow": "error"},
        "state": [{"tokens": n, "state_bytes": n << 8, "full_attention_cache_bytes": n << 12} for n in (1024, 4096)],
        "layers": [
            {
                "kind": "hybrid_attention",
                "layers": [0, 1, 3],
                "states": ["window_key"],
                "growing": [],
                "bytes_at_capacity": 1 << 20,
            }
        ],
        "precision": {"weights": "float32"},
        "nodes": {"still::HybridAttention": 3},
        "files": {"model.onnx": 1 << 20},
        "command": "still-export MODEL --to onnx -o package",
    }
    first = {
        "what": "Model: llama",
        "size": "1.0 MB of files",
        "length": "4,096 tokens, then refuses more",
        "speed": "not measured",
    }
    return inspect.page(found, first, "package", [doctor.Finding("ONNX Runtime, CPU", True, "1.31")], MACHINE)


PAGES: list[Callable[[], Report]] = [proof, failed_proof, measurement, evaluation, linearization, inspection]


def text_of(page: str) -> str:
    """What a reader sees of a page without its scripts and styles."""
    return re.sub(r"(?s)<(script|style).*?</\1>|<[^>]+>", " ", page)


@needs_libraries
@pytest.mark.slow
@pytest.mark.parametrize("make", PAGES, ids=lambda make: make.__name__)
def test_a_page_needs_nothing_else(make: Callable[[], Report]) -> None:
    report = make()
    page = render(report)
    assert len(page) < 1.5e6
    tags = re.findall(r"<(?:script|link|img|iframe)[^>]*>", re.sub(r"(?s)<script[^>]*>.*?</script>", "<script>", page))
    assert not any("src=" in tag or "href=" in tag for tag in tags)
    assert "a machine &lt;with&gt; 2 processors" in page and "<package>" not in text_of(page)
    text = text_of(page)
    assert report.verdict.split("'")[0] in text.replace("&#39;", "'")
    for part in report.parts:
        assert part.title in text
        for plot in part.plots if isinstance(part, Plots) else []:
            assert plot.x and plot.y and plot.title in text
    charts = json.loads(found[1] if (found := re.search(r"const charts = (\[.*\]);", page)) else "[]")
    assert len(charts) == sum(len(part.plots) for part in report.parts if isinstance(part, Plots))
    for chart in charts:
        encoding = (chart.get("layer") or [chart])[0]["encoding"]
        assert encoding["x"]["title"] and encoding["y"]["title"]


def test_what_failed_comes_first() -> None:
    report = failed_proof()
    assert report.passed is False and report.verdict.startswith("FAILED")
    assert [f.split(":")[0] for f in report.findings] == [
        "state is restored",
        "First diverging layer",
        "graph in float32, prefill 65, present_kv_state.1",
        "3 selections differ without a near tie.",
        "Not asked",
        "Nearest to its bound",
    ]
    cases = report.parts[0]
    assert isinstance(cases, Table) and cases.failed == {1} and cases.rows[1][1:3] == ["prefill 65", "MISMATCH"]
    (drawn,) = [p for part in report.parts if isinstance(part, Plots) for p in part.plots if p.title == "kv state"]
    assert isinstance(drawn, Lines) and list(drawn.series.values()) == [
        [(0, pytest.approx(0.01)), (1, pytest.approx(5000))]
    ]
    assert proof().passed and proof().findings[0].startswith("Not asked")


def test_numbers_and_curves() -> None:
    cells = (None, "x", 1234567, 0.0, 0.00012, 12.34567, 123456.7, True)
    assert [number(cell) for cell in cells] == ["", "x", "1,234,567", "0", "1.2e-04", "12.35", "123,457", "True"]
    curve = linearize.thinned([float(n) for n in range(1000)])
    assert len(curve) <= linearize.POINTS and curve[0] == (3, 1.0) and curve[-1] == (1000, 999.0)
    assert linearize.thinned([2.0, 4.0]) == [(1, 2.0), (2, 4.0)]


def test_a_report_that_cannot_be_written_is_said_before_the_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("still_export.extras.find_spec", lambda name: object())
    check_report(tmp_path / "report.html")
    for wrong in (tmp_path / "report.pdf", tmp_path / "none" / "report.html", tmp_path):
        with pytest.raises(ConfigError, match="--report"):
            check_report(wrong)
    monkeypatch.setattr("still_export.extras.find_spec", lambda name: None if name == "altair" else object())
    with pytest.raises(ModuleNotFoundError, match="altair"):
        check_report(tmp_path / "report.html")


@pytest.mark.parametrize("verb", ["verify", "inspect"])
def test_no_verb_works_before_its_report_is_possible(
    verb: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("still_export.extras.find_spec", lambda name: None if name == "altair" else object())
    monkeypatch.setattr("still_export.cli.main._look_ahead", lambda given: None)
    assert call(verb, tmp_path, "--report", tmp_path / "report.html") == 2
    said = capsys.readouterr().err
    assert "altair" in said and "still-export[report]" in said


def test_what_full_attention_would_hold_is_drawn_where_it_matters() -> None:
    """At the lengths that the package holds, not at those that were measured alone; a package's page the same."""
    for report in (measurement(), inspection()):
        lines = [
            p
            for part in report.parts
            if isinstance(part, Plots)
            for p in part.plots
            if "full attention's cache" in p.series
        ]
        (drawn,) = (line for line in lines if isinstance(line, Lines))
        assert drawn.series["full attention's cache"][-1] == (4096, pytest.approx(16.777216)) and "MB" in drawn.y


def test_no_page_shows_raw_keys_or_two_units() -> None:
    for make in PAGES:
        for part in make().parts:
            if isinstance(part, Table):
                shown = [*part.columns, *(cell for row in part.rows for cell in row)]
                assert "MiB" not in str(shown)
                assert part.title == "Recipe" or not any("_" in str(c) and "present_" not in str(c) for c in shown), (
                    make,
                    shown,
                )


def test_two_points_are_no_plot() -> None:
    qualities = {name: {"bits/byte": 1.0} for name in ("a", "b", "c")}
    costs = {name: {"size, MB": 1.0} for name in qualities}
    assert len(list(evaluate._trades(costs, qualities))) == 1
    assert not list(evaluate._trades({name: costs[name] for name in "ab"}, qualities))


@needs_libraries
@pytest.mark.slow
def test_verbs_write_it(export_tiny: Any, tmp_path: Path) -> None:
    package, report = export_tiny().path, tmp_path / "report.html"
    for words, title in (
        (("inspect", package), "Runtimes on this machine"),
        (
            ("verify", package, "--lengths", "1,9", "--decode-steps", "2", "-o", tmp_path / "v"),
            "share of the bound",
        ),
        (("bench", package, "--lengths", "16", "--steps", "2", "-o", tmp_path / "b"), "One more token"),
    ):
        with pytest.raises(SystemExit, match=r"^0$"):
            main([*map(str, words), "--report", str(report), "-q"])
        assert title in report.read_text(encoding="utf-8")
        report.unlink()
    with pytest.raises(SystemExit, match=r"^2$"):
        main(["inspect", str(package), "--report", str(tmp_path / "report.txt")])


WIDTHS = {"phone": 390, "wide": 1280}
LEAST_CONTRAST = 4.5
"""WCAG's for text."""

MEASURE = """() => {
  const parse = text => text.match(/[\\d.]+/g).slice(0, 3).map(Number);
  const luminance = rgb => rgb.map(v => v / 255).map(v => v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4)
    .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
  const page = luminance(parse(getComputedStyle(document.body).backgroundColor));
  const contrast = colour => { const l = luminance(parse(colour)); return (Math.max(l, page) + 0.05) / (Math.min(l, page) + 0.05); };
  const axes = [...document.querySelectorAll('svg .role-axis-title text, svg .role-axis-label text')];
  const texts = [...document.querySelectorAll('h1, h2, h3, td, th, li, p, dd, dt')];
  return {
    width: document.documentElement.scrollWidth,
    page: page,
    charts: document.querySelectorAll('.chart svg').length,
    outside: [...document.querySelectorAll('.chart svg, h1, h2, p, li')]
      .filter(e => e.getBoundingClientRect().right > innerWidth + 1).length,
    titles: document.querySelectorAll('svg .role-axis-title text').length,
    contrast: Math.min(...texts.map(e => contrast(getComputedStyle(e).color)), ...axes.map(e => contrast(getComputedStyle(e).fill))),
  };
}"""


@needs_libraries
@pytest.mark.slow
@pytest.mark.parametrize(
    "width, scheme",
    [
        ("phone", "dark"),
        ("wide", "light"),
        *(pytest.param(*each, marks=pytest.mark.long) for each in (("phone", "light"), ("wide", "dark"))),
    ],
)
def test_in_a_browser(width: str, scheme: str, tmp_path: Path) -> None:
    """Every page: drawn without a complaint or a request, nothing wider than the screen, legible text and axes. No colour follows from a
    width."""
    playwright = pytest.importorskip("playwright.sync_api")
    browser_path = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if browser_path is None:
        pytest.skip("needs a Chromium: apt-get install chromium")
    with playwright.sync_playwright() as run:
        browser = run.chromium.launch(executable_path=browser_path, args=["--no-sandbox"])
        for make in PAGES:
            report = make()
            path = tmp_path / f"{make.__name__}.html"
            write_report(report, path)
            tab = browser.new_page(viewport={"width": WIDTHS[width], "height": 900}, color_scheme=scheme)
            said: list[str] = []
            asked: list[str] = []
            tab.on("console", lambda message, said=said: said.append(message.text))
            tab.on("pageerror", lambda error, said=said: said.append(str(error)))
            tab.on("request", lambda request, asked=asked: asked.append(request.url))
            charts = sum(len(part.plots) for part in report.parts if isinstance(part, Plots))
            tab.goto(path.as_uri())
            if charts:
                tab.wait_for_selector("body[data-drawn]", timeout=30_000)
            seen = tab.evaluate(MEASURE)
            tab.screenshot(path=tmp_path / f"{make.__name__}-{width}-{scheme}.png", full_page=True)
            tab.close()
            where = f"{make.__name__}, {width}, {scheme}"
            assert not said and asked == [path.as_uri()], where
            assert seen["width"] == WIDTHS[width] and not seen["outside"], where
            assert seen["charts"] == charts and seen["titles"] >= 2 * charts, where
            assert (seen["page"] > 0.5) == (scheme == "light"), where
            assert seen["contrast"] >= LEAST_CONTRAST, where
        browser.close()
