"""``calipers demo``: six checkpoints that transformers has loaded, and one table."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from shell import Terminal, run_here

from calipers.checkpoint.headers import size_on_disk
from calipers.demo import run as demo
from calipers.demo.text import library_pieces
from calipers.evaluation import Difference


@pytest.fixture(autouse=True)
def _little_data(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "CALIBRATION_SAMPLES", 32)
    monkeypatch.setattr(demo, "EVALUATION_SAMPLES", 24)


def test_text_for_calibration_is_not_that_for_judging(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs: list[Any] = []
    monkeypatch.setattr(demo, "oneshot", lambda *args, **_: runs.append(args[2]))
    monkeypatch.setattr(demo, "evaluate", lambda *args, **_: runs.append(args[2]))
    demo.run_demo(tmp_path)
    *calibration, evaluation = runs
    assert calibration == [library_pieces("calibration")] * 6
    assert evaluation == library_pieces("evaluation")


@pytest.mark.slow
def test_six_ways_are_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "out"
    done = run_here("demo", "--output", str(folder))
    assert done.exit_code == 0
    lines = done.stdout.splitlines()
    first = next(index for index, line in enumerate(lines) if line.startswith(" bfloat16"))
    for row, variant in zip(lines[first + 1 :], demo.VARIANTS, strict=False):
        assert row.split()[:2] == [variant.scheme, variant.method]
        assert f" {variant.observers} " in row
        assert row.count("[") == 1
    assert f"The checkpoints are in {folder}. What to try next:" in lines
    folders = sorted(variant.folder for variant in demo.VARIANTS)
    assert sorted(path.name for path in folder.iterdir()) == folders
    best = f"  calipers evaluate demo {folder / demo.OPTIMAL.folder} --data demo"
    assert best in lines
    # What is there already is replaced, and told as data; two ways are enough to see it.
    two = (demo.CLASSIC, demo.OPTIMAL)
    monkeypatch.setattr(demo, "VARIANTS", two)
    again = json.loads(run_here("demo", "--output", str(folder), "--json").stdout)
    found = again["evaluation"]
    assert found["tokens"] == 24 * 255
    for variant in two:
        scores = found["checkpoints"][variant.folder]
        assert scores["size"] == size_on_disk(folder / variant.folder) < found["base"]["size"]
        assert 0 < scores["kl"]["value"] < 1
        assert scores["change"]["low"] <= scores["change"]["value"] <= scores["change"]["high"]
        assert again["seconds"][variant.folder] > 0
    assert again["gain"].keys() == {"value", "low", "high", "noise", "beyond_noise"}
    classic, optimal = (found["checkpoints"][way.folder]["perplexity"]["value"] for way in two)
    assert again["gain"]["value"] == pytest.approx(optimal - classic, rel=1e-6)


def test_ways_are_what_their_names_say() -> None:
    schemes = {variant.folder: variant.recipe.schemes["group_0"] for variant in demo.VARIANTS}
    static = schemes["w8a8-static"]
    assert (static.weights.num_bits, static.input_activations.num_bits) == (8, 8)
    assert static.input_activations.dynamic is False
    assert schemes["fp8"].weights.type == "float"
    best = schemes["w4a16-optimal"].weights
    assert (best.observer, best.observer_kwargs) == ("optimal", {"importance": "hessian"})
    assert demo.OPTIMAL.observers == "optimal,importance=hessian"
    gptq = next(variant for variant in demo.VARIANTS if variant.method == "gptq")
    assert (gptq.recipe, gptq.observers) == (demo.OPTIMAL.recipe, demo.OPTIMAL.observers)
    assert schemes["w4a16-imatrix_mse"].weights.observer == "imatrix_mse"
    assert schemes["nvfp4a16"].weights.strategy == "tensor_group"
    assert all(variant.recipe.ignore == ("lm_head",) for variant in demo.VARIANTS)


@pytest.mark.parametrize(
    ("gain", "word"),
    [
        (Difference(-0.2, -0.3, -0.1, noise=0.1), "beyond noise"),
        (Difference(-0.2, -0.5, 0.1, noise=0.1), "within noise"),
        (Difference(-0.2, -0.3, -0.1, noise=0.25), "within noise"),
    ],
)
def test_the_verdict_knows_noise(gain: Difference, word: str) -> None:
    from types import SimpleNamespace

    from calipers.cli.demo import _verdict

    told = _verdict(SimpleNamespace(gain=gain))  # type: ignore[arg-type]
    assert told.endswith(f"[{gain.low:+.4f}, {gain.high:+.4f}], {word}.")


def test_a_folder_that_is_something_else_is_left_alone(tmp_path: Path) -> None:
    precious = tmp_path / demo.VARIANTS[0].folder / "thesis.txt"
    precious.parent.mkdir()
    precious.touch()
    done = run_here("demo", "--output", str(tmp_path))
    assert done.exit_code == 7
    assert "replaces quantized checkpoints and empty folders only" in done.stderr
    assert precious.exists()


@pytest.mark.slow
def test_it_can_be_stopped(tmp_path: Path) -> None:
    with Terminal("demo", cwd=tmp_path) as terminal:
        terminal.read_until("calibrating")
        terminal.process.send_signal(2)
        shown = terminal.read_until(None)
    assert terminal.process.returncode == 130
    assert "quantizing to W8A8_STATIC by rtn with memoryless_minmax + histogram_mse" in shown
    assert list(tmp_path.iterdir()) == []
