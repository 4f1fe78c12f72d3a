"""``calipers show``: what is drawn is what was counted, at any width and without colours."""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from shell import Terminal, refused, run

from calipers import Measurements
from calipers.cli.app import console
from calipers.cli.rendering import Axis, HeatMap, blocks
from calipers.measurements.summary import layer_grid, magnitudes_of
from calipers.statistics.value_counts import ValueCounts

FEW = ("--samples", "4", "--seq-len", "16")
COLOUR = re.compile(r"\x1b\[[\d;?]*[a-zA-Z]")


@pytest.fixture(scope="module")
def place(model: Path, text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Measurements, and a checkpoint."""
    folder = tmp_path_factory.mktemp("shown")
    data = ("--data", str(text), *FEW)
    assert run("measure", str(model), *data, "-o", "m", cwd=folder).returncode == 0
    done = run("quantize", str(model), *data, "-s", "W8A8_STATIC", "-o", "out", cwd=folder)
    assert done.returncode == 0, done.stderr
    return folder


def told(*arguments: str, cwd: Path) -> Any:
    return json.loads(run("show", *arguments, "--json", cwd=cwd).stdout)


def test_magnitudes_are_those_of_the_values(place: Path) -> None:
    x = torch.randn(40, 50, generator=torch.Generator().manual_seed(0)).pow(5)
    x = torch.cat([x, torch.zeros(2, 50), torch.full((1, 50), 3000.0)]).bfloat16()
    seen = ValueCounts()
    seen.update(x)
    found = magnitudes_of({"counts": seen})
    assert found is not None
    exponents = Counter(math.floor(math.log2(abs(v))) for v in x.flatten().tolist() if v)
    first, last = min(exponents), max(exponents)
    assert (found.zeros, found.exponent) == (int((x == 0).sum()), first)
    assert list(found.counts) == [exponents[each] for each in range(first, last + 1)]
    y = x.double()
    assert found.peak == pytest.approx(float(y.abs().max() / y.square().mean().sqrt()), rel=1e-12)
    rows = {row["tensor"]: row for row in told("m", cwd=place)["tensors"]}
    row = rows["model.layers.0.self_attn.q_proj.input"]
    held = Measurements.load(place / "m").tensors()["model.layers.0.self_attn.q_proj", "input"]
    assert row["histogram"] == magnitudes_of(held).as_dict()  # type: ignore[union-attr]
    assert row["peak"] == pytest.approx(max(-row["min"], row["max"]) / row["rms"], rel=0.01)


def test_what_is_drawn_can_be_read_without_colours(place: Path) -> None:
    shown = run("show", "m", cwd=place).stdout
    assert not COLOUR.search(shown)
    row = next(line for line in shown.splitlines() if "0.self_attn.q_proj" in line)
    assert "█" in row
    found = told("m", cwd=place)["peaks"]
    line = next(line for line in shown.splitlines() if line.startswith("0 "))
    values = [value for value in found["values"][0] if value is not None]
    assert re.findall(r"\d+", line) == ["0", *(f"{value:.0f}" for value in values)]


@pytest.mark.parametrize(("what", "env"), [("m", {"NO_COLOR": "1"}), ("out", {})], ids=str)
@pytest.mark.slow
def test_it_fits_into_a_narrow_terminal(what: str, env: dict[str, str], place: Path) -> None:
    with Terminal("show", what, cwd=place, env={"COLUMNS": "80", **env}) as terminal:
        shown = terminal.read_until(None)
    assert bool(COLOUR.search(shown)) == (not env)
    lines = [line.rstrip() for line in COLOUR.sub("", shown).splitlines()]
    assert max(map(len, lines)) <= 80
    for kind in ("q_proj", "gate_proj", "down_proj"):
        assert any(line.startswith("layer ") and kind in line for line in lines)


def test_a_checkpoint(place: Path) -> None:
    found = told("out", cwd=place)
    notes = json.loads((place / "out" / "calipers.json").read_text())
    assert (found["modules"], found["pipeline"], found["samples"]) == (14, "basic", 4)
    assert [row["format"] for row in found["schemes"]] == ["int8", "int8"]
    errors = {loss["module"]: loss["error"] for loss in found["losses"]}
    assert errors == {
        name: math.hypot(cost["weight"], max(cost["input"], cost["typical_input"]))
        for name, cost in notes["costs"].items()
    }
    assert list(errors.values()) == sorted(errors.values(), reverse=True)
    grid = found["errors_in_decibels"]
    expected = 20 * math.log10(errors["model.layers.1.mlp.up_proj"])
    assert grid["values"][1][grid["kinds"].index("up_proj")] == pytest.approx(expected)
    stored = load_file(place / "out" / "model.safetensors")
    weights = {n: t for n, t in stored.items() if "layers" in n and n.endswith("proj.weight")}
    scales = sum(stored[f"{name}_scale"].nbytes for name in weights)
    numbers = sum(weight.numel() for weight in weights.values())
    assert found["bits_per_weight"] == 8 + 8 * scales / numbers
    bits = f", {found['bits_per_weight']:.2f} bits per quantized weight"
    assert bits in run("show", "out", cwd=place).stdout


@pytest.mark.parametrize(("scheme", "bits"), [("W4A16", 4), ("NVFP4A16", 4), ("MXFP4A16", 4)])
def test_bits_per_weight(scheme: str, bits: int, model: Path, tmp_path: Path) -> None:
    """Also of formats that store no shape; scales come to them."""
    done = run("quantize", str(model), "-s", scheme, "-o", "out", "--json", cwd=tmp_path)
    stored = load_file(tmp_path / "out" / "model.safetensors")
    sizes = {n: t.nbytes for n, t in stored.items() if "_proj.weight" in n}
    codes = sum(size for name, size in sizes.items() if name.endswith("weight_packed"))
    expected = bits * sum(sizes.values()) / codes
    assert json.loads(done.stdout)["bits_per_weight"] == pytest.approx(expected, rel=1e-12)


def test_unsupported_modules_shown(place: Path, tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    refused(("show", "folder"), "has no calipers.json: Calipers has not written it.", cwd=tmp_path)
    folder = tmp_path / "folder"
    for file in (place / "out").iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    notes = json.loads((folder / "calipers.json").read_text())
    for key, value, said in (
        ("weight_errors", {"a": float("nan")}, "'weight_errors' must be the finite errors"),
        ("costs", {"a": {"tensors": {"input": {}}}}, "'costs' are not those of modules"),
        ("tokens", "many", "'tokens' must be a whole number, got 'many'"),
    ):
        (folder / "calipers.json").write_text(json.dumps({**notes, key: value}))
        refused(("show", "folder"), said, cwd=tmp_path)


@pytest.mark.parametrize(
    ("shape", "is_shown"),
    [([[128, 128]], True), ([[1, 2], [3, 4]], True), ([[0, 3]], False), (7, False)],
    ids=str,
)
def test_shapes_that_are_none(shape: Any, is_shown: bool, model: Path, tmp_path: Path) -> None:
    """A tensor of another shape than [rows, columns] is no bug of Calipers."""
    run("quantize", str(model), "-s", "W4A16", "-o", "out", cwd=tmp_path)
    stored = load_file(tmp_path / "out" / "model.safetensors")
    name = "model.layers.0.self_attn.q_proj.weight_shape"
    save_file({**stored, name: torch.tensor(shape)}, tmp_path / "out" / "model.safetensors")
    if is_shown:
        assert told("out", cwd=tmp_path)["modules"] == 14
    else:
        refused(("show", "out"), f"'{name}' does not hold the shape of a weight", cwd=tmp_path)
    assert run("lint", "out", cwd=tmp_path).returncode == 1
    assert run("report", "out", "-o", "r.html", cwd=tmp_path).returncode == 0


def test_histograms_share_an_axis() -> None:
    low = {"zeros": 0, "exponent": -8, "counts": [0, 100, 100]}
    high = {"zeros": 0, "exponent": -1, "counts": [1000, 0, 1]}
    axis = Axis.for_all([low, high], columns=9)
    assert (axis.first, axis.step) == (-7, 1)
    assert axis.draw(low) == "██       "
    assert axis.draw(high) == "      █ ▁"
    assert Axis.for_all([low, high], columns=3).draw(high) == "  █"
    assert Axis.for_all([]).draw({"zeros": 4, "exponent": 0, "counts": []}).strip() == ""
    assert blocks([]) == ""


def test_wide_maps_are_cut_into_several() -> None:
    names = [f"layers.{layer}.kind_{kind:02}" for layer in range(3) for kind in range(30)]
    grid = layer_grid({name: float(number) for number, name in enumerate(names, 1)})
    made = console()
    made.width = 80
    with made.capture() as captured:
        made.print(HeatMap(grid, (4.0, 400.0), ".0f"))
    lines = captured.get().splitlines()
    assert max(map(len, lines)) <= 80
    assert len(lines) == 4 * 4
    found = [word for line in lines if not line.startswith("layer") for word in line.split()[1:]]
    assert sorted(map(int, found)) == list(range(1, 91))


def test_layers_of_experts_and_of_several_stacks() -> None:
    grid = layer_grid(
        {
            "model.layers.10.mlp.experts.0.up_proj": 3.0,
            "model.layers.10.mlp.experts.7.up_proj": 1.0,
            "model.layers.2.mlp.shared.up_proj": 2.0,
            "lm_head": 5.0,
        }
    )
    assert grid.layers == ("2", "10", "–")
    assert grid.kinds == ("*.up_proj", "shared.up_proj", "lm_head")
    assert grid.values == ((None, 2.0, None), (3.0, None, None), (None, None, 5.0))
    assert layer_grid({"a.0.x": 1.0, "b.0.x": 2.0}).layers == ("a.0", "b.0")
