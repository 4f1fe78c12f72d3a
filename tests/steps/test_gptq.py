"""GPTQModifier against the textbook, in float64, on models that run as a whole."""

from __future__ import annotations

import copy
import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from calibrating import batches_of, captured, run, samples, small
from compressed_tensors.quantization import QuantizationArgs
from compressed_tensors.quantization.lifecycle import fake_quantize
from engines import NATIVE_ENGINES, engine_in_use, native_only
from torch import Tensor, nn

from calipers import GPTQModifier, QuantizationModifier, oneshot
from calipers.errors import CalipersError, CalipersWarning, RecipeError, TensorValueError
from calipers.recipes import load_recipe
from calipers.topology.experts import unfuse_experts

STAGES = (
    ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    ("self_attn.o_proj",),
    ("mlp.gate_proj", "mlp.up_proj"),
    ("mlp.down_proj",),
)
RESIDUAL = {STAGES[1]: "input_layernorm", STAGES[3]: "post_attention_layernorm"}
DAMPING, CORRECTION_DAMPING = 0.01, 0.05
LAYERS = 3  # what the last one is calibrated on has gone through one that was quantized on others
ARGS = {"num_bits": 4, "strategy": "group", "group_size": 8, "observer": "memoryless_mse"}


def quietly(*args: Any, **kwargs: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CalipersWarning)
        return oneshot(*args, progress=False, **kwargs)


def seen(model: Any, batches: Any) -> dict[str, Tensor]:
    """The inputs of all linears and norms of a model that runs as a whole, padding left out."""
    norms = {n: m for n, m in model.named_modules() if n.endswith("layernorm")}
    with captured(model) as (inputs, _):
        handles = [
            norm.register_forward_pre_hook(lambda _, x, name=name: inputs[name].append(x[0]))
            for name, norm in norms.items()
        ]
        run(model, batches)
    for handle in handles:
        handle.remove()
    masks = [batch["attention_mask"].bool() for batch in batches]
    return {
        name: torch.cat([x[m] for x, m in zip(each, masks, strict=True)]).double()
        for name, each in inputs.items()
    }


def textbook(weight: Tensor, hessian: Tensor, order: Tensor, scales: Tensor) -> Tensor:
    """GPTQ with an explicit inverse, or rounding to nearest for rows that lose less by it."""
    left, bits = weight[:, order].clone(), 4
    plain = rounded(weight, scales, bits)
    scales = scales[:, order]
    inverse = torch.linalg.inv(hessian[order][:, order])
    factor = torch.linalg.cholesky(inverse, upper=True)
    found = torch.zeros_like(left)
    for j in range(left.shape[1]):
        found[:, j] = rounded(left[:, j], scales[:, j], bits)
        error = (left[:, j] - found[:, j]) / factor[j, j]
        left[:, j:] -= error[:, None] * factor[j, j:]
    found = torch.empty_like(found).index_copy_(1, order, found)
    lost, lost_plainly = (((q - weight) @ hessian * (q - weight)).sum(1) for q in (found, plain))
    return torch.where((lost > lost_plainly)[:, None], plain, found)


def rounded(values: Tensor, scales: Tensor, bits: int) -> Tensor:
    return (values / scales).round().clamp(-(2 ** (bits - 1)), 2 ** (bits - 1) - 1) * scales


def reference(
    model: Any, batches: Any, propagation: str, actorder: Any, ours: Any
) -> dict[str, Tensor]:
    """What becomes of each weight, worked out with two whole models side by side.

    :param ours: the model as we quantized it: its scales, and for each stage what came before
    """
    quantized, found = copy.deepcopy(model), {}
    for layer in range(LAYERS):
        for stage in STAGES:
            prefix = f"model.layers.{layer}"
            names = [f"{prefix}.{name}" for name in stage]
            all_was, all_now = seen(model, batches), seen(quantized, batches)
            was, now = all_was[names[0]], all_now[names[0]]
            now = was if propagation == "float" else now
            tokens, columns = now.shape
            trust = tokens / (tokens + columns)
            hessian = now.T @ now / tokens
            off = (1 - trust) * torch.diag(hessian.diagonal())
            added = DAMPING * hessian.diagonal().mean() * torch.eye(columns)
            damped = trust * hessian + off + added
            more = CORRECTION_DAMPING / DAMPING * added
            cross = trust * (was.T @ now / tokens) + off + more
            order = torch.arange(columns)
            if actorder:
                order = damped.diagonal().argsort(descending=True, stable=True)
            for name in names:
                weight = model.get_submodule(name).weight.detach().double()
                if propagation == "both":
                    weight = weight @ cross
                    if stage in RESIDUAL:
                        lost = all_was[f"{prefix}.{RESIDUAL[stage]}"]
                        lost = lost - all_now[f"{prefix}.{RESIDUAL[stage]}"]
                        weight += trust * lost.T @ now / tokens
                    weight = weight @ torch.linalg.inv(damped - added + more)
                found[name] = textbook(weight, damped, order, scales_of(ours, name))
            for name in names:
                quantized.get_submodule(name).weight.data = ours.get_submodule(name).weight.data
    return found


@pytest.mark.parametrize(
    ("propagation", "actorder"),
    [("float", None), ("quantized", "static"), ("both", None), ("both", "weight")],
)
def test_weights_are_those_of_the_textbook(propagation: str, actorder: Any) -> None:
    model, batches = small("llama", num_hidden_layers=LAYERS), batches_of(samples(24), 4)
    before = copy.deepcopy(model)
    modifier = GPTQModifier(
        weights=ARGS,
        ignore="lm_head",
        actorder=actorder,
        dampening_frac=DAMPING,
        sweeps=0,
        error_propagation=propagation,
    )
    result = quietly(model, [modifier], list(batches))
    expected = reference(before, batches, propagation, actorder, model)
    for name, weight in expected.items():
        now = model.get_submodule(name).weight.detach().double()
        # Sums in float32 may turn a code that is nearly at a tie, and others after it in its row.
        same = ((now - weight).abs() < 0.5 * scales_of(model, name)).all(1).double().mean()
        assert same >= 0.85, (name, float(same))
        assert 0 < result.errors[name] < 0.5


def scales_of(model: Any, name: str) -> Tensor:
    scales: Tensor = model.get_submodule(name).weight_scale.detach().double()
    return scales.repeat_interleave(8, 1)


def test_float_propagation_is_the_same_in_both_pipelines() -> None:
    batches = batches_of(samples(12), 3)
    modifier = GPTQModifier(weights=ARGS, ignore="lm_head", error_propagation="float")
    models = [small("llama"), small("llama")]
    for model, pipeline in zip(models, ("basic", "sequential"), strict=True):
        quietly(model, [modifier], list(batches), pipeline=pipeline)
    for (name, one), other in zip(
        models[0].named_parameters(), models[1].parameters(), strict=True
    ):
        assert torch.equal(one, other), name


@pytest.mark.parametrize("scheme", ["W4A16", "FP8_DYNAMIC", "NVFP4A16", "MXFP4A16"])
def test_what_is_stored_is_what_was_chosen(scheme: str) -> None:
    model = small("llama", hidden_size=128, intermediate_size=256, head_dim=32).bfloat16()
    result = quietly(model, [GPTQModifier(ignore="lm_head", scheme=scheme)], samples(24))
    for name in result.errors:
        module = model.get_submodule(name)
        parameters = [getattr(module, f"weight_{each}", None) for each in ("scale", "zero_point")]
        found = fake_quantize(
            module.weight,
            *parameters,
            module.quantization_scheme.weights,
            global_scale=getattr(module, "weight_global_scale", None),
        )
        assert torch.equal(found, module.weight), name


def test_gptq_loses_less_than_rounding_to_nearest_with_the_same_scales() -> None:
    batches = batches_of(samples(60), 4)
    tokens = torch.randint(1, 64, (8, 12), generator=torch.Generator().manual_seed(9))
    distances = []
    for modifier in (QuantizationModifier, GPTQModifier):
        model = small("llama")
        with torch.no_grad():
            meant = model(tokens).logits
            quietly(model, [modifier(weights={**ARGS, "num_bits": 3})], list(batches))
            distances.append(float((model(tokens).logits - meant).norm()))
    assert distances[1] < 0.8 * distances[0]


@pytest.mark.parametrize("kind", ["mixtral", "qwen2_moe"])
def test_experts_are_fed_back_with_what_reaches_them(kind: str) -> None:
    model, before = small(kind), small(kind)
    unfuse_experts(before)
    modifier = GPTQModifier(weights=ARGS, ignore=["lm_head", "re:.*gate$"])
    result = quietly(model, [modifier], samples(40), on_unseen="weights_only")
    experts = [name for name in result.errors if ".experts." in name]
    assert len(experts) >= 2 * 4 * 3
    assert result.coverage.applied == {}
    for name in experts:
        found, scales = model.get_submodule(name).weight, scales_of(model, name)
        nearest = rounded(before.get_submodule(name).weight.double(), scales, 4)
        torch.testing.assert_close(rounded(found.double(), scales, 4), found.double())
        assert bool(((found - nearest).abs() > 0.5 * scales).any()), name


@native_only
def test_a_weight_of_one_row_is_the_same_in_torch_and_natively() -> None:
    """Its column is contiguous whichever way it is turned."""
    gates = ["re:.*shared_expert_gate$"]
    weights = {**ARGS, "strategy": "channel", "group_size": None, "num_bits": 8}
    modifier = GPTQModifier(weights=weights, targets=gates, actorder=None)
    before = small("qwen2_moe")
    found = []
    for engine in ("torch", NATIVE_ENGINES[-1]):
        model = copy.deepcopy(before)
        with engine_in_use(engine):
            result = quietly(model, [modifier], samples(24))
        found.append((model, result.errors))
    (in_torch, _), (natively, _) = found
    for name in found[0][1]:
        meant, one, other = (m.get_submodule(name).weight for m in (before, in_torch, natively))
        assert meant.shape == (1, 32)
        torch.testing.assert_close(one, other)
        assert (one - meant).norm() < 0.05 * meant.norm()
        assert found[0][1][name] == pytest.approx(found[1][1][name], rel=1e-3)


def test_experts_without_tokens_are_rounded_to_nearest_and_it_is_said() -> None:
    model = small("mixtral", num_local_experts=16)
    modifier = GPTQModifier(weights=ARGS, ignore=["lm_head", "re:.*gate$"])
    result = quietly(model, [modifier], samples(2), on_unseen="weights_only")
    assert set(result.coverage.applied.values()) == {"weights only"}
    name = next(iter(result.coverage.applied))
    plain = small("mixtral", num_local_experts=16)
    quietly(plain, [QuantizationModifier(weights=ARGS, ignore=["lm_head", "re:.*gate$"])])
    for each in ("weight", "weight_scale"):
        ours, theirs = (getattr(m.get_submodule(name), each) for m in (model, plain))
        assert torch.equal(ours, theirs)


def test_a_hessian_that_cannot_be_factorised_is_told_of(tmp_path: Path) -> None:
    model = small("llama")
    with torch.no_grad():  # no input at all reaches this one
        model.model.layers[1].post_attention_layernorm.weight.zero_()
    modifier = GPTQModifier(weights=ARGS, ignore="lm_head")
    with pytest.warns(CalipersWarning, match="rounded to nearest"):
        result = oneshot(
            model,
            [modifier],
            samples(8),
            progress=False,
            output_dir=tmp_path / "out",
            num_calibration_samples=8,
        )
    names = {f"model.layers.1.mlp.{part}_proj" for part in ("gate", "up", "down")}
    assert set(result.notes) == names
    written = json.loads((tmp_path / "out" / "calipers.json").read_text())
    assert set(written["notes"]) == names


def test_everything_is_undone_when_a_run_fails() -> None:
    model = small("llama")
    before = copy.deepcopy(model.state_dict())
    with torch.no_grad():
        model.model.layers[1].input_layernorm.weight.fill_(torch.nan)
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(TensorValueError, match=r"layers\.1\.self_attn\.q_proj"):
        quietly(model, [GPTQModifier(weights=ARGS, ignore="lm_head")], samples(8))
    assert not any("weight" in vars(module) for module in model.modules())
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name]) or bool(tensor.isnan().all()), name


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"actorder": "group"}, "no longer stores. Allowed: static, weight, null"),
        ({"actorder": True}, "no longer stores"),
        ({"actorder": "random"}, "actorder"),
        ({"dampening_frac": 0}, "dampening_frac"),
        ({"block_size": 0}, "block_size"),
        ({"error_propagation": "none"}, "error_propagation"),
        ({"sweep": 2}, "Did you mean 'sweeps'"),
        ({"weights": None, "input_activations": {"num_bits": 8}}, "quantizes no weights"),
        ({"actorder": None, "weights": {**ARGS, "actorder": "weight"}}, "Keep one"),
    ],
)
def test_unsupported_modules_meant_is_refused(given: dict[str, Any], text: str) -> None:
    with pytest.raises(RecipeError, match=text):
        GPTQModifier(**{"weights": ARGS, **given})


def test_keys_that_change_nothing_are_accepted() -> None:
    given = {"offload_hessians": True, "batched_quantization": "auto", "sequential_update": True}
    modifier = GPTQModifier(scheme="W4A16", **given)
    again = load_recipe(load_recipe([modifier]).to_yaml()).modifiers[0]
    assert again == modifier


def test_a_pipeline_that_cannot_propagate_is_refused() -> None:
    modifier = GPTQModifier(weights=ARGS, ignore="lm_head")
    with pytest.raises(CalipersError, match="error_propagation: float"):
        quietly(small("llama"), [modifier], samples(4), pipeline="basic")


def test_a_tensor_is_claimed_once() -> None:
    both = [GPTQModifier(weights=ARGS), QuantizationModifier(weights=ARGS)]
    with pytest.raises(RecipeError, match=r"Both GPTQModifier .* and QuantizationModifier"):
        quietly(small("llama"), both, samples(4))


def test_the_default_observer_is_exact_under_the_hessian() -> None:
    weights = GPTQModifier(scheme="W4A16").schemes["group_0"].weights
    assert isinstance(weights, QuantizationArgs)
    assert (weights.observer, weights.observer_kwargs) == ("optimal", {"importance": "hessian"})


def test_samples_of_like_length_run_together_unless_a_size_is_given(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    data, sizes = torch.randint(1, 64, (24, 9)).tolist(), []
    run_layer = nn.Module.__call__

    def noting(module: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(module, nn.Embedding):
            sizes.append(len(args[0]))
        return run_layer(module, *args, **kwargs)

    monkeypatch.setattr(nn.Module, "__call__", noting)
    weights = {}
    for size in (None, 1):
        sizes.clear()
        model = small("llama")
        modifier = GPTQModifier(weights=ARGS, ignore="lm_head", dampening_frac=DAMPING)
        quietly(model, [modifier], data, num_calibration_samples=24, batch_size=size)
        assert max(sizes) == (24 if size is None else 1)
        weights[size] = {n: w for n, w in model.state_dict().items() if n.endswith("proj.weight")}
    for name, weight in weights[1].items():
        # Sums in another order may turn a code that is nearly at a tie.
        same = (weights[None][name] - weight).abs() < 1e-3 * weight.abs().max()
        assert same.double().mean() > 0.97, name
