"""Small models, plans for them, and activations captured by hooks of our own."""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from models import random_model
from torch import Tensor, nn
from transformers import (
    Gemma3TextConfig,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    Qwen2Config,
    Qwen2MoeConfig,
)

from calipers.calibration.context import Calibration
from calipers.calibration.coverage import Coverage
from calipers.calibration.data import Batches
from calipers.calibration.pipelines import Parts, Run
from calipers.engine.loop import ModelSink, SolvedModel, StepDriver, run_parts
from calipers.observers.spec import RANGE
from calipers.options import OnUnseen
from calipers.planning.plan import Changes, Plan, QParams
from calipers.planning.specs import ModuleSpec, tensor_specs
from calipers.runtime.progress import Progress
from calipers.runtime.ranks import SingleProcess
from calipers.steps import IMatrixGatherer, QuantizationModifier

SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}
MOE = {"num_experts": 4, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32}
CONFIGS: dict[str, tuple[type, dict[str, Any]]] = {
    "llama": (LlamaConfig, {}),
    "qwen2": (Qwen2Config, {}),
    "mistral": (MistralConfig, {"sliding_window": 4}),
    "gemma3": (
        Gemma3TextConfig,
        {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 4},
    ),
    "mixtral": (MixtralConfig, {"num_local_experts": 4}),
    "qwen2_moe": (Qwen2MoeConfig, {**MOE, "num_experts_per_tok": 2}),
}
STATIC = QuantizationArgs(num_bits=8, strategy="tensor", dynamic=False)
CHANNEL = QuantizationArgs(num_bits=8, strategy="channel")


def small(kind: str, **changes: Any) -> Any:
    """A random model whose activations are neither tiny nor centred."""
    kind_of_config, options = CONFIGS[kind]
    return random_model(kind_of_config(**{**SIZES, **options, **changes}), spread=0.2)


def samples(count: int, seed: int = 0) -> list[Tensor]:
    """Token ids of different lengths."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(3, 12, (count,), generator=generator).tolist()
    return [torch.randint(1, 64, (length,), generator=generator) for length in lengths]


def joined(rows: Sequence[Tensor], side: str = "right", pad: float = 0) -> dict[str, Tensor]:
    """Rows of different lengths as one batch, and the mask of what is not padding."""
    longest = max(map(len, rows))
    shape = (len(rows), longest, *rows[0].shape[1:])
    filled = torch.full(shape, pad, dtype=rows[0].dtype)
    mask = torch.zeros(shape[:2], dtype=torch.int64)
    for index, row in enumerate(rows):
        place = slice(longest - len(row), None) if side == "left" else slice(len(row))
        filled[index, place], mask[index, place] = row, 1
    return {"input_ids": filled, "attention_mask": mask}


def batches_of(rows: Sequence[Tensor], size: int, side: str = "right") -> Batches:
    parts = [rows[start : start + size] for start in range(0, len(rows), size)]
    return Batches(tuple(joined(part, side) for part in parts))


def linears(model: nn.Module) -> list[str]:
    return [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]


def attentions(model: nn.Module) -> list[str]:
    return [name for name, _ in model.named_modules() if name.endswith("self_attn")]


def plan_of(
    model: nn.Module,
    *,
    weights: QuantizationArgs | None = CHANNEL,
    inputs: QuantizationArgs | None = STATIC,
    outputs: QuantizationArgs | None = None,
    states: QuantizationArgs | None = None,
    kind: Any = "attention",
    gathered: Sequence[str] = (),
) -> Plan:
    """Every Linear and, with ``states``, every attention."""
    scheme = QuantizationScheme(
        targets=["Linear"], weights=weights, input_activations=inputs, output_activations=outputs
    )
    planned = specs(model, linears(model), scheme)
    if states is not None:
        of_states = QuantizationScheme(targets=["Attention"], input_activations=states)
        planned += specs(model, attentions(model), of_states, kind)
    gatherer = IMatrixGatherer(targets=list(gathered) or "Linear")
    measured = gatherer.plan(model, "gatherer").measured if gathered else {}
    steps = {"": QuantizationModifier(scheme="W8A8"), "gatherer": gatherer}
    return Plan(tuple(planned), measured, steps)


def specs(
    model: nn.Module, names: Sequence[str], scheme: QuantizationScheme, kind: Any = "linear"
) -> list[ModuleSpec]:
    tensors = tensor_specs(scheme, kind)
    columns = [getattr(model.get_submodule(name), "in_features", None) for name in names]
    pairs = zip(names, columns, strict=True)
    return [ModuleSpec(name, scheme, tensors, kind, column) for name, column in pairs]


@dataclass
class Calibrated(SolvedModel):
    """What a pipeline finds, and what becomes of the model."""

    changes: Changes = field(default_factory=Changes)

    @property
    def qparams(self) -> QParams:
        return self.changes.qparams


def calibrated(
    model: nn.Module,
    plan: Plan,
    pipeline: Callable[..., Parts],
    *data: Any,
    policy: OnUnseen = "error",
    **options: Any,
) -> Calibrated:
    """What a pipeline finds."""
    with Calibration(model, plan, **options) as calibration:
        return solved(calibration, pipeline(run_of(calibration), *data), policy)


def run_of(calibration: Calibration) -> Run:
    return Run(calibration, SingleProcess(), Progress(False), torch.device("cpu"))


def solved(calibration: Calibration, parts: Parts, policy: OnUnseen = "error") -> Calibrated:
    """Solve parts from what was measured of them."""
    ranks, bars = SingleProcess(), Progress(False)
    solution = Calibrated(calibration.plan, Coverage(policy))
    driver = StepDriver(calibration.model, calibration.measurements, solution, ranks, bars)
    sink = ModelSink(driver)
    for _ in run_parts(parts, sink):
        pass
    solution.changes = sink.changes
    return solution


def observer(calibration: Calibration, name: str, base_name: str) -> Any:
    """The statistic that the range of an activation comes from."""
    return calibration.measurements.get(name, base_name, RANGE)


def show(
    calibration: Calibration,
    name: str,
    base_name: str,
    tensor: Tensor,
    mask: Tensor | None = None,
) -> None:
    """Show an activation to all its statistics, without running the module."""
    for statistic in calibration.measurements.tensors()[name, base_name].values():
        statistic.update(tensor, mask)


@contextlib.contextmanager
def captured(model: nn.Module) -> Iterator[tuple[dict[str, list[Tensor]], dict[str, list[Tensor]]]]:
    """Inputs and outputs of each Linear, in the order they were computed."""
    inputs, outputs = defaultdict(list), defaultdict(list)
    handles = []
    for name in linears(model):

        def hook(_: nn.Module, args: Any, output: Tensor, name: str = name) -> None:
            inputs[name].append(args[0].detach().clone())
            outputs[name].append(output.detach().clone())

        handles.append(model.get_submodule(name).register_forward_hook(hook))
    yield inputs, outputs
    for handle in handles:
        handle.remove()


def run(model: Any, batches: Batches) -> list[Tensor]:
    """The logits of each batch."""
    with torch.no_grad():
        return [model(**batch, use_cache=False).logits for batch in batches]


def anatomy(model: nn.Module) -> dict[str, Any]:
    """Everything there is of a model: which objects, under which names, in which order."""
    found: dict[str, Any] = {}
    for name, module in model.named_modules():
        for key, value in vars(module).items():
            found[f"{name}|{key}"] = id(value)
            if isinstance(value, dict):
                found[f"{name}|{key}|items"] = [(k, id(v)) for k, v in value.items()]
            elif isinstance(value, (set, list)):
                found[f"{name}|{key}|items"] = [id(item) for item in value]
    return found


def contents(model: nn.Module) -> dict[str, Tensor]:
    """Copies of the tensors of a model."""
    return {name: value.clone() for name, value in model.state_dict().items()}


def same_qparams(first: Calibrated, second: Calibrated) -> bool:
    """Whether two runs found the same parameters, bit by bit."""
    one, two = first.changes.qparams, second.changes.qparams
    if one.keys() != two.keys() or not one:
        return False
    return all(
        (value is None and other is None) or torch.equal(value, other)
        for key, found in one.items()
        for value, other in zip(found.values(), two[key].values(), strict=True)
    )


def heads(states: Sequence[Tensor]) -> list[Tensor]:
    """Projections as (batch, heads, sequence, dim)."""
    return [each.unflatten(-1, (-1, 8)).transpose(1, 2) for each in states]
