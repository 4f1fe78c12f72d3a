"""Modifiers that rotate: outliers of single channels are spread over all of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any

import torch
from pydantic import BeforeValidator, Field, model_validator
from torch import Tensor

from calipers.errors import ConfigurationError, RecipeError
from calipers.planning.plan import Plan, StepPlan, Transformed, TransformPlan
from calipers.solvers.rotations import RotationKind, rotation
from calipers.steps.base import Changes, Layer, Modifier
from calipers.topology.folding import Fold, Folds
from calipers.topology.residual import ResidualStream

_SEED = 0
_AT_RUN_TIME = {
    "R3": "rotates queries and keys behind their positions",
    "R4": "rotates the input of down_proj behind a product",
}
_PASSED_OVER = ("precision", "requires_calibration_data")
_UNKNOWN = ("randomize", "learnable", "mappings", "norm_mappings", "transform_config")


def _read_rotations(value: Any) -> tuple[str, ...]:
    names = (value,) if isinstance(value, str) else value
    if not isinstance(names, list | tuple) or not names:
        raise ConfigurationError("must be a list of rotations, such as [R1, R2]", got=repr(value))
    read = tuple(dict.fromkeys(str(name).upper() for name in names))
    for name in read:
        if name in _AT_RUN_TIME:
            raise RecipeError(
                f"{name} {_AT_RUN_TIME[name]}, which has to be done while the model runs",
                hint="A checkpoint of Calipers needs nothing at run time: keep R1 and R2",
            )
        if name not in ("R1", "R2"):
            raise RecipeError("unknown rotation", got=repr(name), allowed=("R1", "R2"))
    return read


@dataclass(frozen=True)
class RotationPlan(TransformPlan):
    """What is rotated.

    :param stream: the residual stream, for R1
    :param values: values of attention with what reads them, for R2
    :param head_dims: source of values → channels of a head
    """

    stream: ResidualStream | None = None
    values: tuple[Fold, ...] = ()
    head_dims: Mapping[str, int] | None = None


class SpinQuantModifier(Modifier):
    """Rotates the residual stream (R1), and values of each head of attention (R2), in the weights.

    Gains of norms are folded into the matrices behind them first. Nothing is left for run time.

    :param rotations: ``R1``, ``R2`` or both
    :param transform_type: ``hadamard``, ``random-hadamard`` or ``random-matrix``
    :param transform_block_size: rotate the stream in blocks of so many channels; None: as a whole
    """

    rotations: Annotated[tuple[str, ...], BeforeValidator(_read_rotations)] = ("R1", "R2")
    transform_type: RotationKind = "hadamard"
    transform_block_size: Annotated[int, Field(ge=1)] | None = None

    @model_validator(mode="before")
    @classmethod
    def _pass_over(cls, given: Any) -> Any:
        """Pass over keys of llm-compressor that change nothing here; refuse those that would."""
        for key in _UNKNOWN:
            if given.get(key):
                raise RecipeError(
                    "is not supported: rotations are fixed, and where they go is found out",
                    subject=f"{cls.__name__}.{key}",
                    hint="Leave it out",
                    path=(key,),
                )
        passed = (*_PASSED_OVER, *_UNKNOWN)
        return {key: value for key, value in given.items() if key not in passed}

    def target_patterns(self) -> tuple[Iterable[str], Iterable[str]]:
        """Return the patterns of what is quantized: nothing."""
        return (), ()

    def plan(self, model: torch.nn.Module, step: str) -> StepPlan:  # noqa: ARG002
        """Quantize nothing."""
        return StepPlan()

    def solve(self, layer: Layer) -> Changes:  # noqa: ARG002
        """Find nothing: all is done before."""
        return Changes()

    def plan_transform(
        self,
        model: torch.nn.Module,
        plan: Plan,  # noqa: ARG002
        step: str,  # noqa: ARG002
    ) -> RotationPlan:
        """Find what is rotated; refuse what cannot be, before anything changes."""
        stream, values, dims = None, list[Fold](), dict[str, int]()
        if "R1" in self.rotations:
            stream = ResidualStream.of(model)
            self._of_stream(stream.size)
        if "R2" in self.rotations:
            for fold in Folds.of(model).found:
                attention: Any = model.get_submodule(fold.source.rpartition(".")[0])
                dim = getattr(attention, "head_dim", None)
                if fold.kind == "values" and dim and fold.channels % dim == 0:
                    values.append(fold)
                    dims[fold.source] = int(dim)
            if not values:
                raise RecipeError(
                    f"{self.label()} finds no values of attention to rotate (R2)",
                    hint="Leave R2 out of 'rotations'",
                )
            for dim in set(dims.values()):
                rotation(self.transform_type, dim, _SEED, "a head of attention")
        together = [fold.names for fold in (*(stream.folds if stream else ()), *values)]
        inputs = [
            name for fold in (*(stream.folds if stream else ()), *values) for name in fold.readers
        ]
        outputs = [*(stream.writers if stream else ()), *(fold.source for fold in values)]
        alone = (stream.embedding,) if stream else ()
        return RotationPlan(
            changed=tuple(dict.fromkeys([*alone, *(n for g in together for n in g), *outputs])),
            affected={
                **{(name, base): False for name in inputs for base in ("input", "weight")},
                **{(name, base): False for name in outputs for base in ("output", "weight")},
                **{(fold.source.rpartition(".")[0], "v"): False for fold in values},
            },
            together=tuple(together),
            stream=stream,
            values=tuple(values),
            head_dims=dims,
        )

    def _of_stream(self, size: int) -> Tensor:
        """Return the rotation of a block of the residual stream."""
        block = self.transform_block_size or size
        if size % block:
            raise RecipeError(
                f"is {block}, which does not divide the {size} channels of the residual stream",
                subject=f"{self.label()}.transform_block_size",
                path=("transform_block_size",),
            )
        return rotation(self.transform_type, block, _SEED, "the residual stream")

    def transform(self, layer: Layer, plan: TransformPlan) -> Transformed:
        """Rotate the modules of a layer."""
        assert isinstance(plan, RotationPlan)
        tensors: dict[tuple[str, str], Tensor] = {}

        def now(name: str, tensor: str = "weight") -> Tensor:
            value = tensors.get((name, tensor))
            return layer.tensor(name, tensor).detach() if value is None else value

        def put(name: str, value: Tensor, tensor: str = "weight") -> None:
            tensors[name, tensor] = value.to(layer.tensor(name, tensor))

        with torch.no_grad():
            if plan.stream is not None:
                self._rotate_stream(layer, plan.stream, now, put)
            for fold in plan.values:
                if fold.source not in layer.names:
                    continue
                assert plan.head_dims is not None
                dim = plan.head_dims[fold.source]
                matrix = rotation(self.transform_type, dim, _SEED, "a head of attention")
                _rotate_rows(layer, fold.source, matrix, now, put)
                put(fold.readers[0], _times(now(fold.readers[0]), matrix))
        facts = {"rotations": list(self.rotations), "transform_type": self.transform_type}
        first = next(iter(tensors), None)
        return Transformed(tensors, facts={} if first is None else {"rotated": facts})

    def _rotate_stream(self, layer: Layer, stream: ResidualStream, now: Any, put: Any) -> None:
        matrix, names = self._of_stream(stream.size), set(layer.names)
        for fold in stream.folds:
            if fold.source not in names:
                continue
            gain = now(fold.source).double() + fold.offset
            for name in fold.readers:
                put(name, _times(now(name).double() * gain.to(now(name).device), matrix))
            put(fold.source, torch.full_like(gain, 1 - fold.offset))
        for name in names.intersection(stream.writers):
            _rotate_rows(layer, name, matrix, now, put)
        if stream.embedding in names:
            put(stream.embedding, _times(now(stream.embedding), matrix))


def _times(weight: Tensor, matrix: Tensor) -> Tensor:
    """Multiply the columns of a matrix, block by block, by a rotation."""
    blocks = weight.double().reshape(len(weight), -1, len(matrix))
    return (blocks @ matrix.to(weight.device)).reshape(weight.shape)


def _rotate_rows(layer: Layer, name: str, matrix: Tensor, now: Any, put: Any) -> None:
    put(name, _times(now(name).T, matrix).T)
    if layer.module(name)._parameters.get("bias") is not None:
        put(name, _times(now(name, "bias")[None], matrix)[0], "bias")


class QuIPModifier(SpinQuantModifier):
    """Refuses: what QuIP rotates has to be rotated back while the model runs."""

    @classmethod
    def read(cls, given: Mapping[str, Any]) -> list[Modifier]:  # noqa: ARG003
        """Refuse with the reason."""
        raise RecipeError(
            "QuIPModifier rotates the inputs ('v') or outputs ('u') of every Linear by itself, and "
            "they have to be rotated back while the model runs",
            hint="A checkpoint of Calipers needs nothing at run time: use SpinQuantModifier, whose "
            "R1 and R2 are folded into the weights",
        )

    def __init__(self, **given: Any) -> None:
        self.read(given)
