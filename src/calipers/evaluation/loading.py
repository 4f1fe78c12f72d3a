"""Checkpoints as transformers computes them, and what is known to go wrong when it does."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

import torch
from compressed_tensors.base import QUANTIZATION_METHOD
from compressed_tensors.quantization import QuantizationConfig, QuantizationScheme
from torch import nn

from calipers.checkpoint.config import LoadingProblem, group_of, loading_problems
from calipers.checkpoint.quantized import parse_settings
from calipers.checkpoint.reader import load_model, load_skeleton
from calipers.checkpoint.state import stored_module_names
from calipers.errors import (
    CalipersWarning,
    FusedExpertsError,
    ModelRunError,
    TensorValueError,
)
from calipers.topology.experts import unfuse_experts

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

    Source: TypeAlias = PreTrainedModel | str | Path


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint that is to be judged, of which no weight is loaded yet.

    :param problems: what goes wrong when transformers loads it
    """

    name: str
    source: Source
    config: PreTrainedConfig
    problems: tuple[LoadingProblem, ...] = ()

    @property
    def notes(self) -> tuple[str, ...]:
        """What a reader of its scores must know."""
        return tuple(self._note(problem) for problem in self.problems)

    @property
    def reliable(self) -> bool:
        """Whether transformers computes what the checkpoint says."""
        return all(problem.loads_as for problem in self.problems)

    def load(self, *, trust_remote_code: bool = False) -> PreTrainedModel:
        """Load it, and tell of what goes wrong."""
        for note in self.notes:
            warnings.warn(f"'{self.name}': {note}", CalipersWarning, stacklevel=4)
        dtypes = [problem.loads_as for problem in self.problems if problem.loads_as]
        return load_model(
            self.source,
            trust_remote_code=trust_remote_code,
            quantized=True,
            dtype=dtypes[0] if dtypes else None,
        )

    @contextmanager
    def failures_explained(self) -> Iterator[None]:
        """Say of a failure that was to be expected that it was."""
        try:
            yield
        except Exception as error:
            if not self.problems or isinstance(error, TensorValueError):
                raise
            what = f"{type(error).__name__}: {error}".rstrip(".")
            raise ModelRunError(
                f"transformers fails on '{self.name}' ({what}), as was to be expected: "
                f"{' '.join(self.notes)}",
                hint="Judge it with a client that reads it, or quantize the model in another "
                "format.",
            ) from error

    def _note(self, problem: LoadingProblem) -> str:
        if problem.loads_as is None:
            return f"{problem} Its scores are those of what transformers computes instead."
        return f"It is loaded as {_name(problem.loads_as)}: {problem.cause}."


def find_checkpoint(name: str, source: Source, *, trust_remote_code: bool = False) -> Checkpoint:
    """Look at the config of a checkpoint: whether it is there, and what goes wrong with it."""
    if not isinstance(source, (str, Path)):
        return Checkpoint(name, source, source.config)
    model = load_skeleton(source, trust_remote_code=trust_remote_code, quantized=True)
    config = _quantization(model.config)
    if config is None:
        return Checkpoint(name, source, model.config)
    with suppress(FusedExpertsError):  # nobody can quantize these one by one
        unfuse_experts(model)
    for module, scheme in _schemes(model, config):
        module.quantization_scheme = scheme
    return Checkpoint(name, source, model.config, tuple(loading_problems(model)))


def _quantization(config: PreTrainedConfig) -> QuantizationConfig | None:
    """Return how a checkpoint is quantized, if it is by compressed-tensors."""
    found = getattr(config, "quantization_config", None)
    if not isinstance(found, dict) or found.get("quant_method") != QUANTIZATION_METHOD:
        return None
    return parse_settings(found)


def _schemes(
    model: PreTrainedModel, config: QuantizationConfig
) -> Iterator[tuple[nn.Module, QuantizationScheme]]:
    """Give each module with the scheme that the config has for it."""
    kinds = (nn.Linear, nn.Embedding)
    modules = {name: module for name, module in model.named_modules() if isinstance(module, kinds)}
    stored = stored_module_names(model, modules)
    for name, module in modules.items():
        group = group_of(module, (stored[name], name), config)
        if group is not None:
            yield module, config.config_groups[group]


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
