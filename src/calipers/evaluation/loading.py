"""Checkpoints as transformers computes them, and what is known to go wrong when it does."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from compressed_tensors.base import QUANTIZATION_METHOD
from compressed_tensors.utils import patch_attr
from torch import nn
from tqdm import tqdm

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


_WITH_BARS = (
    "compressed_tensors.compressors.model_compressors.model_compressor",
    "compressed_tensors.distributed.module_parallel",
    "compressed_tensors.offload.dispatch",
    "compressed_tensors.quantization.lifecycle.apply",
)


class _Hidden(tqdm):  # type: ignore[misc]
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **{**kwargs, "disable": True})


@contextmanager
def hide_library_bars() -> Iterator[None]:
    """Hide the bars of compressed-tensors, which it shows whether or not somebody looks."""
    with ExitStack() as stack:
        for name in _WITH_BARS:
            with suppress(ImportError):  # a file that another version does not have
                stack.enter_context(patch_attr(importlib.import_module(name), "tqdm", _Hidden))
        yield


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
        notes = []
        for problem in self.problems:
            if problem.loads_as is None:
                computed = "Its scores are those of what transformers computes instead."
                notes.append(f"{problem} {computed}")
            else:
                dtype = str(problem.loads_as).removeprefix("torch.")
                notes.append(f"It is loaded as {dtype}: {problem.cause}.")
        return tuple(notes)

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


def find_checkpoint(name: str, source: Source, *, trust_remote_code: bool = False) -> Checkpoint:
    """Look at the config of a checkpoint: whether it is there, and what goes wrong with it."""
    if not isinstance(source, (str, Path)):
        return Checkpoint(name, source, source.config)
    model = load_skeleton(source, trust_remote_code=trust_remote_code, quantized=True)
    settings = getattr(model.config, "quantization_config", None)
    if not isinstance(settings, dict) or settings.get("quant_method") != QUANTIZATION_METHOD:
        return Checkpoint(name, source, model.config)
    config = parse_settings(settings)
    with suppress(FusedExpertsError):  # nobody can quantize these one by one
        unfuse_experts(model)
    kinds = (nn.Linear, nn.Embedding)
    modules = {own: module for own, module in model.named_modules() if isinstance(module, kinds)}
    stored = stored_module_names(model, modules)
    for own, module in modules.items():
        group = group_of(module, (stored[own], own), config)
        if group is not None:
            module.quantization_scheme = config.config_groups[group]
    return Checkpoint(name, source, model.config, tuple(loading_problems(model)))
