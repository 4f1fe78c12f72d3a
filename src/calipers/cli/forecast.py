"""What would become of a model, worked out without its weights."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from transformers import PreTrainedModel

from calipers.calibration.freezing import freeze
from calipers.calibration.plan import Plan
from calipers.checkpoint.sizes import size_when_stored, sizes_of_module
from calipers.checkpoint.ties import tied_names
from calipers.entrypoint import plan_for
from calipers.recipes import Recipe


@dataclass(frozen=True)
class Row:
    """A tensor that would be quantized; ``before`` and ``after`` are bytes in the checkpoint."""

    module: str
    tensor: str
    format: str
    strategy: str
    observer: str
    data: str
    before: int
    after: int


@dataclass(frozen=True)
class Forecast:
    """What a recipe would do to a model.

    :param rows: every tensor that would be quantized, in the order of the model
    :param gathered: modules whose inputs would be summed up for whoever comes later
    :param before: bytes of all tensors of the checkpoint as the model is
    :param after: the same when it is quantized
    """

    rows: tuple[Row, ...]
    gathered: tuple[str, ...]
    needs_data: bool
    before: int
    after: int

    def as_dict(self) -> dict[str, Any]:
        """Return everything as plain data."""
        return asdict(self)


def forecast(model: PreTrainedModel, recipe: Recipe) -> Forecast:
    """Quantize a model that has no values, and look at what would be stored.

    What is asked for sizes is the code that writes checkpoints. The model is changed.
    """
    before = size_when_stored(model)
    plan = plan_for(model, recipe)
    unquantized = _sizes(model, plan)
    freeze(model, plan, {})
    rows = tuple(_rows(plan, unquantized, _sizes(model, plan)))
    return Forecast(rows, plan.gathered, plan.needs_data, before, size_when_stored(model))


Sizes = Mapping[str, Mapping[str, int]]


def _sizes(model: PreTrainedModel, plan: Plan) -> Sizes:
    """Return the bytes of the tensors of each planned module; a tied copy takes none."""
    copies = tied_names(model)
    return {
        each.name: {
            tensor: 0 if f"{each.name}.{tensor}" in copies else size
            for tensor, size in sizes_of_module(model.get_submodule(each.name)).items()
        }
        for each in plan.modules
    }


def _rows(plan: Plan, before: Sizes, after: Sizes) -> Iterator[Row]:
    for planned, row in zip(plan, plan.rows(), strict=True):
        sizes = (_of_tensor(planned.base_name, all_[planned.module]) for all_ in (before, after))
        yield Row(*row.values(), *sizes)


def _of_tensor(base_name: str, sizes: Mapping[str, int]) -> int:
    """Add up what is stored for a tensor: itself, its packed form, its scales."""
    return sum(
        size
        for name, size in sizes.items()
        if name == base_name or name.startswith(f"{base_name}_")
    )
