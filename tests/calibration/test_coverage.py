"""Who saw how much, and what becomes of those who saw nothing."""

from __future__ import annotations

import json
import re
import warnings
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from calibrating import (
    STATIC,
    anatomy,
    batches_of,
    calibrated,
    linears,
    plan_of,
    run,
    same_qparams,
    samples,
    small,
)
from compressed_tensors.quantization import QuantizationStatus
from models import small_mixtral
from pairwise import in_turns
from torch import Tensor, nn

from calipers import oneshot
from calipers.calibration.coverage import Coverage, no_tokens
from calipers.calibration.data import Batches
from calipers.calibration.pipelines import run_basic, run_sequential
from calipers.errors import CalipersWarning, UnseenModulesError
from calipers.observers import Observer
from calipers.recipes import load_recipe
from calipers.recipes.compiling import plan_for
from calipers.statistics.sums import SquareSums
from calipers.steps import IMatrixGatherer

RECIPE = """
modifiers:
  QuantizationModifier:
    targets: [Linear]
    ignore: ["re:.*lm_head", "re:.*shared_expert_gate"]
    unmatched: ignore
    weights: {num_bits: 8, strategy: channel}
    input_activations: {num_bits: 8, strategy: tensor, dynamic: false}
"""
EXPERTS = {"mixtral": {"num_local_experts": 6}, "qwen2_moe": {"num_experts": 6}}
IDLE, RARE = 4, 5
MARK = 63  # the token that goes to expert RARE
PROJECTIONS = ("gate_proj", "up_proj", "down_proj")
PREFIX = "model.layers.0.mlp.experts"


def routed(kind: str, **changes: Any) -> Any:
    """One layer in which nobody goes to expert IDLE, and only the token MARK to expert RARE.

    Experts 0 and 1, 2 and 3 have opposite scores: two of these four are positive. The score of
    IDLE is zero, that of RARE is the first channel, which attention leaves to the token itself.
    """
    model = small(kind, num_hidden_layers=1, **EXPERTS[kind], **changes)
    layer = model.model.layers[0]
    with torch.no_grad():
        layer.self_attn.o_proj.weight.zero_()
        model.model.embed_tokens.weight[:, 0] = 0
        model.model.embed_tokens.weight[MARK, 0] = 3
        scores = layer.mlp.gate.weight
        scores[:, 0] = 0
        scores[1], scores[3] = -scores[0], -scores[2]
        scores[IDLE] = 0
        scores[RARE] = 0
        scores[RARE, 0] = 8
    return model


def rows_without(token: int, count: int = 12) -> list[Tensor]:
    return [torch.where(row == token, 1, row) for row in samples(count)]


def hand_count(model: Any, batches: Batches) -> list[int]:
    """Tokens per expert of the first layer, from the input of the router and its weight."""
    router, counts = model.model.layers[0].mlp.gate, torch.zeros(6, dtype=torch.int64)
    seen: list[Tensor] = []
    handle = router.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    run(model, batches)
    handle.remove()
    for hidden, batch in zip(seen, batches, strict=True):
        scores = hidden.reshape(-1, 32) @ router.weight.T
        chosen = scores.argsort(dim=-1, descending=True)[:, :2]
        kept = chosen[batch["attention_mask"].bool().reshape(-1)]
        counts += torch.bincount(kept.reshape(-1), minlength=6)
    return counts.tolist()


def quietly(*args: Any, **kwargs: Any) -> Any:
    """Oneshot, which says that this is little data."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CalipersWarning)
        return oneshot(*args, **kwargs)


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("kind", EXPERTS)
def test_tokens_are_those_the_router_sends(kind: str, side: str) -> None:
    model, rows = routed(kind), [*rows_without(MARK), torch.tensor([MARK, 1, MARK])]
    batches = batches_of(rows, 4, side)
    counts = hand_count(model, batches)
    assert counts[IDLE] == 0
    assert counts[RARE] == 2
    assert sum(counts) == 2 * sum(map(len, rows))
    plan = plan_for(model, load_recipe(RECIPE))
    for pipeline in (run_basic, run_sequential):
        found = calibrated(model, plan, pipeline, batches, policy="weights_only").coverage
        for index, count in enumerate(counts):
            for projection in PROJECTIONS:
                assert found.tokens[f"{PREFIX}.{index}.{projection}"] == count
        assert found.tokens["model.layers.0.self_attn.q_proj"] == sum(map(len, rows))
        assert found.unseen == [f"{PREFIX}.{IDLE}.{each}" for each in PROJECTIONS]
        assert set(found.scarce) == {f"{PREFIX}.{RARE}.{each}" for each in PROJECTIONS}
        even = sum(counts) / 6
        assert found.scarce[f"{PREFIX}.{RARE}.up_proj"] == pytest.approx(2 / even)


def test_an_expert_of_padding_alone_saw_nothing() -> None:
    model, rows = routed("mixtral", pad_token_id=MARK), rows_without(MARK)
    batches = batches_of(rows, 4)
    for batch in batches.batches:
        batch["input_ids"][batch["attention_mask"] == 0] = MARK
    plan = plan_for(model, load_recipe(RECIPE))
    found = calibrated(model, plan, run_basic, batches, policy="weights_only").coverage
    assert {name.split(".")[5] for name in found.unseen} == {str(IDLE), str(RARE)}


# What is done about it


def test_the_default_is_an_error_with_names() -> None:
    model, rows = routed("mixtral"), rows_without(MARK)
    before = anatomy(model)
    names = [f"{PREFIX}.{i}.{each}" for i in (IDLE, RARE) for each in PROJECTIONS]
    message = (
        f"6 modules saw no tokens: {', '.join(names[:5])} and 1 more. Give more or other data, "
        "show all tokens to all experts (calibrate_all_experts=True), "
        "ignore these modules, or choose what to do without data: "
        "on_unseen='weights_only' (their activations stay as they are) or, for experts, "
        "on_unseen='peers' (the largest range among their siblings)."
    )
    with pytest.raises(UnseenModulesError, match=f"^{re.escape(message)}$") as caught:
        quietly(model, RECIPE, rows)
    assert list(caught.value.names) == names
    assert anatomy(model) == before


@pytest.mark.parametrize("kind", EXPERTS)
def test_weights_only(kind: str, tmp_path: Path) -> None:
    model, rows = routed(kind), [*rows_without(MARK), torch.tensor([MARK, 1])]
    out = tmp_path / "out"
    result = quietly(model, RECIPE, rows, on_unseen="weights_only", output_dir=out)
    unseen = [f"{PREFIX}.{IDLE}.{each}" for each in PROJECTIONS]
    for name in linears(result.model):
        module = result.model.get_submodule(name)
        if not hasattr(module, "quantization_scheme"):
            continue
        assert module.quantization_status == QuantizationStatus.FROZEN
        assert hasattr(module, "weight_scale")
        has_inputs = module.quantization_scheme.input_activations is not None
        assert has_inputs == hasattr(module, "input_scale") == (name not in unseen), name
    planned = {module.name: module.scheme for module in result.plan.modules}
    assert all(planned[name].input_activations is None for name in unseen)
    assert planned[f"{PREFIX}.0.up_proj"].input_activations is not None
    notes = json.loads((out / "calipers.json").read_text(encoding="utf-8"))["coverage"]
    assert notes["on_unseen"] == "weights_only"
    assert notes["unseen"] == unseen
    assert notes["applied"] == dict.fromkeys(unseen, "weights only")
    assert notes["tokens"] == result.coverage.tokens


@pytest.mark.parametrize(
    ("observer", "pipeline"),
    in_turns(["static_minmax", "minmax", "histogram_mse"], ["basic", "sequential"]),
)
def test_peers(observer: str, pipeline: Any) -> None:
    model, rows = routed("mixtral"), [*rows_without(MARK), torch.tensor([MARK, 1])]
    recipe = RECIPE.replace("dynamic: false", f"dynamic: false, observer: {observer}")
    result = quietly(model, recipe, rows, on_unseen="peers", pipeline=pipeline)
    for projection in PROJECTIONS:
        scales = [
            float(result.model.get_submodule(f"{PREFIX}.{index}.{projection}").input_scale)
            for index in range(6)
        ]
        largest = max(scale for i, scale in enumerate(scales) if i != IDLE)
        # Codes from -128 to 127 times a scale cover a range whose own scale is 128 / 127.5 of it.
        bound = 128 / 127.5 if observer == "histogram_mse" else 1
        assert largest <= scales[IDLE] <= largest * bound * (1 + 1e-6)
        assert len(set(scales)) > 2
    done = {f"{PREFIX}.{IDLE}.{each}": "largest range of its peers" for each in PROJECTIONS}
    assert result.coverage.applied == done


def test_peers_lend_their_importance() -> None:
    """Every token goes to two of the peers: together they have seen each one twice."""
    model, rows = routed("mixtral"), [*rows_without(MARK), torch.tensor([MARK, 1])]
    sums = SquareSums()
    router = model.model.layers[0].mlp.gate
    handle = router.register_forward_pre_hook(lambda _, args: sums.update(args[0].reshape(-1, 32)))
    run(model, batches_of(rows, 1))
    handle.remove()
    recipe = RECIPE.replace("8, strategy: channel}", "3, strategy: channel, observer: imatrix_mse}")
    result = quietly(model, recipe, rows, on_unseen="peers")
    idle = result.model.get_submodule(f"{PREFIX}.{IDLE}.up_proj")
    alone = Observer.load_from_registry(
        "imatrix_mse", base_name="weight", args=idle.quantization_scheme.weights
    )
    alone.inputs = sums
    alone(idle.weight)
    assert torch.equal(idle.weight_scale, alone.get_qparams()["scale"])
    assert result.coverage.tokens[f"{PREFIX}.{IDLE}.up_proj"] == 0


def test_what_is_left_for_later_is_what_was_seen() -> None:
    """Not what an expert that saw nothing was lent by its peers."""
    model, rows = routed("mixtral"), [*rows_without(MARK), torch.tensor([MARK, 1])]
    recipe = load_recipe(RECIPE.replace("channel}", "channel, observer: imatrix_mse}"))
    gatherer = IMatrixGatherer(ignore="re:.*lm_head")
    result = quietly(model, [gatherer, recipe], rows, on_unseen="peers")
    for index in range(6):
        expert = result.model.get_submodule(f"{PREFIX}.{index}.up_proj")
        assert hasattr(expert, "_imatrix_count") == (index != IDLE)


class Lonely(nn.Module):
    """Two projections, of which data reaches one."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        return self.used((input_ids * attention_mask)[..., None] * torch.ones(4))


@pytest.mark.parametrize(
    ("policy", "hint"),
    [
        ("error", "Give more or other data, show all tokens to all experts (calibrate_all_ex"),
        ("peers", "They have no siblings that saw any. Give more or other data, show all "),
    ],
)
def test_others_than_experts_have_no_peers(policy: Any, hint: str) -> None:
    model = Lonely()
    plan, batches = plan_of(model), batches_of(samples(3), 2)
    message = f"^1 module saw no tokens: unused. {re.escape(hint)}"
    with pytest.raises(UnseenModulesError, match=message):
        calibrated(model, plan, run_basic, batches, policy=policy)
    found = calibrated(model, plan, run_basic, batches, policy="weights_only")
    assert found.qparams.keys() == {("used", "input"), ("used", "weight"), ("unused", "weight")}
    assert found.coverage.applied == {"unused": "weights only"}


def test_nothing_to_fall_back_on() -> None:
    model = Lonely()
    plan, batches = plan_of(model, weights=None), batches_of(samples(3), 2)
    message = "saw no tokens: unused. They have no weights to fall back on. Give more or other data"
    with pytest.raises(UnseenModulesError, match=message):
        calibrated(model, plan, run_basic, batches, policy="weights_only")


def test_the_user_is_told() -> None:
    model, rows = routed("mixtral"), [*rows_without(MARK), torch.tensor([MARK, 1])]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        oneshot(model, RECIPE, rows, on_unseen="peers")
    said = [str(each.message) for each in caught if each.category is CalipersWarning]
    idle, rare = ([f"{PREFIX}.{i}.{each}" for each in PROJECTIONS] for i in (IDLE, RARE))
    unseen = f"3 modules saw no tokens (largest range of its peers): {', '.join(idle)}."
    scarce = (
        f"3 modules of experts saw less than 10% of an even share: {', '.join(rare)}. "
        "Give more data."
    )
    assert unseen in said
    assert scarce in said


# All experts


@pytest.mark.parametrize("kind", EXPERTS)
def test_all_experts_see_all_tokens(kind: str) -> None:
    model, rows = routed(kind), [*rows_without(MARK), torch.tensor([MARK, 1])]
    batches = batches_of(rows, 4)
    expected = run(model, batches)
    plan = plan_for(model, load_recipe(RECIPE), calibrate_all_experts=True)
    for logits, before in zip(run(model, batches), expected, strict=True):
        assert torch.allclose(logits, before, rtol=1e-5, atol=1e-5)
    found = calibrated(model, plan, run_basic, batches)
    assert set(found.coverage.tokens.values()) == {sum(map(len, rows))}
    assert not found.coverage.scarce
    same = calibrated(model, plan, run_basic, batches, share_inputs=False)
    assert same_qparams(found, same)
    scales = {float(found.qparams[f"{PREFIX}.{i}.up_proj", "input"]["scale"]) for i in range(6)}
    assert len(scales) == 1  # they all saw the same
    assert found.qparams[f"{PREFIX}.0.up_proj", "input"]["scale"] == layer_input(model, batches)


def layer_input(model: Any, batches: Batches) -> Tensor:
    """The scale of what goes into the experts, by hand."""
    seen: list[Tensor] = []
    handle = model.model.layers[0].mlp.register_forward_pre_hook(
        lambda _, args: seen.append(args[0])
    )
    run(model, batches)
    handle.remove()
    masks = [batch["attention_mask"].bool() for batch in batches]
    return max(x[mask].abs().max() for x, mask in zip(seen, masks, strict=True)) / 127.5


def test_oneshot_shows_all_tokens_to_all_experts() -> None:
    model, rows = routed("mixtral"), rows_without(MARK)
    result = quietly(model, RECIPE, rows, calibrate_all_experts=True)
    assert set(result.coverage.tokens.values()) == {sum(map(len, rows))}


# As plain data


def test_coverage_is_plain_data() -> None:
    tokens = {"experts.0.up": 90, "experts.1.up": 3, "experts.2.up": 0, "lm_head": 0}
    coverage = Coverage("peers", tokens, {"experts.2.up": "largest range of its peers"})
    assert json.loads(json.dumps(coverage.as_dict())) == {
        "on_unseen": "peers",
        "tokens": tokens,
        "unseen": ["experts.2.up", "lm_head"],
        "scarce_experts": {"experts.1.up": 3 / 31},
        "applied": {"experts.2.up": "largest range of its peers"},
    }
    assert coverage.siblings("experts.2.up") == ["experts.0.up", "experts.1.up"]
    assert coverage.siblings("experts.0.up") == ["experts.1.up"]
    assert coverage.siblings("lm_head") == []


def test_a_tenth_of_an_even_share_is_enough() -> None:
    tokens = {f"experts.{i}.up": 100 for i in range(9)} | {"experts.9.up": 10}
    assert Coverage(tokens=tokens).scarce == {}  # 10 of 91 is more than a tenth
    tokens["experts.9.up"] = 9
    assert list(Coverage(tokens=tokens).scarce) == ["experts.9.up"]


def test_after_a_real_run_too() -> None:
    model, batches = small("llama"), batches_of(samples(4), 2)
    found = calibrated(model, plan_of(model, states=STATIC), run_basic, batches)
    text = json.dumps(found.coverage.as_dict())
    assert json.loads(text)["tokens"] == found.coverage.tokens
    assert found.coverage.sentences() == []


# Modules that have seen nothing are noticed while the data runs

STATIC_RECIPE = """
modifiers:
  QuantizationModifier:
    ignore: [lm_head]
    weights: {num_bits: 8, strategy: channel}
    input_activations: {num_bits: 8, strategy: tensor}
"""


def warned(**options: Any) -> list[str]:
    """What is said of a layer with 8 experts and data of one token, which only 2 of them see."""
    torch.manual_seed(0)
    model = small_mixtral(num_hidden_layers=1, num_local_experts=8)
    data = torch.full((40, 8), 7)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", CalipersWarning)
        with suppress(UnseenModulesError):
            oneshot(model, STATIC_RECIPE, data, num_calibration_samples=40, **options)
    return [text for each in caught if "have seen no token" in (text := str(each.message))]


@pytest.mark.parametrize("pipeline", ["basic", "sequential"])
def test_a_warning_comes_after_a_tenth_of_the_data(pipeline: str) -> None:
    (told,) = warned(pipeline=pipeline)
    start, _, rest = told.partition(": ")
    assert start == "18 of 28 modules have seen no token in the first 4 of 40 batches"
    assert rest.endswith(
        "and 13 more. If that stays so, the run fails at its end. calibrate_all_experts=True shows "
        "all tokens to all experts; on_unseen='weights_only' or on_unseen='peers' does without."
    )


def test_whoever_has_chosen_what_to_do_is_not_told() -> None:
    assert warned(on_unseen="weights_only") == []
    assert warned(calibrate_all_experts=True) == []


def test_the_error_names_the_ways_out() -> None:
    message = str(no_tokens(["a.b"], "error"))
    assert "(calibrate_all_experts=True)" in message
    assert "on_unseen='weights_only'" in message
    assert "on_unseen='peers'" in message
