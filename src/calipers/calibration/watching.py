"""A model under observation: hooks exist between entering and leaving a ``with``."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from compressed_tensors.modeling import (
    register_key_hook,
    register_query_hook,
    register_value_hook,
)
from compressed_tensors.quantization import QuantizationArgs
from torch import Tensor
from torch.utils.hooks import RemovableHandle
from typing_extensions import Self

from calipers.calibration import lifecycle
from calipers.calibration.masks import token_mask
from calipers.calibration.plan import Plan, PlannedModule
from calipers.calibration.precision import own_dtype
from calipers.calibration.recording import CostRecording
from calipers.calibration.sharing import SharedReading
from calipers.calibration.snapshot import Snapshot
from calipers.errors import NonFiniteError
from calipers.observers import IMatrixMSEObserver, Observer, fuse_weight_observers
from calipers.observers.gathering import GathersInputs, gathers
from calipers.statistics.moments import SquareSums


class WatchedModel:
    """A model whose tensors are observed as a plan says.

    Within a ``with`` the modules have observers and hooks; afterwards the model is as it was found,
    also after an exception. The observers stay with this object. What the model computes is the
    same with and without them.

    :param share_inputs: whether a tensor that several modules read is measured once for all
    :param dtype: the dtype that the model will compute in, if not its own; what is measured is
        rounded to that of the module, in which its scales are judged and stored
    """

    def __init__(
        self,
        model: torch.nn.Module,
        plan: Plan,
        *,
        share_inputs: bool = True,
        dtype: torch.dtype | None = None,
    ) -> None:
        self.model, self.plan = model, plan
        self._dtype = dtype
        self.observers: dict[tuple[str, str], Observer] = {}
        self.gatherers: dict[str, IMatrixMSEObserver] = {}
        self.recording = CostRecording(self.observers)
        self._handles: dict[str, list[RemovableHandle]] = defaultdict(list)
        self._sharing = SharedReading() if share_inputs else None
        self._before: Snapshot | None = None

    def __enter__(self) -> Self:
        self._before = Snapshot(self.model)
        self.model.eval()
        try:
            for name in self.plan.gathered:
                _forget_sums(self.module(name))
            for planned in self.plan.modules:
                self._watch(planned)
            for name in self.plan.gathered:
                self._gather(name)
            fuse_weight_observers(self.model)
        except BaseException:
            self._before.restore()
            raise
        return self

    def __exit__(self, *exception: object) -> None:
        assert self._before is not None
        self._before.restore()

    @contextmanager
    def batch(self, index: int, mask: Tensor | None = None) -> Iterator[None]:
        """Let one batch run through the model, or through a part of it.

        :param mask: which tokens count, shape (batch, sequence); None for all
        """
        try:
            with torch.no_grad(), token_mask(mask):
                yield
                if self._sharing is not None:
                    self._sharing.settle()
        except NonFiniteError as error:
            error.args = (f"{error} It was batch {index}, the first one with such values.",)
            raise

    def finish(self) -> None:
        """Let every observer know what was measured for it."""
        if self._sharing is not None:
            self._sharing.finish()

    def dismiss(self, names: Iterable[str]) -> None:
        """Look no longer at some modules, whatever they go on to compute."""
        for name in names:
            for handle in self._handles.pop(name, ()):
                handle.remove()

    def module(self, name: str) -> torch.nn.Module:
        """Return a module by its name."""
        return self.model.get_submodule(name)

    def tokens(self, name: str) -> int:
        """Return the number of tokens that the observer that saw least of a module has seen."""
        return min(map(self._tokens, self.data_observers([name])), default=0)

    def _tokens(self, observer: Observer) -> int:
        if self._sharing is not None:
            observer = self._sharing.holder(observer)
        return observer.gathered_tokens if gathers(observer) else observer.num_observed_tokens

    def data_observers(self, names: Iterable[str]) -> list[Observer]:
        """Return the observers of some modules that learn from data."""
        found = []
        for name in names:
            own = [self.observers.get((name, base)) for base in lifecycle.OBSERVED]
            found += [o for o in (*own, self.gatherers.get(name)) if o is not None and _learns(o)]
        return found

    def _watch(self, planned: PlannedModule) -> None:
        module = self.module(planned.name)
        vars(module).update(
            quantization_scheme=planned.scheme,
            quantization_enabled=False,
            _shared_reading=self._sharing,
            _observed_dtype=self._observed_dtype(module),
        )
        lifecycle.expose_states(self.model, module, planned.kind)
        for tensor in planned.tensors:
            base_name = tensor.base_name
            lifecycle.initialize_observer(module, base_name, name=planned.name, attach=False)
            observer = lifecycle.observer_of(module, base_name)
            if observer is not None:
                self.observers[planned.name, base_name] = observer
                self._handles[planned.name] += _register(module, base_name, observer)
        if self.plan.needs_data:
            self._handles[planned.name] += self.recording.attach(planned, module)

    def _gather(self, name: str) -> None:
        """Sum up the inputs of a module for whoever comes later."""
        module = self.module(name)
        args = QuantizationArgs(num_bits=8, strategy="channel")
        observer = IMatrixMSEObserver("weight", args)
        observer.module_name = name
        vars(module).update(
            _shared_reading=self._sharing, _observed_dtype=self._observed_dtype(module)
        )
        self.gatherers[name] = observer
        self._handles[name] += _register(module, "weight", observer)

    def _observed_dtype(self, module: torch.nn.Module) -> torch.dtype | None:
        """Return what the activations of a module are rounded to; None where nothing is."""
        own = own_dtype(module)
        return None if self._dtype in (None, own) else own


def _register(module: torch.nn.Module, base_name: str, observer: Observer) -> list[RemovableHandle]:
    """Register the hook that shows the observer what it needs to see, if there is one."""
    if base_name == "input":
        hook = lifecycle.calibrate_input_hook
        return [module.register_forward_pre_hook(hook, with_kwargs=True)]
    if base_name == "output":
        return [module.register_forward_hook(lifecycle.calibrate_output_hook)]
    if base_name == "q":
        return [register_query_hook(module, lifecycle.calibrate_query_hook)]
    if base_name == "k":
        return [register_key_hook(module, lifecycle.calibrate_key_hook)]
    if base_name == "v":
        return [register_value_hook(module, lifecycle.calibrate_value_hook)]
    return _register_gathering(module, observer) if isinstance(observer, GathersInputs) else []


def _register_gathering(module: Any, observer: GathersInputs) -> list[RemovableHandle]:
    if observer.take_over(module) or not observer.can_gather(module):
        return []
    observer.begin_gathering(module.in_features)
    hook = partial(lifecycle.gather_importance_hook, observer)
    return [module.register_forward_pre_hook(hook, with_kwargs=True)]


def _forget_sums(module: torch.nn.Module) -> None:
    """Let a gatherer begin anew, whatever an earlier one left."""
    for name in SquareSums.reductions:
        vars(module).pop(name, None)


def _learns(observer: Observer) -> bool:
    return observer.base_name != "weight" or gathers(observer)
