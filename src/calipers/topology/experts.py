"""Experts: stacked in 3-D parameters of one module, or each a module of its own.

Observers and compressed-tensors know Linear layers. Unfusing makes one Linear per expert and
projection, which looks into the memory of the stacked parameters; the fused modules stay as they
were.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from calipers.errors import cannot_unfuse
from calipers.numerics.tensors import routed_tokens, token_mask
from calipers.topology.names import EXPERT_PROJECTIONS

_STACKED = ("gate_up_proj", "up_proj", "down_proj")
_DECLARED = ("has_gate", "has_bias", "is_transposed", "is_concatenated")
_FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
Gate = Callable[[nn.Module, Tensor], Tensor]


def fused_experts(model: nn.Module) -> dict[str, nn.Module]:
    """Return the modules that keep several experts in one parameter, by name."""
    fused = {}
    for name, module in model.named_modules(remove_duplicate=False):
        stacked = set(_stacked(module))
        known = "down_proj" in stacked and stacked & {"gate_up_proj", "up_proj"}
        # Other ways to stack experts cannot be unfused, but must not be passed over in silence.
        if known or (stacked and "expert" in f"{name} {type(module).__name__}".lower()):
            fused[name] = module
    return fused


def unfused_experts(model: nn.Module) -> dict[str, int]:
    """Return the modules whose children are experts, with the number of these."""
    _, *needed = EXPERT_PROJECTIONS  # a gate is not in every model
    counts: dict[str, int] = {}
    for name, module in model.named_modules():
        experts = {key: child for key, child in module.named_children() if key.isdecimal()}
        if experts and all(
            key == str(i) and all(hasattr(expert, part) for part in needed)
            for i, (key, expert) in enumerate(experts.items())
        ):
            counts[name] = len(experts)
    return counts


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
        has_gate = "gate_up_proj" in fused._parameters
        up = _stack(fused, "gate_up_proj" if has_gate else "up_proj")
        down = _stack(fused, "down_proj")
        # (n, hidden, 2·inner) or (n, 2·inner, hidden): the shape of down_proj decides.
        looks_transposed = has_gate and up.shape[-1] == 2 * down.shape[-2]
        transposed = bool(getattr(fused, "is_transposed", looks_transposed))
        inner = up.shape[-1 if transposed else -2]
        width = inner // 2 if has_gate else inner
        expected = (width, up.shape[-2]) if transposed else (up.shape[-1], width)
        counts = {len(up), len(down), getattr(fused, "num_experts", len(down))}
        is_even = not has_gate or inner % 2 == 0
        if not is_even or down.shape[1:] != expected or counts != {len(down)} or not len(down):
            shapes = {name: tuple(p.shape) for name, p in fused.named_parameters(recurse=False)}
            problem = f"the shapes of its parameters do not match: {shapes}"
            raise cannot_unfuse(where, fused, problem)
        return cls(
            count=len(down),
            has_gate=has_gate,
            transposed=transposed,
            interleaved=not getattr(fused, "is_concatenated", True),
            declared=all(hasattr(fused, name) for name in _DECLARED),
        )

    def projections(self, fused: nn.Module, index: int) -> dict[str, nn.Linear]:
        """Return the Linear layers of an expert, in the order in which they run."""
        down = self._linear(fused, "down_proj", index)
        if not self.has_gate:
            return {"up_proj": self._linear(fused, "up_proj", index), "down_proj": down}
        size = _stack(fused, "gate_up_proj").shape[-1 if self.transposed else -2]
        gate, up = slice(0, size // 2), slice(size // 2, None)
        if self.interleaved:
            gate, up = slice(0, None, 2), slice(1, None, 2)
        return {
            "gate_proj": self._linear(fused, "gate_up_proj", index, gate),
            "up_proj": self._linear(fused, "gate_up_proj", index, up),
            "down_proj": down,
        }

    def _linear(
        self, fused: nn.Module, name: str, index: int, rows: slice = slice(None)
    ) -> nn.Linear:
        stack = _stack(fused, name)
        weight = stack.detach()[index]
        weight = (weight.T if self.transposed else weight)[rows]
        bias = fused._parameters.get(f"{name}_bias")
        # Not by its constructor, which would first make up a weight of its own.
        linear = nn.Linear.__new__(nn.Linear)
        nn.Module.__init__(linear)
        linear.out_features, linear.in_features = weight.shape
        linear.weight = nn.Parameter(weight, requires_grad=stack.requires_grad)
        linear.register_parameter("bias", None)
        if bias is not None:
            linear.bias = nn.Parameter(bias.detach()[index, rows], requires_grad=bias.requires_grad)
        return linear


def _stacked(module: nn.Module) -> list[str]:
    """Return the names of parameters that may hold several matrices."""
    parameters = module._parameters.items()
    return [name for name, value in parameters if value is not None and value.ndim == 3]


def _stack(fused: nn.Module, name: str) -> nn.Parameter:
    stack = fused._parameters[name]
    assert stack is not None
    return stack


def _obstacle(fused: nn.Module) -> str | None:
    """Say what stands against unfusing a module, before its shapes are looked at."""
    present = {name: p for name, p in fused._parameters.items() if p is not None}
    known = {*_STACKED, *(f"{name}_bias" for name in _STACKED)}
    stacked = [name for name in _STACKED if name in _stacked(fused)]
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


def unfuse_experts(model: nn.Module, names: Iterable[str] | None = None) -> list[str]:
    """Swap fused experts for modules with Linear layers, and return their names.

    If one cannot be unfused faithfully, FusedExpertsError is raised and the model is unchanged.

    :param names: some of ``fused_experts``; all of them by default
    """
    fused = fused_experts(model)
    chosen = list(fused) if names is None else list(names)
    unfused: dict[nn.Module, UnfusedExperts] = {}
    for name in chosen:
        if fused[name] not in unfused:
            unfused[fused[name]] = UnfusedExperts(fused[name], name)
    for name in chosen:
        model.set_submodule(name, unfused[fused[name]])
    return chosen


class Expert(nn.Module):
    """One expert: gate_proj (not in every model), up_proj and down_proj."""

    gate_proj: nn.Linear
    up_proj: nn.Linear
    down_proj: nn.Linear

    def __init__(self, projections: dict[str, nn.Linear]) -> None:
        super().__init__()
        for name, linear in projections.items():
            self.add_module(name, linear)

    def forward(
        self, hidden: Tensor, activate: Callable[[Tensor | None, Tensor], Tensor]
    ) -> Tensor:
        """Run a token through the expert; ``activate`` joins what gate and up projected."""
        gate = self.gate_proj(hidden) if "gate_proj" in self._modules else None
        result: Tensor = self.down_proj(activate(gate, self.up_proj(hidden)))
        return result


class UnfusedExperts(nn.Module):
    """Experts as modules "0", "1", …: called like the fused ones, with the same result.

    Attributes and submodules of the fused module (config, act_fn, …) are there, its parameters
    are not. With ``calibrate_all_experts`` every expert sees every token, so that its observers
    do, while only the results that the router asked for are used.
    """

    act_fn: Callable[[Tensor], Tensor]

    def __init__(self, fused: nn.Module, name: str = "experts") -> None:
        super().__init__()
        form = StackedForm.of(fused, name)
        for key, value in vars(fused).items():
            self.__dict__[key] = value.copy() if isinstance(value, dict | set) else value
        self.__dict__["_parameters"] = {}
        self.num_experts = form.count
        self.calibrate_all_experts = False
        self._where = name
        self._interleaved = form.interleaved
        self._gate: Gate | None = getattr(type(fused), "_apply_gate", None)
        for index in range(form.count):
            self.add_module(
                str(index), Expert(form.projections(fused, index)).train(fused.training)
            )
        _check_activation(self, fused, name)
        if not form.declared:
            _check_result(self, fused, name)

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Add up the results of each token's experts, weighted as the router says."""
        # The sum is taken in the more precise dtype and rounded once.
        dtype = torch.promote_types(hidden_states.dtype, top_k_weights.dtype)
        total = torch.zeros_like(hidden_states, dtype=dtype)
        hit = set(torch.unique(top_k_index).tolist())
        for index in range(self.num_experts):
            if index not in hit and not self.calibrate_all_experts:
                continue
            position, token = torch.where(top_k_index.T.eq(index))
            expert = self._modules[str(index)]
            assert isinstance(expert, Expert)
            if self.calibrate_all_experts:
                result = expert(hidden_states, self._activate)[token]
            else:
                with routed_tokens(token, len(hidden_states), self._where):
                    result = expert(hidden_states[token], self._activate)
            weighted = result * top_k_weights[token, position, None]
            total.index_add_(0, token, weighted.to(dtype))
        return total.to(hidden_states.dtype)

    def _activate(self, gate: Tensor | None, up: Tensor) -> Tensor:
        if gate is None:
            return self.act_fn(up)
        if self._gate is None:
            return self.act_fn(gate) * up
        if self._interleaved:
            return self._gate(self, torch.stack([gate, up], dim=-1).flatten(-2))
        return self._gate(self, torch.cat([gate, up], dim=-1))


def _check_activation(unfused: UnfusedExperts, fused: nn.Module, where: str) -> None:
    """Try the class's own gate: it may use more of the fused module than is left."""
    down = unfused.get_submodule("0.down_proj").weight
    assert isinstance(down, Tensor)
    up = down.new_zeros(1, down.shape[1])
    gate = up if "gate_up_proj" in fused._parameters else None
    try:
        shape = unfused._activate(gate, up).shape
    except Exception as error:
        problem = f"its activation fails by itself ({type(error).__name__}: {error})"
        raise cannot_unfuse(where, fused, problem) from error
    if shape != up.shape:
        problem = f"its activation turns {tuple(up.shape)} into {tuple(shape)}"
        raise cannot_unfuse(where, fused, problem)


@torch.no_grad()
def _check_result(unfused: UnfusedExperts, fused: nn.Module, where: str) -> None:
    """Compare results where the fused module declares nothing: every expert gets two tokens."""
    count, down = unfused.num_experts, fused.get_parameter("down_proj")
    if down.is_meta:
        problem = "whether that is faithful can only be tried, and its parameters are on 'meta'"
        raise cannot_unfuse(where, fused, problem)
    first = next(unfused.get_submodule("0").children())
    assert isinstance(first, nn.Linear)
    random = torch.Generator().manual_seed(0)
    hidden = torch.randn(count, first.in_features, generator=random).to(down)
    weights = torch.rand(count, 2, generator=random).to(down)
    index = torch.arange(count, device=down.device)
    routing = torch.stack([index, index.roll(1)], dim=-1)
    try:
        # Not called as modules: hooks of the user have no part in this.
        with token_mask(None):
            expected = type(fused).forward(fused, hidden, routing, weights)
            result = unfused.forward(hidden, routing, weights)
        error = float((result - expected).abs().max() / expected.abs().max().clamp(min=1e-30))
    except Exception as failure:
        problem = f"it does not run like experts do ({type(failure).__name__}: {failure})"
        raise cannot_unfuse(where, fused, problem) from failure
    if not error <= 16 * torch.finfo(down.dtype).eps:
        problem = f"its result on random tokens would differ by {error:.1g} of the largest value"
        raise cannot_unfuse(where, fused, problem)
