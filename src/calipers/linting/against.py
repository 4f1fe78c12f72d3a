"""What has become of the weights of the original model."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from compressed_tensors.quantization import QuantizationArgs
from torch import Tensor

from calipers.checkpoint.headers import stored_tensors
from calipers.checkpoint.location import check_location
from calipers.checkpoint.quantized_weight import QuantizedWeight
from calipers.checkpoint.stored_module import StoredModule
from calipers.errors import ConfigurationError, cannot_load
from calipers.files.json_files import read_json_object
from calipers.files.safetensors_header import StoredTensor
from calipers.kernels.extrema import extrema
from calipers.kernels.quantize import quantization_errors
from calipers.linting.results import Finding
from calipers.numerics.layout import Layout, has_global_scale, strategy_name
from calipers.numerics.qparams import safe_qparams

_OTHER = "Give the model that the checkpoint was made from."


class Loss(NamedTuple):
    """‖Q(W) − W‖ / ‖W‖ of a weight: as it is stored, and with scales from its extrema."""

    error: float
    usual: float


@dataclass(frozen=True)
class Original:
    """The tensors of the model that a checkpoint was made from."""

    folder: Path
    tensors: Mapping[str, StoredTensor]

    @classmethod
    def open(cls, folder: Path) -> Original:
        """Read the headers of its files; refuse what is no model, or quantized itself."""
        check_location(str(folder))
        if not folder.is_dir():
            raise cannot_load(str(folder), "there is no such folder")
        if read_json_object(folder / "config.json").get("quantization_config") is not None:
            raise ConfigurationError(
                "is quantized itself: its config has a quantization_config",
                subject=f"The model '{folder}'",
                hint=_OTHER,
            )
        tensors = stored_tensors(folder)
        if not tensors:
            raise cannot_load(str(folder), "there are no safetensors in it")
        return cls(folder, tensors)

    def weight(self, module: StoredModule) -> StoredTensor | None:
        """Return the weight of a module; a head that has none of its own is the embedding."""
        found = self.tensors.get(f"{module.name}.weight")
        if found is None and module.name.endswith("lm_head"):
            names = (n for n in self.tensors if n.endswith(("embed_tokens.weight", "wte.weight")))
            found = next((self.tensors[name] for name in names), None)
        return found

    def unlike(self, modules: Iterable[StoredModule]) -> Iterator[Finding]:
        """Find weights that the original does not have, or has in another shape."""
        for module in modules:
            shape = module.shape if module.weights is not None else None
            if shape is None:
                continue
            found = self.weight(module)
            problem = ""
            if found is None:
                problem = f"has a weight, and '{self.folder}' has none of that name"
            elif found.shape != shape:
                problem = (
                    f"has a weight of shape {shape}, and that of the original is {found.shape}"
                )
            if problem:
                yield Finding("error", "other-model", module.name, problem, _OTHER)

    def loss_of(self, module: StoredModule) -> Loss | None:
        """Measure what quantization has done to a weight; None where it cannot be compared."""
        stored, shape = self.weight(module), module.shape
        if stored is None or stored.shape != shape or len(stored.shape) != 2:
            return None
        if stored.dtype not in (torch.float32, torch.float16, torch.bfloat16):
            return None
        return _loss(QuantizedWeight.of(module), stored.map())


def _loss(weight: QuantizedWeight, original: Tensor) -> Loss:
    """Go through the rows of a weight, some at a time."""
    lost, usual, whole = 0.0, 0.0, 0.0
    args = weight.args
    extremes = _extrema_of_all(original) if strategy_name(args) == "tensor" else None
    for rows in weight.tiles():
        part = original[rows]
        values = weight.rows(rows).float()
        as_floats = part.float()
        whole += float(as_floats.pow(2).sum(dtype=torch.float64))
        lost += float(values.sub_(as_floats).pow_(2).sum(dtype=torch.float64))
        usual += _usual_loss(part, args, weight.global_scale, extremes)
    if not math.isfinite(lost) or not whole:
        return Loss(math.inf if lost or not math.isfinite(lost) else 0.0, 0.0)
    return Loss(math.sqrt(lost / whole), math.sqrt(usual / whole))


def _extrema_of_all(original: Tensor) -> tuple[Tensor, Tensor]:
    found = extrema(original[None, None])
    return found.min_vals, found.max_vals


def _usual_loss(
    part: Tensor,
    args: QuantizationArgs,
    global_scale: Tensor | None,
    extremes: tuple[Tensor, Tensor] | None,
) -> float:
    """Return the squared error of some rows whose scales come from their extrema."""
    pieces = Layout.of("weight", args).pieces(part)
    low, high = extremes or extrema(pieces)[:2]
    scale, zero_point = safe_qparams(low, high, args, global_scale)
    if has_global_scale(args) and global_scale is not None:
        scale = scale.float() / global_scale.float()
    return float(quantization_errors(pieces, scale, zero_point, args).sum())
