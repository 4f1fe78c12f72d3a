"""What has become of the weights of the original model."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from compressed_tensors.quantization import QuantizationArgs, QuantizationType
from torch import Tensor

from calipers.checkpoint.stored_module import QuantizedWeight, StoredModule
from calipers.checkpoint.stored_weights import OriginalModel
from calipers.judging.weights import Streams, WeightLoss, stored_weight_loss, weight_loss
from calipers.kernels.reductions import extrema
from calipers.linting.results import Finding
from calipers.numerics.formats import GRIDS, Grid
from calipers.numerics.layout import Layout, has_global_scale
from calipers.numerics.qparams import safe_qparams
from calipers.observers import QParamsDict


def grid_of(args: QuantizationArgs) -> Grid | None:
    """Return the numbers that codes stand for; None where Calipers does not know the format."""
    return GRIDS.get((QuantizationType(args.type).value, args.num_bits))


def stored_loss(
    module: StoredModule, original: Tensor, streams: Streams | None = None
) -> WeightLoss | None:
    """Compare the weight of a module with the one it was made from; None where that cannot be."""
    if module.weights is None:  # only its input is quantized
        kept = module.read("weight")
        if kept is None or kept.shape != original.shape:
            return None
        return stored_weight_loss([(original, kept)], original, streams)
    if not module.is_sound or grid_of(module.weights) is None:
        return None
    if original.shape != module.shape or original.ndim != 2:
        return None
    weight = QuantizedWeight.of(module)
    pairs = ((original[rows], weight.rows(rows)) for rows in weight.tiles())
    return stored_weight_loss(pairs, original, streams)


def compare(module: StoredModule, model: OriginalModel) -> tuple[float, float] | None:
    """Return the error of a weight as it is stored, and with scales from its extrema, if known."""
    stored, args = model.weight(module.name), module.weights
    if stored is None or stored.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        return None
    original = stored.map()
    loss = stored_loss(module, original)
    if loss is None or args is None:
        return None
    global_scale = module.read("weight_global_scale")
    ends = extrema(Layout.of("weight", args).pieces(original))
    scale, zero_point = safe_qparams(ends.min_vals, ends.max_vals, args, global_scale)
    qparams: QParamsDict = {
        "scale": scale,
        "zero_point": zero_point,
        "global_scale": global_scale if has_global_scale(args) else None,
    }
    return loss.error, weight_loss(original, args, qparams)[0].error


def check_same_weights(model: OriginalModel, modules: Iterable[StoredModule]) -> Iterator[Finding]:
    """Find weights that the original does not have, or has in another shape."""
    for module in modules:
        shape = module.shape if module.weights is not None else None
        if shape is None:
            continue
        stored = model.weight(module.name)
        if stored is None:
            problem = f"has a weight, and '{model.folder}' has none of that name"
        elif stored.shape != shape:
            problem = f"has a weight of shape {shape}, and that of the original is {stored.shape}"
        else:
            continue
        hint = "Give the model that the checkpoint was made from."
        yield Finding("error", "other-model", module.name, problem, hint)
