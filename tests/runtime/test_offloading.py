"""Models that accelerate has offloaded give what they would give in memory, and stay offloaded."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from calibrating import anatomy
from families import build, logits_of, saved, token_ids
from measuring import assert_same
from pairwise import in_turns
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

import calipers
from calipers.errors import ConfigurationError, TensorValueError

accelerate = pytest.importorskip("accelerate", reason="accelerate, which offloads, is missing")
pytestmark = pytest.mark.filterwarnings("ignore::calipers.errors.CalipersWarning")

DATA = token_ids(6, 16)
Q = "model.layers.0.self_attn.q_proj"


def on_cpu(folder: Path) -> Any:
    return accelerate.cpu_offload(AutoModelForCausalLM.from_pretrained(folder))


def on_cpu_with_buffers(folder: Path) -> Any:
    return accelerate.cpu_offload(
        AutoModelForCausalLM.from_pretrained(folder), offload_buffers=True
    )


def in_own_files(folder: Path) -> Any:
    """Each tensor in a file of accelerate's, of no format that others know."""
    model = AutoModelForCausalLM.from_pretrained(folder)
    return accelerate.disk_offload(model, offload_dir=folder / "offloaded")


def in_files_of_the_model(folder: Path) -> Any:
    places = dict.fromkeys(
        ("model.embed_tokens", "model.norm", "model.rotary_emb", "lm_head"), "cpu"
    )
    return AutoModelForCausalLM.from_pretrained(
        folder,
        device_map={**places, "model.layers.0": "disk", "model.layers.1": "cpu"},
        offload_folder=folder / "offloaded",
    )


def all_in_files_of_the_model(folder: Path) -> Any:
    options = {"device_map": {"": "disk"}, "offload_folder": folder / "offloaded"}
    return AutoModelForCausalLM.from_pretrained(folder, **options)


WAYS = [on_cpu, on_cpu_with_buffers, in_own_files, in_files_of_the_model, all_in_files_of_the_model]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return saved(build("llama tied"), tmp_path / "model")


@pytest.mark.parametrize(
    ("load", "pipeline", "dtype"),
    in_turns(WAYS, ["basic", "sequential"], ["bfloat16", "float32"]),
)
def test_they_are_measured_and_left_as_they_were(
    load: Callable[..., Any], pipeline: Any, dtype: str, folder: Path
) -> None:
    plain, model = AutoModelForCausalLM.from_pretrained(folder), load(folder)
    logits, before = logits_of(model), anatomy(model)
    options = {"batch_size": 2, "collect": "hessian", "progress": False}
    wanted = calipers.measure(plain, DATA, pipeline=pipeline, **options)
    assert_same(calipers.measure(model, DATA, pipeline=pipeline, **options), wanted)
    assert anatomy(model) == before
    scores = [
        calipers.evaluate(each, {"again": each}, DATA, dtype=dtype, progress=False).as_dict()
        for each in (model, plain)
    ]
    assert scores[0] == scores[1]
    assert anatomy(model) == before
    assert model.get_submodule(Q).weight.is_meta
    assert torch.equal(logits_of(model), logits)


BASIC = ("FP8", {"pipeline": "basic"})
SEQUENTIAL = ("FP8", {"pipeline": "sequential", "dtype": "bfloat16"})
GPTQ = ("W4A16", {"method": "gptq", "group_size": 32})


@pytest.mark.parametrize(
    ("load", "how"),
    [
        (on_cpu, BASIC),
        (on_cpu, GPTQ),
        (on_cpu_with_buffers, SEQUENTIAL),
        (in_own_files, BASIC),
        (in_files_of_the_model, BASIC),
        (in_files_of_the_model, GPTQ),
        (all_in_files_of_the_model, SEQUENTIAL),
    ],
)
def test_they_are_quantized_and_stay_offloaded(
    load: Callable[..., Any], how: tuple[str, Any], folder: Path, tmp_path: Path
) -> None:
    plain, model = AutoModelForCausalLM.from_pretrained(folder), load(folder)
    for name, each in (("wanted", plain), ("found", model)):
        each.config._name_or_path = ""
        calipers.oneshot(each, how[0], DATA, output_dir=tmp_path / name, progress=False, **how[1])
    wanted, found = (load_file(tmp_path / n / "model.safetensors") for n in ("wanted", "found"))
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in wanted.items())
    module = model.get_submodule(Q)
    assert module.weight.is_meta
    assert module.weight_scale.is_meta
    assert torch.equal(logits_of(model), logits_of(plain))
    assert module.weight.is_meta
    # What accelerate has stored is as it was.
    assert torch.equal(logits_of(load(folder)), logits_of(build("llama tied")))


@pytest.mark.parametrize("load", [on_cpu, all_in_files_of_the_model])
def test_an_error_leaves_them_as_they_were(load: Callable[..., Any], folder: Path) -> None:
    model = load(folder)
    logits, before = logits_of(model), anatomy(model)
    with torch.no_grad():
        handle = model.get_submodule("model.layers.1.mlp").register_forward_pre_hook(
            lambda _, args: (args[0] * torch.inf,)
        )
    with pytest.raises(TensorValueError):
        calipers.oneshot(model, "FP8", DATA, progress=False)
    handle.remove()
    assert anatomy(model) == before
    assert torch.equal(logits_of(model), logits)


def test_accelerate_can_load_them_for_good(folder: Path) -> None:
    plain, model = AutoModelForCausalLM.from_pretrained(folder), on_cpu(folder)
    for each in (plain, model):
        calipers.oneshot(each, "W4A16", DATA, method="gptq", group_size=32, progress=False)
    accelerate.hooks.remove_hook_from_submodules(model)
    assert model.get_submodule(Q).weight_scale.device.type == "cpu"
    assert torch.equal(logits_of(model), logits_of(plain))


def test_modules_that_are_offloaded_with_their_parts_are_refused(folder: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder)
    accelerate.cpu_offload(model, preload_module_classes=["LlamaMLP"])
    text = r"^LlamaMLP was offloaded as one, with all that is in it \('model\.layers\.0\.mlp'\)"
    with pytest.raises(ConfigurationError, match=text):
        calipers.measure(model, DATA, progress=False)
