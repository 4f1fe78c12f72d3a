"""What quantization is said to cost is what it costs: in float64, over the replayed activations."""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from typing import Any

import massive
import pytest
import rank_jobs
import torch
from compressed_tensors.quantization import QuantizationArgs, fake_quantize
from compressed_tensors.quantization.lifecycle import forward as library
from families import build, token_ids
from pairwise import in_turns
from reference import grid_of
from torch import Tensor

import calipers
from calipers.errors import CalipersWarning
from calipers.judging.activations import ActivationCost
from calipers.judging.costs import Streams, weight_loss
from calipers.observers import Observer

OBSERVERS = ("histogram_mse", "percentile", "static_minmax", "minmax")
INT8 = {"num_bits": 8, "strategy": "tensor", "symmetric": True}
WEIGHTS = INT8 | {"strategy": "channel"}


def recipe(observer: str, **changes: Any) -> dict[str, Any]:
    inputs = INT8 | {"observer": observer} | changes
    modifier = {"ignore": ["lm_head"], "weights": WEIGHTS, "input_activations": inputs}
    return {"modifiers": {"QuantizationModifier": modifier}}


def quantize(model: Any, how: Any, data: Any = None, **options: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CalipersWarning)
        data = massive.samples() if data is None else data
        return calipers.oneshot(model, how, data, shuffle=False, progress=False, **options)


@contextmanager
def seen_by(model: Any) -> Iterator[dict[str, Tensor]]:
    """What goes into each Linear of a decoder layer, without padding, in the model's own dtype."""
    own = model.dtype
    parts: dict[str, list[Tensor]] = {}
    masks: list[Tensor] = []
    found: dict[str, Tensor] = {}
    handles = [
        model.register_forward_pre_hook(
            lambda _m, _a, kwargs: masks.append(kwargs["attention_mask"].bool()), with_kwargs=True
        )
    ]
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear) and "lm_head" not in name:
            kept = parts.setdefault(name, [])
            handles.append(
                module.register_forward_pre_hook(
                    lambda _m, args, kept=kept: kept.append(args[0][masks[-1]].to(own, copy=True))
                )
            )
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()
        found |= {name: torch.cat(tensors) for name, tensors in parts.items()}


def rounded(x: Tensor, scale: Tensor, zero: Tensor, args: Any) -> Tensor:
    """The nearest number of the grid, in float64."""
    grid = torch.from_numpy(grid_of(args))
    codes = x.double() / scale.double() + zero.double()
    if args.type == "int":
        nearest = codes.round().clamp(grid[0], grid[-1])
    else:
        nearest = grid[torch.bucketize(codes, (grid[1:] + grid[:-1]) / 2)]
    return (nearest - zero.double()) * scale.double()


def brute(x: Tensor, module: Any) -> ActivationCost:
    """The cost of a tensor, value by value."""
    args = module.quantization_scheme.input_activations
    scale = module.input_scale.detach()
    zero = getattr(module, "input_zero_point", torch.zeros(1)).detach()
    x = x.double().flatten()
    grid = torch.from_numpy(grid_of(args))
    error = rounded(x, scale, zero, args) - x
    codes = x / scale.double() + zero.double()
    beyond = (codes > grid[-1] + (grid[-1] - grid[-2]) / 2) | (
        codes < grid[0] - (grid[1] - grid[0]) / 2
    )
    most = x.abs().sort().values[math.ceil(0.999 * len(x)) - 1]
    usual = x.abs() <= most
    largest = x[x.abs().argmax()]
    limit = ((grid[-1] if largest > 0 else grid[0]) - zero.double()) * scale.double()
    return ActivationCost(
        clipped=float(beyond.double().mean()),
        error=float(error.norm() / x.norm()),
        typical_error=float(error[usual].norm() / x[usual].norm()),
        error_in_largest=float(error[~usual].square().sum() / error.square().sum()),
        largest=float(largest.abs()),
        limit=float(limit.abs()),
        exact=True,
    )


# Activations


@pytest.mark.parametrize(("observer", "batch_size"), in_turns(OBSERVERS, [3, 1]))
def test_costs_of_activations_are_exact(observer: str, batch_size: int) -> None:
    """Also with padding, which is no value."""
    model = massive.massive_llama(torch.bfloat16)
    with seen_by(model) as seen:
        result = quantize(model, recipe(observer), batch_size=batch_size)
    assert len(result.costs) == 14
    for name, costs in result.costs.items():
        assert list(costs.tensors) == ["input"]
        expected = vars(brute(seen[name], result.model.get_submodule(name)))
        assert vars(costs.tensors["input"]) == pytest.approx(expected, rel=1e-9, abs=1e-15)


@pytest.mark.parametrize("changes", [{"symmetric": False}, {"type": "float"}])
def test_costs_in_other_formats(changes: dict[str, Any]) -> None:
    model = massive.massive_llama(torch.bfloat16)
    with seen_by(model) as seen:
        result = quantize(model, recipe("percentile", **changes))
    for name, costs in result.costs.items():
        expected = vars(brute(seen[name], result.model.get_submodule(name)))
        assert vars(costs.tensors["input"]) == pytest.approx(expected, rel=1e-6, abs=1e-15)


@pytest.mark.parametrize("observer", OBSERVERS)
def test_costs_of_wide_floats_are_within_the_bounds_stated(observer: str) -> None:
    model = massive.massive_llama(torch.float32)
    with seen_by(model) as seen:
        result = quantize(model, recipe(observer))
    for name, costs in result.costs.items():
        cost, true = costs.tensors["input"], brute(seen[name], result.model.get_submodule(name))
        assert not cost.exact
        assert cost.error == pytest.approx(true.error, abs=0.004)
        assert cost.typical_error == pytest.approx(true.typical_error, abs=0.004)
        assert cost.largest == pytest.approx(true.largest, rel=0.004)
        assert cost.limit == pytest.approx(true.limit, rel=1e-6)
        assert 0 <= cost.clipped <= true.clipped


def test_each_observer_ruins_massive_activations_in_its_way() -> None:
    cost = {
        name: quantize(massive.massive_llama(torch.bfloat16), recipe(name))
        .costs[massive.MASSIVE]
        .tensors["input"]
        for name in ("percentile", "static_minmax")
    }
    cut, wide = cost["percentile"], cost["static_minmax"]
    assert cut.largest == wide.largest > 2900
    assert cut.error > 0.99  # the huge values are gone, and hardly any of the others
    assert cut.typical_error < 0.1
    assert cut.clipped < 0.001
    assert cut.largest > 100 * cut.limit
    assert wide.error < 0.1  # they are kept, and everything else is rounded to zero
    assert wide.typical_error > 0.9
    assert wide.clipped == 0
    assert wide.largest == pytest.approx(wide.limit, rel=0.01)


def test_heads_are_taken_together() -> None:
    scheme = {"num_bits": 8, "type": "float", "strategy": "attn_head"}
    how = {"modifiers": {"QuantizationModifier": {"kv_cache_scheme": scheme}}}
    result = quantize(massive.massive_llama(), how)
    assert [list(costs.tensors) for costs in result.costs.values()] == [["k", "v"]] * 2
    assert all(c.weight is None and c.input is None for c in result.costs.values())
    for costs in result.costs.values():
        assert all(0 < cost.error < 0.05 for cost in costs.tensors.values())


# Outputs


@pytest.mark.parametrize("observer", ["percentile", "static_minmax", "histogram_mse"])
def test_errors_of_outputs_are_near_those_that_are_measured(observer: str) -> None:
    model = massive.massive_llama()
    with seen_by(model) as seen:
        result = quantize(model, recipe(observer))
    for name, costs in result.costs.items():
        module: Any = result.model.get_submodule(name)
        x, weight = seen[name].double(), module.weight.detach().double()
        args = module.quantization_scheme.input_activations
        change = rounded(x, module.input_scale, module.input_zero_point, args) - x
        dequantized = fake_quantize(
            module.weight.detach(),
            module.weight_scale,
            module.weight_zero_point,
            module.quantization_scheme.weights,
        ).double()
        output, by_input = x @ weight.T, change @ weight.T
        by_weight = (x @ (dequantized - weight).T).norm() / output.norm()
        assert costs.weight == pytest.approx(float(by_weight), rel=0.15)
        ratio = costs.input / float(by_input.norm() / output.norm())
        assert 0.5 < ratio < 2 if name == massive.MASSIVE else 0.85 < ratio < 1.15
        of_tokens = float((by_input.norm(dim=1) / output.norm(dim=1)).mean())
        if name != massive.MASSIVE or observer != "percentile":
            assert costs.typical_input == pytest.approx(of_tokens, rel=0.25)
    ruined = result.costs[massive.MASSIVE]
    assert ruined.input > 0.3
    assert (ruined.typical_input < 0.02) == (observer == "percentile")


@pytest.mark.parametrize(
    ("strategy", "options"),
    [
        ("tensor", {}),
        ("channel", {"symmetric": False}),
        ("group", {"group_size": 32}),
        ("block", {"block_structure": [24, 40]}),
        ("tensor_group", {"num_bits": 4, "type": "float", "group_size": 16}),
    ],
)
@pytest.mark.parametrize("width", [None, 32])
def test_the_loss_of_a_weight(strategy: str, options: dict[str, Any], width: int | None) -> None:
    """E‖ΔW x‖², under E[x²] or under blocks of E[x xᵀ], in tiles, and from what the weight was."""
    torch.manual_seed(0)
    args = QuantizationArgs(**{"num_bits": 8, "strategy": strategy, **options})
    if strategy == "tensor_group":
        args = args.model_copy(update={"scale_dtype": torch.float8_e4m3fn})
    weight = torch.randn(100, 96).bfloat16()
    qparams = Observer.load_from_registry("memoryless_minmax", base_name="weight", args=args)(
        weight
    ).get_qparams()
    x = torch.randn(500, 96, dtype=torch.float64) @ torch.randn(96, 96, dtype=torch.float64)
    hessian = x.T @ x / len(x)
    blocks = None
    if width is not None:
        hessian = hessian * torch.block_diag(*[torch.ones(width, width)] * (96 // width))
        blocks = torch.stack([hessian[i : i + width, i : i + width] for i in range(0, 96, width)])
    else:
        hessian = hessian.diagonal().diag()
    streams = Streams(hessian.diagonal(), blocks, 1.0)
    scale, zero_point, whole = (qparams[key] for key in ("scale", "zero_point", "global_scale"))
    codes = library.quantize(weight, scale, zero_point, args, global_scale=whole).float()
    q = library.dequantize(codes, scale.float(), zero_point, args, global_scale=whole)
    change = q.double() - weight.double()
    expected = float((change @ hessian @ change.T).trace())
    for tile, before in product((1 << 20, 500), (None, weight)):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("calipers.judging.costs._AT_ONCE", tile)
            loss, codes = weight_loss(weight, args, qparams, streams, before)
        assert codes is None
        assert loss.output == pytest.approx(expected, rel=1e-4)
        assert loss.error == pytest.approx(float(change.norm() / weight.double().norm()), rel=1e-4)


@pytest.mark.parametrize("importance", ["imatrix", "hessian"])
def test_the_optimum_looks_better_where_it_is(importance: str) -> None:
    """Its weights are further off than those of min-max, and what the layer does is nearer."""
    torch.manual_seed(0)
    model = build()
    with torch.no_grad():
        for module in model.modules():
            if type(module).__name__.endswith("RMSNorm"):
                module.weight.copy_(torch.randn_like(module.weight).mul(1.5).exp())
    data = token_ids().tolist()
    group = {"num_bits": 4, "strategy": "group", "group_size": 32}

    def found(**chosen: Any) -> Any:
        modifier = {"ignore": ["lm_head"], "weights": group | chosen, "targets": ["re:.*gate_proj"]}
        gathering = {"IMatrixGatherer": {"ignore": ["lm_head"]}}  # so that data runs for min-max
        both = {"modifiers": gathering | {"QuantizationModifier": modifier}}
        return quantize(build_again(model), both, data)

    def build_again(like: Any) -> Any:
        again = build()
        again.load_state_dict(like.state_dict())
        return again

    options = {"importance": importance}
    plain, best = found(), found(observer="optimal", observer_kwargs=options)
    for name in best.errors:
        assert best.errors[name] > plain.errors[name]
        assert best.costs[name].weight < plain.costs[name].weight


# Whole calibrations


def test_layer_by_layer_costs_the_same() -> None:
    whole, layers = (
        quantize(massive.massive_llama(), recipe("static_minmax"), pipeline=pipeline)
        for pipeline in ("basic", "sequential")
    )
    assert layers.costs == whole.costs


def test_reading_together_costs_the_same() -> None:
    together, alone = (
        quantize(massive.massive_llama(), recipe("minmax"), share_inputs=share)
        for share in (True, False)
    )
    assert together.costs == alone.costs


@pytest.mark.parametrize("policy", ["weights_only", "peers"])
@pytest.mark.parametrize("observer", ["static_minmax", "percentile"])
def test_experts_that_saw_nothing_have_no_costs(observer: str, policy: Any) -> None:
    data = rank_jobs.routed_texts(0, 1, 2)
    model = rank_jobs.routed_mixtral()
    result = quantize(model, recipe(observer), data, on_unseen=policy)
    unseen = set(result.coverage.applied)
    assert len(unseen) == 3
    for name in result.errors:
        known = result.costs.get(name)
        assert (known is None or (not known.tensors and known.weight is None)) == (name in unseen)


def test_without_data_there_is_only_the_error_of_the_weight() -> None:
    result = quantize(massive.massive_llama(), "W8A16", pipeline="datafree")
    assert len(result.errors) == 14
    assert result.costs == {}


def test_an_idle_head_is_not_judged_by_a_few_tokens() -> None:
    """It runs for the last token only; the others are what inputs were asked of."""
    modifiers = [
        {"QuantizationModifier": {"targets": ["lm_head"], "weights": WEIGHTS}},
        {"QuantizationModifier": {"targets": ["re:.*down_proj"], "scheme": "FP8"}},
    ]
    result = quantize(massive.massive_llama(), {"modifiers": modifiers})
    assert "lm_head" in result.errors
    assert set(result.costs) == {f"model.layers.{layer}.mlp.down_proj" for layer in (0, 1)}


def test_a_user_is_warned_and_the_checkpoint_has_the_figures(tmp_path: Path) -> None:
    model = massive.massive_llama(torch.bfloat16)
    with pytest.warns(CalipersWarning) as caught:
        result = calipers.oneshot(
            model,
            recipe("percentile"),
            massive.samples(),
            output_dir=tmp_path / "out",
            progress=False,
        )
    said = [str(each.message) for each in caught if "static activation" in str(each.message)]
    assert said == [
        f"1 static activation loses more than 20%: {massive.MASSIVE}.input (100%). Quantize "
        "activations dynamically, leave such modules out, or choose another observer; 'costs' of "
        "the result and of calipers.json tell more."
    ]
    written = json.loads((tmp_path / "out" / "calipers.json").read_text())["costs"]
    assert written.keys() == result.costs.keys()
    found = result.costs[massive.MASSIVE]
    assert written[massive.MASSIVE] == {
        "weight": found.weight,
        "input": found.input,
        "typical_input": found.typical_input,
        "tensors": {"input": vars(found.tensors["input"])},
        "loss": None,
        "chosen": {},
    }
