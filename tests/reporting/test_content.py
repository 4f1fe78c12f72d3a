"""The figures of a report equal what is found from the tensors themselves."""

from __future__ import annotations

import json
import math
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import (
    QuantizationArgs,
    QuantizationScheme,
)
from compressed_tensors.quantization.lifecycle.forward import fake_quantize
from massive import MASSIVE
from report_content import IDS, Made
from safetensors.torch import load_file

import calipers
from calipers.judging.costs import ModuleCosts
from calipers.observers import Observer
from calipers.planning.measuring import CHANNEL_EXTREMA, EXTREMA
from calipers.planning.specs import COUNTS, SQUARES
from calipers.reporting.description import describe_checkpoint
from calipers.reporting.inputs import (
    OBSERVERS,
    distribution_of,
    histogram_of,
    range_of,
    ranges_by_observers,
)
from calipers.reporting.modules import ModuleFacts, judged
from calipers.reporting.run import Report
from calipers.statistics.ranges import Extrema
from calipers.statistics.value_counts import ValueCounts

DOWN = "model.layers.1.mlp.down_proj"
INT8 = QuantizationArgs(num_bits=8, strategy="tensor")


@pytest.fixture(scope="module")
def found(made: Made) -> Report:
    return calipers.report([made.plain, made.static], made.measurements, source=made.model)


def row_of(found: Report, checkpoint: int, name: str) -> object:
    return next(row for row in found.content.checkpoints[checkpoint].modules if row.name == name)


def test_errors_are_those_of_the_stored_weights(made: Made, found: Report) -> None:
    scheme = QuantizationScheme(
        targets=["Linear"], weights=QuantizationArgs(num_bits=4, strategy="group", group_size=32)
    )
    stored = load_file(made.plain / "model.safetensors")
    state = {name.removeprefix(f"{DOWN}."): t for name, t in stored.items() if DOWN in name}
    size = sum(tensor.nbytes for tensor in state.values())
    state["weight_scale"] = state["weight_scale"].float()  # what comes out is not rounded then
    compressor = BaseCompressor.get_value_from_registry("pack-quantized")
    after = compressor.decompress(state, scheme)["weight"].double()
    before = load_file(made.model / "model.safetensors")[f"{DOWN}.weight"].double()
    tensors = calipers.Measurements.load(made.measurements).tensors()
    squares, outputs = tensors[DOWN, "input"][SQUARES], tensors[DOWN, "output"][COUNTS]
    lost = ((after - before).square() * squares._imatrix_sum).sum()
    expected = math.sqrt(lost / outputs.square_sum())
    row = row_of(found, 0, DOWN)
    assert row.weight_error == pytest.approx(
        float((after - before).norm() / before.norm()), rel=1e-5
    )
    assert row.costs.weight == pytest.approx(expected, rel=1e-5)
    assert row.output_error == row.costs.weight
    assert row.bits == size * 8 / before.numel()
    assert row.tokens == squares.num_tokens == IDS.numel()


def test_a_checkpoint_without_notes(made: Made, found: Report, tmp_path: Path) -> None:
    bare = shutil.copytree(made.plain, tmp_path / "bare")
    (bare / "calipers.json").unlink()
    again = calipers.report(bare, made.measurements, source=made.model).content.checkpoints[0]
    assert "calipers.json is not there" in again.missing[0]
    for one, other in zip(found.content.checkpoints[0].modules, again.modules, strict=True):
        assert (one.name, one.verdict) == (other.name, other.verdict)
        if one.verdict == "float":
            continue
        assert one.weight_error == pytest.approx(other.weight_error, rel=1e-6)
        assert one.costs.weight == pytest.approx(other.costs.weight, rel=1e-6)
    alone = calipers.report(bare).content
    assert all(row.output_error is None for row in alone.checkpoints[0].modules)
    assert len(alone.missing) == 2
    assert [text[:17] for text in alone.checkpoints[0].missing[1:]] == [
        "Errors of weights",
        "Errors of outputs",
    ]


def test_notes_that_are_damaged_count_as_missing(made: Made, tmp_path: Path) -> None:
    folder = shutil.copytree(made.plain, tmp_path / "damaged")
    notes = {"weight_errors": [1], "costs": {DOWN: 3}, "coverage": None, "notes": {"a": [1]}}
    notes["weight_errors"] = {DOWN: "large", "other": math.nan}
    (folder / "calipers.json").write_text(json.dumps(notes))
    row = row_of(calipers.report(folder), 0, DOWN)
    assert (row.weight_error, row.costs.weight, row.tokens) == (None, None, None)


def test_static_inputs(made: Made, found: Report) -> None:
    """The range of the checkpoint, and what becomes of the values that were counted."""
    stored = load_file(made.static / "model.safetensors")
    scale = stored[f"{DOWN}.input_scale"].double()
    counts = calipers.Measurements.load(made.measurements).tensors()[DOWN, "input"][COUNTS]
    (seen,) = counts.distributions()
    x = seen.values.double().repeat_interleave(seen.counts)
    codes = (x / scale).round().clamp(-128, 127)
    chosen = found.content.checkpoints[1].chosen[DOWN]
    assert chosen.low == pytest.approx(-128 * float(scale))
    assert chosen.high == pytest.approx(127 * float(scale))
    assert chosen.shares.vanished == float(((codes == 0) & (x != 0)).double().mean())
    error = float((codes * scale - x).norm() / x.norm())
    assert chosen.shares.error == pytest.approx(error, rel=1e-6)
    assert DOWN not in found.content.checkpoints[0].chosen
    costs = json.loads((made.static / "calipers.json").read_text())["costs"][DOWN]
    row = row_of(found, 1, DOWN)
    by_input = max(costs["input"], costs["typical_input"])
    assert row.output_error == pytest.approx(math.hypot(costs["weight"], by_input))


def test_a_module_has_one_error(made: Made, tmp_path: Path) -> None:
    """What quantize, show, report and advise say of it is the same, and so is the worst module."""
    folder, observers = tmp_path / "out", ("memoryless_minmax", "histogram_mse")
    done = calipers.quantize(
        made.model,
        "W8A8_STATIC",
        made.measurements,
        folder,
        weight_observer=observers[0],
        activation_observer=observers[1],
        progress=False,
    )
    (facts,) = calipers.report(folder, made.measurements, source=made.model).content.checkpoints
    shown = describe_checkpoint(folder).losses()
    errors = {loss.module: loss.error for loss in shown}
    assert errors == {row.name: row.output_error for row in facts.ranked}
    assert list(errors) == [row.name for row in facts.ranked]
    assert errors == {name: cost.output_error for name, cost in done.costs.items()}
    advised = calipers.advise(
        made.model, made.measurements, "W8A8_STATIC", solvers=observers[:1], progress=False
    )
    assert {each.module: each.error for each in advised.predictions} == pytest.approx(errors)
    costs = json.loads((folder / "calipers.json").read_text())["costs"]
    for name, cost in costs.items():
        by_input = max(cost["input"], cost["typical_input"])
        assert errors[name] == pytest.approx((cost["weight"] ** 2 + by_input**2) ** 0.5)


@pytest.mark.parametrize("symmetric", [True, False])
def test_ranges_are_those_of_observers_that_see_the_tensor(symmetric: bool) -> None:
    args = INT8.model_copy(update={"symmetric": symmetric})
    x = (torch.randn(64, 32).exp() - 0.7).to(torch.bfloat16)
    x[3, 7] = 90
    counts, extrema = ValueCounts(), Extrema("input", INT8)
    for statistic in (counts, extrema):
        statistic.update(x)
    (seen,) = counts.distributions()
    found = ranges_by_observers([counts, extrema], seen, args, exact=True)
    assert [each.observer for each in found] == list(OBSERVERS)
    for each in found:
        observer = Observer.load_from_registry(each.observer, base_name="input", args=args)
        scale, zero_point = observer(x)
        quantized = fake_quantize(x.double(), scale.double(), zero_point, args)
        error = float((quantized - x.double()).norm() / x.double().norm())
        assert each.shares.error == pytest.approx(error, rel=1e-6)
        assert each.shares.vanished == float(((quantized == 0) & (x != 0)).double().mean())
        outside = (x.double() > each.high + each.step / 2) | (x.double() < each.low - each.step / 2)
        assert each.shares.clipped == float(outside.double().mean())


def test_histograms_count_every_value() -> None:
    x = (torch.randn(3000) * torch.randn(3000).mul(4).exp()).to(torch.bfloat16)
    x[:7] = 0
    found = histogram_of(distribution_of(x))
    assert found.zeros == int((x == 0).sum())
    assert found.zeros + sum(found.counts) == 3000
    for index, count in enumerate(found.counts[1:], start=1):
        low, high = (2 ** ((found.exponent + index + i) / 4) for i in (0, 1))
        assert count == int(((x.double().abs() >= low) & (x.double().abs() < high)).sum())


def test_values_that_are_cut_off() -> None:
    seen = distribution_of(torch.tensor([1.0, 100.0, -128.25, 128.0, 0.25, 0.0]))
    one, none = torch.ones(1), torch.zeros(1)
    shares = range_of("", seen, INT8, one, none, exact=True).shares
    assert (shares.clipped, shares.vanished) == (1 / 6, 1 / 6)
    # Before it was rounded, −128.25 may have been −128.
    assert range_of("", seen, INT8, one, none, exact=False).shares.clipped == 0


def test_channels_and_weights(made: Made, found: Report) -> None:
    detail = next(each for each in found.content.inputs if DOWN in each.readers)
    extrema = calipers.Measurements.load(made.measurements).tensors()[DOWN, "input"]
    lows = extrema[CHANNEL_EXTREMA].min_vals.flatten()
    assert detail.channels is not None
    assert list(detail.channels.lows) == lows.float().tolist()
    assert detail.channels.count == len(lows)
    assert float(extrema[EXTREMA].max_vals) == max(detail.channels.highs)
    weight = load_file(made.model / "model.safetensors")[f"{DOWN}.weight"]
    shown = found.content.weights[DOWN]
    assert (shown.rows, shown.columns) == tuple(weight.shape)
    assert shown.values.zeros + sum(shown.values.counts) == weight.numel()
    assert shown.values.largest == float(weight.abs().max())
    limits = found.content.checkpoints[0].limits[DOWN]
    scales = load_file(made.plain / "model.safetensors")[f"{DOWN}.weight_scale"].float()
    assert limits.largest == pytest.approx(8 * float(scales.max()))
    assert limits.groups == scales.numel()
    query = next(e for e in found.content.inputs if "model.layers.0.self_attn.q_proj" in e.readers)
    assert len(query.readers) == 3


def test_massive_activations(ruined: Path) -> None:
    """The layer is named on top of the page, with what its inputs are like."""
    text = ruined.read_text()
    top = text[text.index('<div class="headline">') : text.index("<h2>Checkpoints</h2>")]
    assert f'data-module="{MASSIVE}"' in top
    assert re.search(
        r"One scale reaches ±3,\d\d\d, so that 9[\d.]+ % of all values become zero", top
    )
    assert re.search(r"1 of 256 input channels .* channel 7 is 1,\d\d\d times as large", top)


def test_a_few_values_do_not_hide_what_all_others_lose() -> None:
    rows = [ModuleFacts(f"m{n}", "", costs=ModuleCosts(0.01, 0.01)) for n in range(5)]
    rows[3] = replace(rows[3], costs=ModuleCosts(0.01, 0.01, typical_input=0.4))
    hidden = judged(rows, {}, {})[3]
    assert (hidden.verdict, hidden.output_error) == ("hurts", math.hypot(0.01, 0.4))
    assert hidden.reasons == (
        "Its static input causes most of it: 40 % of the output of tokens without its few largest "
        "values, the weights 1 %.",
    )
    assert judged(rows, {}, {})[2].verdict == "fine"
