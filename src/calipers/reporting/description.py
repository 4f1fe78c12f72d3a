"""What a quantized checkpoint says about itself: its files alone are read, and no weight."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from compressed_tensors.quantization import QuantizationArgs, QuantizationConfig

from calipers.checkpoint.auxiliary_files import NOTES
from calipers.checkpoint.quantized import QuantizedCheckpoint, is_error, recorded_costs
from calipers.errors import ModelLoadError, damaged_file
from calipers.judging.costs import ModuleCosts
from calipers.judging.losses import ModuleLoss, loss_grid, module_losses
from calipers.numerics.formats import Format
from calipers.numerics.layout import granularity_name


@dataclass(frozen=True)
class CheckpointDescription:
    """What is in a checkpoint that Calipers has written.

    :param calipers: the version that wrote it
    :param schemes: how tensors are quantized, a row for each kind
    :param pipeline: how data ran, or where what was known of it came from
    :param errors: module → ‖Q(W) − W‖ / ‖W‖ of its weight
    :param costs: module → what its static activations and its output lose, where data ran
    """

    checkpoint: QuantizedCheckpoint
    calipers: str
    model: str
    schemes: tuple[dict[str, str], ...]
    pipeline: str
    samples: int
    tokens: int
    errors: Mapping[str, float]
    costs: Mapping[str, ModuleCosts]

    def losses(self) -> list[ModuleLoss]:
        """Return what each module loses, the worst first."""
        return module_losses(self.errors, self.costs)

    def as_dict(self) -> dict[str, Any]:
        """Return plain data."""
        return {
            "calipers": self.calipers,
            "model": self.model,
            "schemes": list(self.schemes),
            "modules": len(self.checkpoint.weights),
            "size": self.checkpoint.size,
            "bits_per_weight": self.checkpoint.bits_per_weight,
            "pipeline": self.pipeline,
            "samples": self.samples,
            "tokens": self.tokens,
            "losses": [loss.as_dict() for loss in self.losses()],
            "errors_in_decibels": loss_grid(self.errors, self.costs).as_dict(),
        }


def describe_checkpoint(folder: Path) -> CheckpointDescription:
    """Read what a checkpoint says about itself; refuse one that is damaged, or not from here."""
    file = folder / NOTES
    if not file.is_file():
        raise ModelLoadError(
            f"has no {NOTES}: Calipers has not written it",
            subject=f"The folder '{folder}'",
            hint="Give a checkpoint of calipers quantize, or a file of calipers measure.",
        )
    checkpoint = QuantizedCheckpoint.open(folder)
    notes, weights = checkpoint.notes, checkpoint.weights
    for module in weights.values():
        noted = module.tensors.get("weight_shape")
        if noted is not None and module.noted_shape is None:
            problem = f"'{module.name}.weight_shape' does not hold the shape of a weight"
            raise damaged_file(noted.file, problem)
    errors = notes.get("weight_errors")
    if not isinstance(errors, dict) or not all(map(is_error, errors.values())):
        raise damaged_file(file, "'weight_errors' must be the finite errors of modules")
    classes = checkpoint.config.get("architectures")
    return CheckpointDescription(
        checkpoint,
        calipers=_text(notes.get("calipers"), file, "calipers"),
        model=str(classes[0]) if isinstance(classes, list) and classes else "?",
        schemes=tuple(_schemes(checkpoint.settings)),
        pipeline=_text(notes.get("pipeline"), file, "pipeline"),
        samples=_number(notes.get("samples"), file, "samples"),
        tokens=_number(notes.get("tokens"), file, "tokens"),
        errors={name: errors[name] for name in [*(n for n in weights if n in errors), *errors]},
        costs=recorded_costs(checkpoint),
    )


def _text(found: object, file: Path, key: str) -> str:
    if not isinstance(found, str):
        raise damaged_file(file, f"'{key}' must be a text, got {found!r}")
    return found


def _number(found: object, file: Path, key: str) -> int:
    if not isinstance(found, int) or isinstance(found, bool) or found < 0:
        raise damaged_file(file, f"'{key}' must be a whole number, got {found!r}")
    return found


def _schemes(settings: QuantizationConfig) -> list[dict[str, str]]:
    """Return a row for each kind of tensor in each group."""
    kinds: list[tuple[str, str, QuantizationArgs | None]] = []
    for group in settings.config_groups.values():
        targets = ", ".join(group.targets)
        kinds.append((targets, "weight", group.weights))
        kinds.append((targets, "input", group.input_activations))
        kinds.append((targets, "output", group.output_activations))
    kinds.append(("attention", "k, v", settings.kv_cache_scheme))
    when = {True: "dynamic", "local": "dynamic scales"}
    return [
        {
            "targets": targets,
            "tensor": tensor,
            "format": Format.of(args).name + ("" if args.symmetric else " asym"),
            "strategy": granularity_name(args),
            "scale": "stored" if tensor == "weight" else when.get(args.dynamic, "static"),
        }
        for targets, tensor, args in kinds
        if args is not None
    ]
