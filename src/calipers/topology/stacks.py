"""How a module keeps the weights of its experts in 3-D parameters, and where each one lies."""

from __future__ import annotations

import inspect
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from calipers.errors import cannot_unfuse

_STACKED = ("gate_up_proj", "up_proj", "down_proj")
_DECLARED = ("has_gate", "has_bias", "is_transposed", "is_concatenated")
_FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def is_fused(name: str, module: nn.Module) -> bool:
    """Tell whether a module keeps several experts in one parameter."""
    stacked = {key for key, value in module._parameters.items() if _is_stack(value)}
    if "down_proj" in stacked and stacked & {"gate_up_proj", "up_proj"}:
        return True
    # Other ways to stack experts cannot be unfused, but must not be passed over in silence.
    return bool(stacked) and "expert" in f"{name} {type(module).__name__}".lower()


@dataclass(frozen=True)
class StackedForm:
    """How a fused module keeps its experts; ``declared`` by itself, or else guessed from shapes."""

    count: int
    has_gate: bool
    transposed: bool
    interleaved: bool
    declared: bool

    @classmethod
    def of(cls, fused: nn.Module, where: str) -> StackedForm:
        """Find the form of a fused module; what has none that is known is refused."""
        problem = _obstacle(fused)
        if problem is not None:
            raise cannot_unfuse(where, fused, problem)
        declared = all(hasattr(fused, name) for name in _DECLARED)
        has_gate = "gate_up_proj" in fused._parameters
        down = _stack(fused, "down_proj")
        form = cls(
            count=len(down),
            has_gate=has_gate,
            transposed=bool(getattr(fused, "is_transposed", has_gate and _looks_transposed(fused))),
            interleaved=not getattr(fused, "is_concatenated", True),
            declared=declared,
        )
        if not form._fits(fused):
            shapes = {name: tuple(p.shape) for name, p in fused.named_parameters(recurse=False)}
            problem = f"the shapes of its parameters do not match: {shapes}"
            raise cannot_unfuse(where, fused, problem)
        return form

    def _fits(self, fused: nn.Module) -> bool:
        inner = -1 if self.transposed else -2
        up = _stack(fused, "gate_up_proj" if self.has_gate else "up_proj")
        down = _stack(fused, "down_proj")
        width = up.shape[inner] // (2 if self.has_gate else 1)
        expected = (width, up.shape[-2]) if self.transposed else (up.shape[-1], width)
        even = not self.has_gate or up.shape[inner] % 2 == 0
        counts = {len(up), len(down), getattr(fused, "num_experts", self.count)}
        return even and down.shape[1:] == expected and counts == {self.count} and self.count > 0

    def projections(self, fused: nn.Module, index: int) -> dict[str, nn.Linear]:
        """Return the Linear layers of an expert, in the order in which they run."""
        down = self._linear(fused, "down_proj", index)
        if not self.has_gate:
            return {"up_proj": self._linear(fused, "up_proj", index), "down_proj": down}
        gate, up = self._halves(_stack(fused, "gate_up_proj").shape[-1 if self.transposed else -2])
        return {
            "gate_proj": self._linear(fused, "gate_up_proj", index, gate),
            "up_proj": self._linear(fused, "gate_up_proj", index, up),
            "down_proj": down,
        }

    def _halves(self, size: int) -> tuple[slice, slice]:
        if self.interleaved:
            return slice(0, None, 2), slice(1, None, 2)
        return slice(0, size // 2), slice(size // 2, None)

    def _linear(
        self, fused: nn.Module, name: str, index: int, rows: slice = slice(None)
    ) -> nn.Linear:
        stack = _stack(fused, name)
        weight = stack.detach()[index]
        weight = (weight.T if self.transposed else weight)[rows]
        bias = fused._parameters.get(f"{name}_bias")
        linear = _linear_of(weight, stack.requires_grad)
        if bias is not None:
            linear.bias = nn.Parameter(bias.detach()[index, rows], requires_grad=bias.requires_grad)
        return linear


def _linear_of(weight: Tensor, requires_grad: bool) -> nn.Linear:
    """Return a Linear around a weight; its constructor would first make up one of its own."""
    linear = nn.Linear.__new__(nn.Linear)
    nn.Module.__init__(linear)
    linear.out_features, linear.in_features = weight.shape
    linear.weight = nn.Parameter(weight, requires_grad=requires_grad)
    linear.register_parameter("bias", None)
    return linear


def _is_stack(parameter: nn.Parameter | None) -> bool:
    return parameter is not None and parameter.ndim == 3


def _stack(fused: nn.Module, name: str) -> nn.Parameter:
    stack = fused._parameters[name]
    assert stack is not None
    return stack


def _looks_transposed(fused: nn.Module) -> bool:
    """Tell (n, hidden, 2·inner) from (n, 2·inner, hidden): the shape of down_proj decides."""
    gate_up, down = _stack(fused, "gate_up_proj"), _stack(fused, "down_proj")
    return gate_up.shape[-1] == 2 * down.shape[-2]


def _obstacle(fused: nn.Module) -> str | None:
    """Say what stands against unfusing a module, before its shapes are looked at."""
    present = {name: p for name, p in fused._parameters.items() if p is not None}
    known = {*_STACKED, *(f"{name}_bias" for name in _STACKED)}
    stacked = [name for name in _STACKED if _is_stack(present.get(name))]
    if stacked not in (["gate_up_proj", "down_proj"], ["up_proj", "down_proj"]):
        return "it has no 3-D down_proj with a 3-D gate_up_proj or up_proj alone beside it"
    if not present.keys() <= known:
        return f"it has parameters of unknown meaning: {', '.join(sorted(present.keys() - known))}"
    if any(p.dtype not in _FLOATS for p in present.values()):
        return "its parameters are already quantized"
    if "forward" in vars(fused):
        return "its forward was replaced on the instance, as by offloading"
    if len(inspect.signature(type(fused).forward).parameters) != 4:
        return "its forward does not take (hidden_states, top_k_index, top_k_weights)"
    return None
