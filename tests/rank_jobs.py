"""What the processes of calibration/test_distributed.py do if all is well; imported by name."""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import models
import torch
from rank_processes import distributed_rank

import calipers.engine.oneshot
from calipers.engine.oneshot import oneshot
from calipers.errors import CalipersWarning
from calipers.steps import quantization

LONG = timedelta(seconds=60)  # nobody is missing: no process may wait in vain
INT8 = {"num_bits": 8, "type": "int", "strategy": "tensor", "symmetric": True, "dynamic": False}


def recipe(**options: Any) -> dict[str, Any]:
    return {"modifiers": {"QuantizationModifier": {"ignore": ["lm_head"], **options}}}


def w8a8(observer: str, **options: Any) -> dict[str, Any]:
    weights = INT8 | {"strategy": "channel"}
    return recipe(weights=weights, input_activations=INT8 | {"observer": observer}, **options)


RECIPES = {
    "W8A8 static_minmax": w8a8("static_minmax"),
    "W8A8 histogram_mse": w8a8("histogram_mse", targets=["re:.*o_proj", "re:.*down_proj"]),
    "W8A8 percentile": w8a8("percentile"),
    "FP8": recipe(
        scheme="FP8", kv_cache_scheme={"num_bits": 8, "type": "float", "strategy": "tensor"}
    ),
    "NVFP4": recipe(scheme="NVFP4"),
    "W4A16 optimal": recipe(
        scheme={"W4A16": ["Linear"]}, weight_observer={"name": "optimal", "importance": "none"}
    ),
    "W4A16 optimal imatrix": recipe(scheme={"W4A16": ["Linear"]}, weight_observer="optimal"),
    "W4A16 gptq": {
        "modifiers": {
            "GPTQModifier": {
                "scheme": "W4A16",
                "ignore": ["lm_head"],
                "weight_observer": "memoryless_mse",  # whose scales have nothing to do with sums
                "error_propagation": "float",
            }
        }
    },
}
AVERAGING = {name: w8a8(name) for name in ("minmax", "mse", "memoryless_minmax")}


# Models and data


def llama(dtype: torch.dtype = torch.float64) -> Any:
    torch.manual_seed(0)
    return models.small_llama(hidden_size=128).to(dtype).eval()


def llama_for(name: str) -> Any:
    """Sums over squares of bfloat16 are exact, so that "equal" can mean equal."""
    return llama(torch.bfloat16 if "imatrix" in name else torch.float64)


def texts(count: int, length: int = 16) -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    return torch.randint(0, 90, (count, length), generator=generator).tolist()


def routed_mixtral() -> Any:
    """A model whose router sends token ``t`` to expert ``t % 4``, and to no other."""
    torch.manual_seed(0)
    model: Any = models.small_mixtral(num_experts_per_tok=1, num_hidden_layers=1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter) / 8)
        layer = model.model.layers[0]
        layer.self_attn.o_proj.weight.zero_()
        layer.post_attention_layernorm.weight.fill_(1)
        layer.mlp.gate.weight.zero_()
        for token in range(96):
            model.model.embed_tokens.weight[token, :4] = 0
            model.model.embed_tokens.weight[token, token % 4] = 20
        for expert in range(4):
            layer.mlp.gate.weight[expert, expert] = 1
    return model.double().eval()


def routed_texts(*experts: int) -> list[list[int]]:
    """One sample for each: all of its tokens go to that expert."""
    samples = texts(len(experts))
    return [
        [token // 4 * 4 + expert for token in sample]
        for sample, expert in zip(samples, experts, strict=True)
    ]


# One job


def quantize(
    how: Any,
    model: Any = None,
    data: Any = None,
    *,
    timeout: timedelta = LONG,
    **options: Any,
) -> Any:
    model = llama() if model is None else model
    data = texts(7) if data is None else data
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", "(The data has|.* static ranges)", CalipersWarning)
        warnings.filterwarnings("ignore", ".*saw (no|less)", CalipersWarning)
        warnings.filterwarnings("ignore", ".*static activations? loses? more", CalipersWarning)
        return oneshot(model, how, data, shuffle=False, timeout=timeout, progress=False, **options)


def found(result: Any) -> dict[str, Any]:
    """Everything that must not depend on the number of processes."""
    parameters = {
        name: tensor.clone()
        for name, tensor in result.model.state_dict().items()
        if name.rsplit(".", 1)[1].endswith(("_scale", "_zero_point"))
    }
    coverage = result.coverage
    return {
        "parameters": parameters,
        "tokens": coverage.tokens,
        "applied": coverage.applied,
        "errors": dict(result.errors),
        "costs": dict(result.costs),
        "rows": result.plan.rows(),
    }


def outcome(act: Callable[[], Any]) -> dict[str, Any]:
    """What became of a call: its result, or the error."""
    try:
        return {"result": act(), "error": None, "text": ""}
    except Exception as error:
        return {"result": None, "error": type(error).__name__, "text": str(error)}


# What several processes do one after the other; what they return is compared.


def observers_of_all_kinds(_folder: Path) -> Any:
    return {
        (name, pipeline): found(quantize(how, llama_for(name), pipeline=pipeline))
        for name, how in (RECIPES | AVERAGING).items()
        for pipeline in ("basic", "sequential")
    }


def layers_on_quantized_ones(_folder: Path) -> Any:
    weights = {"num_bits": 4, "strategy": "channel", "observer": "memoryless_mse"}
    how = {"weights": weights, "targets": ["re:.*_proj"]}
    made = {
        "llama": (llama(), texts(7)),
        "mixtral": (routed_mixtral(), routed_texts(*4 * (0, 1, 2, 3))),
    }
    results = {
        name: quantize({"modifiers": {"GPTQModifier": how}}, model, data)
        for name, (model, data) in made.items()
    }
    return {
        name: {"weights": dict(result.model.state_dict()), "errors": dict(result.errors)}
        for name, result in results.items()
    }


def tuned_as_a_whole(_folder: Path) -> Any:
    weights = {"num_bits": 3, "strategy": "group", "group_size": 32}
    steps = recipe(weights=weights)["modifiers"]
    steps["TuningModifier"] = {"epochs": 3, "lr": 3e-3}
    model = llama(torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.mul_(6) if "norm" not in name else None
    result = quantize({"modifiers": steps}, model)
    return {"weights": dict(result.model.state_dict()), "figures": result.figures}


def fewer_samples_than_processes(_folder: Path) -> Any:
    return {
        pipeline: found(quantize(RECIPES["FP8"], data=texts(2), pipeline=pipeline))
        for pipeline in ("basic", "sequential")
    }


def experts_here_and_there(_folder: Path) -> Any:
    data = routed_texts(0, 1, 2, 3)
    return {
        (name, pipeline): found(quantize(RECIPES[name], routed_mixtral(), data, pipeline=pipeline))
        for name in ("FP8", "NVFP4", "W8A8 percentile")
        for pipeline in ("basic", "sequential")
    }


def experts_nobody_sees(_folder: Path) -> Any:
    data = routed_texts(0, 1, 2)
    return {
        (name, policy): outcome(
            lambda how=how, policy=policy: found(
                quantize(how, routed_mixtral(), data, on_unseen=policy)
            )
        )
        for name, how in {
            "static_minmax": w8a8("static_minmax"),
            "memoryless_minmax": w8a8("memoryless_minmax"),
        }.items()
        for policy in ("error", "weights_only", "peers")
    }


def one_writer(folder: Path) -> Any:
    written = []

    def count(*args: Any, **kwargs: Any) -> Any:
        written.append(os.getpid())
        return write(*args, **kwargs)

    write = calipers.engine.oneshot.write_checkpoint
    target = folder / "checkpoint"
    with mock.patch.object(calipers.engine.oneshot, "write_checkpoint", count):
        result = quantize(RECIPES["FP8"], output_dir=target)
    notes = json.loads((target / "calipers.json").read_text())
    seen = {"samples": notes["samples"], "tokens": notes["tokens"]}
    again = outcome(lambda: quantize(RECIPES["FP8"], output_dir=target))
    files = sorted(path.name for path in folder.iterdir() if not path.name.startswith("store"))
    return {
        "written": len(written),
        "output_dir": result.output_dir == target,
        "notes": seen,
        "again": again,
        "files": [name for name in files if not name.endswith(".pt")],
    }


def solving_in_parts(_folder: Path) -> Any:
    """Which weights this process looked at."""
    looked_at: dict[str, list[list[str]]] = {}
    real = quantization.solve_group
    for name in ("NVFP4", "W8A8 static_minmax", "W4A16 optimal"):

        def note(layer: Any, weights: Any, inputs: Any, name: str = name) -> Any:
            looked_at.setdefault(name, []).append([module.name for module in weights])
            return real(layer, weights, inputs)

        with mock.patch.object(quantization, "solve_group", note):
            quantize(RECIPES[name], llama())
    return looked_at


def sums_of_an_earlier_run(_folder: Path) -> Any:
    """What all processes have been left, and what each has a part of."""
    model, how = llama(torch.bfloat16), RECIPES["W4A16 optimal imatrix"]
    quantize({"modifiers": {"IMatrixGatherer": {"ignore": ["lm_head"]}}}, model)
    parts, own = llama(torch.bfloat16), distributed_rank() + 1
    for module in parts.model.modules():
        if isinstance(module, torch.nn.Linear):
            total = torch.full((module.in_features,), float(own), dtype=torch.float64)
            vars(module).update(_imatrix_sum=total, _imatrix_count=torch.tensor(own))
    return {"same": found(quantize(how, model)), "parts": found(quantize(how, parts))}


JOBS = [
    observers_of_all_kinds,
    layers_on_quantized_ones,
    tuned_as_a_whole,
    fewer_samples_than_processes,
    experts_here_and_there,
    experts_nobody_sees,
    one_writer,
    solving_in_parts,
    sums_of_an_earlier_run,
]
