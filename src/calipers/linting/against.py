"""What has become of the weights of the original model."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from compressed_tensors.quantization import QuantizationArgs
from torch import Tensor

from calipers.checkpoint.headers import stored_tensors
from calipers.checkpoint.location import check_location
from calipers.checkpoint.stored_module import QuantizedWeight, StoredModule
from calipers.errors import ConfigurationError, cannot_load
from calipers.files.reading import read_json_object
from calipers.files.safetensors_header import StoredTensor
from calipers.judging.streams import Streams
from calipers.judging.weights import WeightLoss, stored_weight_loss, weight_loss
from calipers.kernels.reductions import extrema
from calipers.linting.results import Finding
from calipers.numerics.layout import Layout, has_global_scale
from calipers.numerics.qparams import safe_qparams
from calipers.observers import QParamsDict

_OTHER = "Give the model that the checkpoint was made from."


class Comparison(NamedTuple):
    """What a weight has lost: as it is stored, and with scales from its extrema."""

    stored: WeightLoss
    usual: WeightLoss


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

    def compare(self, module: StoredModule) -> Comparison | None:
        """Measure what quantization has done to a weight; None where it cannot be compared."""
        stored = self.weight(module)
        if stored is None or stored.dtype not in (torch.float32, torch.float16, torch.bfloat16):
            return None
        original = stored.map()
        loss = stored_loss(module, original)
        if loss is None:
            return None
        args, scale = module.weights, module.tensors.get("weight_global_scale")
        assert args is not None
        return Comparison(
            loss, _minmax_loss(original, args, None if scale is None else scale.map())
        )


def stored_loss(
    module: StoredModule, original: Tensor, streams: Streams | None = None
) -> WeightLoss | None:
    """Compare a weight with the one it was made from; None where their shapes differ.

    :param module: has sound tensors in a format that Calipers knows
    """
    if original.shape != module.shape or original.ndim != 2:
        return None
    weight = QuantizedWeight.of(module)
    pairs = ((original[rows], weight.rows(rows)) for rows in weight.tiles())
    return stored_weight_loss(pairs, original, streams)


def _minmax_loss(
    original: Tensor, args: QuantizationArgs, global_scale: Tensor | None
) -> WeightLoss:
    """Return what the weight loses by scales from its extrema."""
    found = extrema(Layout.of("weight", args).pieces(original))
    scale, zero_point = safe_qparams(found.min_vals, found.max_vals, args, global_scale)
    qparams: QParamsDict = {"scale": scale, "zero_point": zero_point, "global_scale": None}
    if has_global_scale(args):
        qparams["global_scale"] = global_scale
    return weight_loss(original, args, qparams)
