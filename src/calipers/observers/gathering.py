"""Observers of weights that need to know the inputs of their module."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from typing import Any, TypeGuard, TypeVar

import torch
from pydantic import Field
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from calipers.errors import CalipersWarning, ImportanceError
from calipers.observers.base import Observer
from calipers.observers.options import ObserverOptions
from calipers.statistics.guarding import full_precision, guarded

T = TypeVar("T")


class ImportanceOptions(ObserverOptions):
    """Options of an observer that needs to know the inputs."""

    strict: bool = Field(default=False, description="unusable importance is an error")


class GathersInputs(Observer):
    """Sums up the inputs of a module by a hook, and leaves the sums on the module.

    ``attach`` takes over the sums another observer left there, or starts summing; ``detach`` stops.
    A subclass says which fields hold the sums, how they begin, and how an input goes into them.
    """

    options: ImportanceOptions
    _has_warned = False
    _hook: RemovableHandle | None = None

    def gathered_fields(self) -> Iterable[str]:
        """Name the fields that are left on the module."""
        raise NotImplementedError

    @guarded
    def gathered(self) -> dict[str, Tensor]:
        """Return the sums, under the names of their fields."""
        return {name: getattr(self, name) for name in self.gathered_fields()}

    @property
    @guarded
    def gathered_tokens(self) -> int:
        """How many tokens went into the sums."""
        counts = [name for name in self.gathered_fields() if name.endswith("_count")]
        return min((int(getattr(self, name, 0)) for name in counts), default=0)

    def begin_gathering(self, channels: int) -> None:
        """Set the fields to what nothing amounts to."""
        raise NotImplementedError

    def gather(self, x: Tensor, mask: Tensor | None = None) -> None:
        """Take an input into the fields; ``mask`` says which tokens count."""
        raise NotImplementedError

    @guarded
    def attach(self, module: torch.nn.Module) -> None:
        """Take over the sums another observer left on ``module``, or start summing its inputs."""
        if self.take_over(module) or not self.can_gather(module):
            return
        if not all(hasattr(self, name) for name in self.gathered_fields()):
            channels: Any = module.in_features
            self.begin_gathering(channels)
        self._remove_hook()
        self._hook = module.register_forward_pre_hook(self._see_input, with_kwargs=True)
        self._publish(module)

    def can_gather(self, module: torch.nn.Module) -> bool:
        """Whether there is anything to sum up, and a number of channels is known."""
        return any(self.gathered_fields()) and hasattr(module, "in_features")

    @guarded
    def take_over(self, module: torch.nn.Module) -> bool:
        """Take the sums that another observer left on ``module``, if it did."""
        names = list(self.gathered_fields())
        left = bool(names) and all(hasattr(module, name) for name in names)
        if not left or self._are_being_gathered(module):
            return False
        for name in names:
            setattr(self, name, getattr(module, name))
            delattr(module, name)
        return True

    @guarded
    def detach(self, module: torch.nn.Module) -> None:
        """Stop summing, and leave the sums on ``module``."""
        hook = None if self._hook is None else module._forward_pre_hooks.get(self._hook.id)
        if getattr(hook, "__self__", None) is self:
            self._remove_hook()
            self._publish(module)

    def or_plain(self, make: Callable[[Tensor], T], pieces: Tensor) -> T | None:
        """Make importance for the pieces of a weight; where it cannot be, warn once, or raise."""
        try:
            return make(pieces)
        except ImportanceError as error:
            if self.options.strict:
                raise
            if not self._has_warned:
                self._has_warned = True
                warnings.warn(f"{error.reason} Falls back to plain error.", CalipersWarning, 3)
            return None

    def fall_back_silently(self) -> None:
        """Let importance that cannot be made be no news: somebody has told of it."""
        self._has_warned = True

    def _see_input(
        self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        x = next(iter((*args, *kwargs.values())), None)
        x = x[0] if isinstance(x, tuple) and x else x
        if isinstance(x, Tensor) and x.numel():
            self.gather_input(x)
            self._publish(module)

    @full_precision()
    def gather_input(self, x: Tensor, mask: Tensor | None = None) -> None:
        """Take an input into the fields, without its non-finite tokens if the options say so."""
        if self.options.nonfinite == "ignore":
            finite = torch.isfinite(x).all(-1)
            x, mask = x[finite], None if mask is None else mask[finite]
        self.gather(x, mask)

    @guarded
    def _publish(self, module: torch.nn.Module) -> None:
        for name in self.gathered_fields():
            if hasattr(self, name):
                setattr(module, name, getattr(self, name))
            elif hasattr(module, name):  # forgotten meanwhile
                delattr(module, name)

    def _remove_hook(self) -> None:
        if self._hook is not None:
            self._hook.remove()
            self._hook = None

    def _are_being_gathered(self, module: torch.nn.Module) -> bool:
        """Whether another observer, which gathers the same, is at work."""
        mine = set(self.gathered_fields())
        owners = (getattr(hook, "__self__", None) for hook in module._forward_pre_hooks.values())
        return any(
            isinstance(owner, GathersInputs) and mine <= set(owner.gathered_fields())
            for owner in owners
        )


def gathers(observer: Observer | None) -> TypeGuard[GathersInputs]:
    """Whether an observer of a weight sums up the inputs of its module."""
    if not isinstance(observer, GathersInputs) or observer.base_name != "weight":
        return False
    return any(observer.gathered_fields())
