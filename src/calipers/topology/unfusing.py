"""Experts that a model keeps stacked in 3-D parameters, as one Linear per expert and projection.

Observers and compressed-tensors know Linear layers. The layers made here look into the memory of
the stacked parameters; the modules they stand in for stay as they were.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn

from calipers.errors import cannot_unfuse
from calipers.statistics.masks import routed_tokens, token_mask
from calipers.topology.experts import fused_experts
from calipers.topology.stacks import StackedForm

Gate = Callable[[nn.Module, Tensor], Tensor]


def unfuse_experts(model: nn.Module, names: Iterable[str] | None = None) -> list[str]:
    """Swap fused experts for modules with Linear layers, and return their names.

    ``names`` are some of fused_experts; all of them by default. If one cannot be unfused
    faithfully, FusedExpertsError tells why and the model is left as it was.
    """
    found = fused_experts(model)
    chosen = list(found) if names is None else list(names)
    unfused: dict[nn.Module, UnfusedExperts] = {}
    for name in chosen:
        if found[name] not in unfused:
            unfused[found[name]] = UnfusedExperts(found[name], name)
    for name in chosen:
        model.set_submodule(name, unfused[found[name]])
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
            result = self._run(index, hidden_states, token)
            weighted = result * top_k_weights[token, position, None]
            total.index_add_(0, token, weighted.to(dtype))
        return total.to(hidden_states.dtype)

    def _run(self, index: int, hidden: Tensor, token: Tensor) -> Tensor:
        expert = self._modules[str(index)]
        assert isinstance(expert, Expert)
        result: Tensor
        if self.calibrate_all_experts:
            result = expert(hidden, self._activate)[token]
        else:
            with routed_tokens(token, len(hidden), self._where):
                result = expert(hidden[token], self._activate)
        return result

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
