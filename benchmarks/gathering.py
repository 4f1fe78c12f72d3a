"""What observers learn from the calibration stories, all of it in one run."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

import torch
from compressed_tensors.quantization import QuantizationArgs
from contenders import ACTIVATION_CONTENDERS, OURS, SCHEMES, WEIGHT_CONTENDERS, Contender
from stories import decoder_linears, hidden_states
from torch import Tensor
from torch.nn import Linear

LEADERS = {"k_proj": "q_proj", "v_proj": "q_proj", "up_proj": "gate_proj"}
"""Whose input is that of another linear, which is observed instead."""

Importance = dict[str, Tensor]
"""What attaching to a module leaves there, by attribute."""


def leading_site(site: str) -> str:
    """Return where a tensor is observed that passes several sites."""
    for follower, leader in LEADERS.items():
        site = site.replace(follower, leader)
    return site


def is_leading(site: str) -> bool:
    """Whether a site is observed itself."""
    return leading_site(site) == site


def importance_key(contender: Contender, args: QuantizationArgs) -> str | None:
    """Name what a contender must have gathered; blocks of a Hessian are as wide as a group."""
    kind = "imatrix" if "imatrix" in contender.observer else contender.options.get("importance")
    if kind in (None, "none"):
        return None
    return f"hessian {args.group_size}" if kind == "hessian" else "imatrix"


class ImportanceGatherer:
    """Sums, with our own observers, what all contenders of some schemes need."""

    def __init__(self, model: Any, schemes: Iterable[str]) -> None:
        self.linears = decoder_linears(model)
        self.stand_ins: dict[tuple[str, str], Linear] = {}
        self.observers: dict[tuple[str, str], Any] = {}
        for scheme in schemes:
            for contender in WEIGHT_CONTENDERS:
                if contender.library == OURS and contender.is_registered:
                    self._attach(contender, SCHEMES[scheme].weights)

    def _attach(self, contender: Contender, args: QuantizationArgs | None) -> None:
        kind = args and importance_key(contender, args)
        if kind is None or (kind, "0.self_attn.q_proj.input") in self.observers:
            return
        for name, linear in self.linears.items():
            place = kind, f"{name}.input"
            if is_leading(name):
                self.observers[place] = contender.build("weight", args)
                self.stand_ins[place] = stand_in(linear.in_features)
                self.observers[place].attach(self.stand_ins[place])

    def visit(self, site: str, tensor: Tensor) -> Tensor:
        """Show the input of a linear to what stands in for it."""
        for (_, place), linear in self.stand_ins.items():
            if place == site:
                linear(tensor)
        return tensor

    def gather(self, model: Any, stories: Sequence[Tensor]) -> dict[tuple[str, str], Importance]:
        """Run the stories, and return what was summed, by kind and site."""
        if self.observers:
            for _ in hidden_states(model, stories, self.visit):
                pass
        for place, observer in self.observers.items():
            observer.detach(self.stand_ins[place])
        return {place: sums_on(linear) for place, linear in self.stand_ins.items()}


def stand_in(channels: int) -> Linear:
    """Return the smallest linear that takes the same input."""
    return Linear(channels, 1, bias=False)


def sums_on(linear: Linear) -> Importance:
    """Return the sums that an observer left."""
    names = ("_imatrix_sum", "_imatrix_count", "_hessian_sum", "_hessian_count")
    return {name: getattr(linear, name) for name in names if hasattr(linear, name)}


def give_importance(observer: Any, library: str, channels: int, sums: Importance) -> None:
    """Let an observer find sums on the module it is attached to; the peer takes them itself."""
    carrier = stand_in(channels)
    for name, value in sums.items():
        setattr(carrier, name, value.clone())
    observer.attach(carrier)
    if library != OURS:
        observer._imatrix_sum = sums["_imatrix_sum"].float()
        observer._imatrix_count = sums["_imatrix_count"]
    observer.detach(carrier)


Found = dict[tuple[str, Contender], dict[str, Any]]
"""For each scheme and contender what belongs to each site: its observer, or what that found."""


def observe_activations(model: Any, stories: Sequence[Tensor], schemes: Iterable[str]) -> Found:
    """Feed all observers of activations with the same stories; they see bfloat16."""
    found: Found = {
        (scheme, contender): {}
        for scheme in schemes
        for contender in ACTIVATION_CONTENDERS
        if (args := SCHEMES[scheme].activations) and contender.suits(args)
        if contender.is_registered
    }
    if not found:
        return {}
    for _ in hidden_states(model, stories, partial(observe, found)):
        pass
    return {
        key: {site: observer.get_qparams() for site, observer in observers.items()}
        for key, observers in found.items()
    }


def observe(found: Found, site: str, tensor: Tensor) -> Tensor:
    """Show a tensor to all observers of its site, which are built when it is first seen."""
    base_name = site.rpartition(".")[2]
    if is_leading(site):
        for (scheme, contender), observers in found.items():
            args = SCHEMES[scheme].inputs if base_name == "input" else SCHEMES[scheme].cache
            if args is not None:
                if site not in observers:
                    observers[site] = contender.build(base_name, args)
                observers[site](tensor.to(torch.bfloat16))
    return tensor
