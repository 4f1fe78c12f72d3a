"""In a notebook, results are one line or a small table, and names in them are never markup."""

from __future__ import annotations

from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from families import build, token_ids

import calipers
from calipers import OneshotResult
from calipers.calibration.coverage import Coverage
from calipers.evaluation import CheckpointScores, Estimate, Evaluation, LayerError, Scores
from calipers.evaluation.bootstrap import Bootstrap
from calipers.planning.plan import Plan
from calipers.planning.specs import ModuleSpec, tensor_specs
from calipers.recipes import Recipe, load_recipe
from calipers.reporting.html import html_table, svg_bars, svg_heat_map, svg_histogram
from calipers.steps import IMatrixGatherer, QuantizationModifier

EVIL = "<script>alert('&amp;')</script>"
SCHEME = QuantizationScheme(
    targets=["Linear"],
    weights=QuantizationArgs(num_bits=4, strategy="group", group_size=32),
    input_activations=QuantizationArgs(num_bits=8),
)
TENSORS = tensor_specs(SCHEME)
PLAN = Plan(
    tuple(ModuleSpec(name, SCHEME, TENSORS) for name in ("layer.0", EVIL)),
    measured={"layer.0": ()},
)
COVERAGE = Coverage("peers", {"layer.0": 4096, EVIL: 0}, {EVIL: "took the range of its peers"})
RECIPE = load_recipe(
    [IMatrixGatherer(), QuantizationModifier(scheme="W4A16", ignore=(EVIL,), unmatched="ignore")]
)


DRAWN = {
    *("x", "y", "width", "height", "fill", "fill-opacity", "text-anchor", "font-weight"),
    *("xmlns", "role", "font-family", "font-size", "transform"),
}


class Tables(HTMLParser):
    """Reads tables and plots, and fails where an element is not closed or is none of theirs."""

    ALLOWED = ("table", "caption", "thead", "tbody", "tr", "th", "td")
    PLOTS = ("svg", "g", "text", "rect", "title")

    def __init__(self, text: str) -> None:
        super().__init__()
        self._open: list[str] = []
        self.rows: list[list[str]] = []
        self.captions: list[str] = []
        self.plotted: list[str] = []
        self.rects = 0
        self.feed(text)
        self.close()
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._open.append(tag)
        if "svg" in self._open:
            assert tag in self.PLOTS, tag
            assert {name for name, _ in attrs} <= DRAWN
            self.rects += tag == "rect"
            return
        assert tag in self.ALLOWED, tag
        assert {name for name, _ in attrs} <= {"colspan"}
        if tag == "tr":
            self.rows.append([])
        if tag in ("th", "td"):
            self.rows[-1].append("")

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        if "svg" in self._open:
            self.plotted.append(data)
        elif self._open[-1] == "caption":
            self.captions.append(data)
        else:
            self.rows[-1][-1] += data


def shown(result: Any) -> Tables:
    """What a notebook would show."""
    return Tables(result._repr_html_())


def test_a_plan() -> None:
    assert repr(PLAN) == (
        "Plan(2 × weight int4 per group 32, 2 × input int8 per tensor, "
        "inputs of 1 module summed up)"
    )
    assert repr(Plan()) == "Plan(nothing)"
    found = shown(PLAN)
    assert found.captions == [repr(PLAN)]
    assert found.rows[0] == ["module", "tensor", "format", "strategy", "observer", "data"]
    assert found.rows[3] == [EVIL, "weight", "int4", "group 32", "memoryless_minmax", "no"]
    assert len(found.rows) == 5
    assert found.plotted == ["tensors", "weight int4, group 32", "2", "input int8, tensor", "2"]
    assert found.rects == 2


def test_coverage() -> None:
    assert repr(COVERAGE) == "Coverage(2 modules, 0 to 4,096 tokens, 1 unseen)"
    assert repr(Coverage()) == "Coverage(no module needed data)"
    assert repr(Coverage(tokens={"a": 5})) == "Coverage(1 module, 5 tokens)"
    assert shown(COVERAGE).rows == [
        ["module", "tokens", "what was done"],
        [EVIL, "0", "took the range of its peers"],
        ["layer.0", "4,096", ""],
    ]


def test_a_recipe() -> None:
    assert repr(RECIPE) == "Recipe(default: IMatrixGatherer, QuantizationModifier)"
    head, gatherer, quantizer = shown(RECIPE).rows
    assert head == ["stage", "modifier", "settings"]
    assert gatherer == ["default", "IMatrixGatherer", "{}"]
    assert quantizer[1] == "QuantizationModifier"
    assert EVIL in quantizer[2]
    assert "scheme: W4A16" in quantizer[2]


def test_an_evaluation() -> None:
    estimate = Estimate(0.25, 0.125, 0.375)
    layers = tuple(LayerError(f"layer {i}", 0.1, 0.2) for i in range(40))
    scores = CheckpointScores(10, Estimate(2.75, 2, 3), estimate, estimate, estimate, layers)
    assert "layer 7" not in repr(scores)
    found = Evaluation(
        Scores(20, Estimate(2.5, 2, 3)), {EVIL: scores}, 4, 4000, Bootstrap({"a": torch.ones(4)})
    )
    assert repr(found) == (
        "Evaluation(4 samples, 4,000 tokens predicted; perplexity 2.5000; "
        f"{EVIL} 2.7500 (+0.2500 [+0.1250, +0.3750]))"
    )
    assert shown(found).captions == [
        "4 samples, 4,000 tokens predicted; in brackets: 95 % intervals"
    ]
    assert shown(found).plotted[:3] == ["KL divergence", EVIL, "0.25000"]
    assert shown(found).plotted[-2:] == ["layer 39", "20.00"]
    assert shown(found).rows == [
        ["model", "perplexity", "change", "KL divergence", "top-1 agreement"],
        ["the float model", "2.5000", "", "", ""],
        [
            *(EVIL, "2.7500", "+0.2500 [+0.1250, +0.3750]", "0.25000 [0.12500, 0.37500]"),
            "25.00% [12.50%, 37.50%]",
        ],
    ]


def test_a_result(tmp_path: Path) -> None:
    result = OneshotResult(
        plan=PLAN,
        coverage=COVERAGE,
        errors={"b": 0.01, EVIL: 0.125},
        model=build(),
        recipe=RECIPE,
        output_dir=tmp_path,
    )
    assert repr(result) == (
        f"OneshotResult(model: LlamaForCausalLM, plan: {PLAN!r}, coverage: {COVERAGE!r}, "
        f"largest error of a weight: 12.50%, written to: {tmp_path})"
    )
    rows = shown(result).rows
    assert ["model", "LlamaForCausalLM"] in rows
    assert ["written to", str(tmp_path)] in rows
    assert rows[-3:] == [
        ["module", "dB", "error", "through"],
        [EVIL, "-18.1", "12.50%", "weight"],
        ["b", "-40.0", "1.00%", "weight"],
    ]
    assert shown(result).plotted == ["error in dB", "b", EVIL, "–", "-40.0", "-18.1"]


@pytest.mark.filterwarnings("ignore::calipers.errors.CalipersWarning")
def test_what_oneshot_returns() -> None:
    result = calipers.oneshot(build(), "FP8", token_ids(), progress=False)
    told = repr(result)
    assert "\n" not in told
    assert len(told) < 300
    assert told.startswith("OneshotResult(model: LlamaForCausalLM, plan: Plan(14 × weight float8 ")
    rows = shown(result).rows
    assert rows[-1] == ["… and 4 more"]
    worst = max(result.costs, key=lambda name: result.costs[name].output_error)
    assert (rows[5][0], rows[5][2]) == (worst, f"{result.costs[worst].output_error:.2%}")
    assert shown(result).rects == 14
    assert isinstance(result.recipe, Recipe)


@pytest.mark.filterwarnings("ignore::calipers.errors.CalipersWarning")
def test_measurements() -> None:
    found = calipers.measure(build(), token_ids(), progress=False)
    drawn, summary = shown(found), found.summary()
    assert drawn.captions[0] == repr(found)
    extreme = max(summary["tensors"], key=lambda row: row["peak"])
    assert drawn.plotted[0] == "max|x| ÷ rms"
    assert f"{extreme['peak']:.0f}" in drawn.plotted
    head = next(n for n, row in enumerate(drawn.rows) if row[0] == "tensor")
    assert drawn.rows[head][-1] == "magnitudes"
    assert drawn.rows[head + 1][0] == extreme["tensor"]
    first = extreme["histogram"]
    assert f"2^{first['exponent']} to 2^{first['exponent'] + 1}: {first['counts'][0]:,}" in (
        drawn.plotted
    )


def test_plots_take_no_names_for_markup() -> None:
    numbers = [[1.0, None], [400.0, 5.0]]
    drawn = Tables(svg_heat_map([EVIL, "1"], [EVIL, "b"], numbers, EVIL, ends=(4.0, 400.0)))
    assert drawn.plotted == [EVIL, EVIL, "b", EVIL, "1.0", "1", "400.0", "5.0"]
    assert drawn.rects == 3
    assert Tables(svg_bars({EVIL: 2.0, "none": 0.0}, EVIL)).plotted == [
        EVIL,
        EVIL,
        "2",
        "none",
        "0",
    ]
    assert (svg_bars({}), svg_histogram(None)) == ("", "")


def test_long_tables_are_cut() -> None:
    rows = [{"number": number} for number in range(100)]
    found = Tables(html_table(rows, "<b>")).rows
    assert found[0] == ["number"]
    assert found[-2:] == [["59"], ["… and 40 more"]]
    assert Tables(html_table(rows[:60])).rows[-1] == ["59"]
    assert Tables(html_table([])).rows == []
