"""A model whose tensors are measured: hooks exist between entering and leaving a ``with``."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import torch
from compressed_tensors.modeling import initialize_hooked_attention, initialize_hooked_kv_cache
from compressed_tensors.offload import OffloadCache
from torch import Tensor
from torch.utils.hooks import RemovableHandle
from typing_extensions import Self

from calipers.calibration.partial_forward import STATE_HOOKS
from calipers.calibration.sharing import PairedTensors, QuantizedInputs, SharedInputs
from calipers.errors import ConfigurationError, LayoutError, TensorValueError
from calipers.measurements import Measurements
from calipers.measurements.tensors import FOLDS, Tensors, check_same
from calipers.numerics.qparams import ActivationQuantizer
from calipers.numerics.tensors import first_tensor, mask_for, token_mask
from calipers.planning.plan import Plan
from calipers.planning.specs import IMPORTANCE, ModuleKind, Requirement, TensorSpec
from calipers.runtime.precision import own_dtype
from calipers.statistics.base import Statistic
from calipers.statistics.tensor_statistics import TensorStatistics


class Snapshot:
    """Remembers every attribute, parameter, submodule and hook of every module of a model.

    No tensor is copied: what changes a tensor in place is not undone.

    >>> model = torch.nn.Sequential(torch.nn.Linear(2, 2))
    >>> before = Snapshot(model)
    >>> model[0].note, model[0].weight = "hello", None
    >>> before.restore()
    >>> hasattr(model[0], "note"), model[0].weight.shape
    (False, torch.Size([2, 2]))
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self._attention = [(config, config._attn_implementation) for config in _configs(model)]
        self._modules = {module: dict(vars(module)) for module in model.modules()}
        # Handles of hooks refer to the very dictionary the hook is in: its contents are restored.
        self._contents: dict[int, tuple[Any, Any]] = {}
        for attributes in self._modules.values():
            for value in attributes.values():
                content = value.offloaded_values if isinstance(value, OffloadCache) else value
                if isinstance(content, (dict, set, list)):
                    self._contents[id(content)] = content, content.copy()

    def restore(self) -> None:
        """Bring the model back."""
        for content, before in self._contents.values():
            content.clear()
            content.extend(before) if isinstance(content, list) else content.update(before)
        for module, attributes in self._modules.items():
            vars(module).clear()
            vars(module).update(attributes)
        for config, implementation in self._attention:
            # Not by the property, which sets it for all that belong to this config.
            config._attn_implementation_internal = implementation


@contextmanager
def left_as_found(model: torch.nn.Module) -> Iterator[None]:
    """Bring the model back when the block is left, by whichever way."""
    before = Snapshot(model)
    try:
        yield
    finally:
        before.restore()


@contextmanager
def unchanged_on_error(model: torch.nn.Module) -> Iterator[None]:
    """Bring the model back when the block is left by an exception."""
    before = Snapshot(model)
    try:
        yield
    except BaseException:
        before.restore()
        raise


def _configs(model: torch.nn.Module) -> list[Any]:
    """Return the configs of a model and its parts in which an attention implementation stands."""
    configs: dict[int, Any] = {}
    waiting = [getattr(module, "config", None) for module in model.modules()]
    while waiting:
        config: Any = waiting.pop()
        if id(config) not in configs and hasattr(config, "_attn_implementation_internal"):
            configs[id(config)] = config
            waiting += [getattr(config, name, None) for name in config.sub_configs]
    return list(configs.values())


def expose_states(model: Any, module: torch.nn.Module, kind: ModuleKind) -> None:
    """Let queries, keys and values of an attention module be looked at and quantized."""
    if kind == "kv_cache":
        initialize_hooked_kv_cache(model, module)
    elif kind == "attention":
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

        implementation = model.config._attn_implementation
        if implementation not in ALL_ATTENTION_FUNCTIONS:
            raise ConfigurationError(
                f"computes attention by '{implementation}', in which the queries cannot be seen "
                "or quantized",
                subject=type(model).__name__,
                hint='Call model.set_attn_implementation("sdpa") first, or quantize the keys and '
                "values alone (kv_cache_scheme)",
            )
        initialize_hooked_attention(model, module)


Measured: TypeAlias = dict[tuple[str, str], dict[str, Statistic]]
"""Statistics of a model: (module, tensor) → key → statistic."""


class _OtherFolds(NamedTuple):
    """What is measured of a tensor in all folds of the data but the first."""

    module: str
    base_name: str
    key: str
    statistics: tuple[Statistic, ...]


class Calibration:
    """A model whose tensors are measured as a plan asks.

    Within a ``with`` the modules have hooks; afterwards the model is as it was found, also after an
    exception. The measurements stay with this object. What the model computes is the same with and
    without them.

    :param share_inputs: whether a tensor that several modules read is measured once for all
    :param dtype: the dtype that the model will compute in, if not its own; what is measured is
        rounded to that of the module, in which its scales are judged and stored
    :param num_folds: how many folds of the data are measured apart of what a plan asks for in folds
    :param fold_of_batch: to which of them each batch belongs
    :param known: what was measured before of each fold; statistics go on from there, batch after
        batch, so that sums are the same to the bit as if they had not been interrupted
    :ivar folds: what was measured of each fold; the first has also what is not measured in folds
    """

    def __init__(
        self,
        model: torch.nn.Module,
        plan: Plan,
        *,
        share_inputs: bool = True,
        dtype: torch.dtype | None = None,
        num_folds: int = 1,
        fold_of_batch: Sequence[int] = (),
        known: Sequence[Tensors] | None = None,
    ) -> None:
        self.model, self.plan = model, plan
        self.folds = tuple(Measurements() for _ in range(num_folds))
        self._fold_of_batch, self._fold = fold_of_batch, 0
        self._known = known
        self._others: dict[Statistic, _OtherFolds] = {}  # of the first fold → of the others
        self._dtype = dtype
        self._handles: dict[str, list[RemovableHandle]] = defaultdict(list)
        self._sharing = SharedInputs(share=share_inputs)
        self._pairs = PairedTensors()
        self._together: dict[Statistic, TensorStatistics] = {}
        self._leaving = ExitStack()
        self._measured: Collection[str] | None = None
        self._quantized_inputs = QuantizedInputs()
        self._of_quantized: dict[Statistic, TensorSpec] = {}  # products → their input
        self._products: bool | None = None  # whether these are measured, or all else; None: all
        self._is_reference = False
        self._residuals: Mapping[str, str] = {}

    @property
    def measurements(self) -> Measurements:
        """What was measured of the first fold; of all data, where folds were added up."""
        return self.folds[0]

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            stack.enter_context(left_as_found(self.model))
            self.model.eval()
            for module in self.plan.modules:
                expose_states(self.model, self.module(module.name), module.kind)
            for name, requirements in self.plan.measured.items():
                if any(each.base_name in ("q", "k", "v") for each in requirements):
                    expose_states(self.model, self.module(name), "attention")
            self._measure()
            self._leaving = stack.pop_all()
        return self

    def __exit__(self, *exception: object) -> None:
        self._leaving.close()

    @contextmanager
    def batch(self, index: int, mask: Tensor | None = None) -> Iterator[None]:
        """Let one batch run through the model, or through a part of it.

        :param mask: which tokens count, shape (batch, sequence); None for all
        """
        self._fold = self._fold_of_batch[index] if len(self.folds) > 1 else 0
        try:
            with torch.no_grad(), token_mask(mask):
                yield
                self._sharing.settle()
                self._pairs.clear()
                self._quantized_inputs.clear()
        except TensorValueError as error:
            error.add_hint(f"It was batch {index}, the first one with such values.")
            raise

    @contextmanager
    def only(self, names: Collection[str]) -> Iterator[None]:
        """Let something run of which some modules alone are measured."""
        before, self._measured = self._measured, names
        try:
            yield
        finally:
            self._measured = before

    def paused(self) -> AbstractContextManager[None]:
        """Let something run through the model that is not measured."""
        return self.only(())

    @contextmanager
    def only_products(self, wanted: bool) -> Iterator[None]:
        """Measure the products of quantized inputs alone, or everything but these."""
        before, self._products = self._products, wanted
        try:
            yield
        finally:
            self._products = before

    def static_inputs(self, names: Iterable[str]) -> dict[str, TensorSpec]:
        """Return the inputs of which products are measured that static parameters quantize."""
        specs = {
            name: self._of_quantized.get(statistic)
            for name in names
            if (statistic := self.measurements.get(name, "input", IMPORTANCE)) is not None
        }
        return {n: spec for n, spec in specs.items() if spec is not None and spec.observer}

    def quantize_inputs(self, quantizers: Mapping[str, ActivationQuantizer]) -> None:
        """Measure the products of the inputs of some modules as they are when quantized."""
        self._quantized_inputs.quantizers.update(quantizers)

    @contextmanager
    def as_reference(self) -> Iterator[None]:
        """Let a batch run as it would without quantization, before it runs to be measured.

        What modules see meanwhile is kept until the end of the batch for statistics of pairs.
        """
        self._is_reference = True
        try:
            yield
        finally:
            self._is_reference = False

    @contextmanager
    def with_residuals(self, residuals: Mapping[str, str]) -> Iterator[None]:
        """Let statistics of pairs also see how that has changed to which outputs are added.

        :param residuals: module → the one whose input is added to its output
        """

        def see(name: str, tensor: Tensor) -> None:
            if self._is_reference:
                self._pairs.keep(name, tensor)
            else:
                self._pairs.note_change(name, tensor)

        handles = [
            _register_hook(self.module(name), "input", partial(see, name))
            for name in set(residuals.values())
        ]
        self._residuals = residuals
        try:
            yield
        finally:
            self._residuals = {}
            for handle in handles:
                handle.remove()

    def finish(self, names: Iterable[str]) -> None:
        """Measure some modules no longer; what was measured for them is theirs."""
        self._sharing.finish()
        for together in self._together.values():
            together.flush()
        names = list(names)
        for statistic in self.measured(names):
            self._together.pop(statistic, None)  # whoever solves them lets go of them
        self.remove_hooks(names)

    def remove_hooks(self, names: Iterable[str]) -> None:
        """Look no longer at some modules, whatever they go on to compute."""
        for name in names:
            for handle in self._handles.pop(name, ()):
                handle.remove()

    def add_up(self, names: Iterable[str]) -> None:
        """Let what was measured of some modules be of all data, and stand beside that of its folds.

        Those are all but the last, which is what the whole has beyond them.
        """
        names, done = list(names), dict[object, tuple[Statistic, ...]]()
        for whole in self.measurements.of(names):
            if whole not in self._others:
                continue
            name, base_name, key, others = self._others.pop(whole)
            # What modules share that read one tensor, they go on to share.
            known = str(whole.configuration()), *(each.origin() for each in (whole, *others))
            if known not in done:
                first = whole.empty()
                first.copy_from(whole)
                for each in others:
                    whole.absorb(**each.fields_to_share())
                done[known] = whole, first, *others
            added, *folds, _ = done[known]
            if added is not whole:
                whole.copy_from(added)
            for prefix, fold in zip(FOLDS, folds, strict=False):
                self.measurements.add(name, base_name, prefix + key, fold, is_optional=True)
        for other in self.folds[1:]:
            other.forget(names)

    def measured(self, names: Iterable[str]) -> list[Statistic]:
        """Return the statistics of some modules, of all folds."""
        names = list(names)
        return [statistic for fold in self.folds for statistic in fold.of(names)]

    def module(self, name: str) -> torch.nn.Module:
        """Return a module by its name."""
        return self.model.get_submodule(name)

    def tokens(self, name: str) -> int:
        """Return what a module has seen so far: the needed statistic that saw least counts."""
        counts = []
        for statistic in self.measurements.needed(name):
            others = self._others[statistic].statistics if statistic in self._others else ()
            counts.append(sum(self._holder(each).num_tokens for each in (statistic, *others)))
        return min(counts, default=0)

    def so_far(self) -> list[Measured]:
        """Return what was measured until now of each fold: (module, tensor) → key → statistic.

        Between two batches only; the next one goes on with the same statistics. What is not
        measured in folds is in the first.
        """
        return [
            {
                place: {key: self._holder(each) for key, each in statistics.items()}
                for place, statistics in fold.tensors().items()
            }
            for fold in self.folds
        ]

    def _holder(self, statistic: Statistic) -> Statistic:
        """Return the statistic that holds what another one was shown so far."""
        together = self._together.get(statistic)
        if together is None:
            return self._sharing.holder(statistic)
        return together.counterpart(statistic, self._sharing.holder(together))

    def _measure(self) -> None:
        """Begin all statistics, from what was measured before, and put hooks on for them."""
        inputs: dict[str, TensorSpec | None] = {}
        if self.plan.propagation != "float":  # products are of the numbers that kernels will see
            inputs = {module.name: module.tensor("input") for module in self.plan.modules}
        wanted: dict[str, list[Requirement]] = defaultdict(list)
        for name, requirements in self.plan.requirements(with_costs=self.plan.needs_data):
            wanted[name].extend(requirements)
        for name, requirements in wanted.items():
            hooked: dict[str, dict[Statistic, bool]] = defaultdict(dict)
            for each in requirements:
                statistic, is_complete = self._add(name, each)
                spec = inputs.get(name)
                if each.key == IMPORTANCE and spec is not None:
                    others = self._others.get(statistic)
                    products = statistic, *(() if others is None else others.statistics)
                    self._of_quantized |= dict.fromkeys(products, spec)
                    if spec.args.dynamic is True:
                        self.quantize_inputs({name: ActivationQuantizer("input", spec.args)})
                if not is_complete:
                    needed = hooked[each.base_name].get(statistic, False) or not each.is_optional
                    hooked[each.base_name][statistic] = needed
            hooked.pop("weight", None)  # what is measured of a weight, whoever runs the model adds
            for base_name, statistics in hooked.items():
                self._hook(name, base_name, statistics)
        if self._known is None:
            return
        known, self._known = self._known, None
        check_same(known[0], self.measurements.tensors())
        for measurements, of_fold in zip(self.folds, known, strict=True):
            for place, before in of_fold.items():
                for key, statistic in before.items():
                    mine = measurements.get(*place, key)
                    if mine is not None:
                        mine.copy_from(statistic)

    def _add(self, name: str, requirement: Requirement) -> tuple[Statistic, bool]:
        """Begin a statistic, and tell whether an earlier run has left all there is to it."""
        module, statistic = self.module(name), requirement.create(name)
        fields = requirement.published
        # What is being measured anew for others is not taken from an earlier run.
        is_complete = bool(fields) and name not in self.plan.measured
        is_complete = is_complete and all(hasattr(module, field) for field in fields)
        if is_complete:
            statistic.load_fields({field: getattr(module, field) for field in fields})
        kept = self.measurements.add(
            name,
            requirement.base_name,
            requirement.key,
            statistic,
            is_optional=requirement.is_optional,
            is_from_earlier_run=is_complete,
        )
        if len(self.folds) > 1 and requirement.in_folds and kept not in self._others:
            place = name, requirement.base_name, requirement.key
            others = [each.add(*place, requirement.create(name)) for each in self.folds[1:]]
            self._others[kept] = _OtherFolds(*place, tuple(others))
        return kept, is_complete

    def _hook(self, name: str, base_name: str, statistics: dict[Statistic, bool]) -> None:
        """Show a tensor to statistics, of which some are needed."""
        module = self.module(name)
        own = own_dtype(module)
        dtype = None if self._dtype in (None, own) else own
        needed_one = next((each for each, needed in statistics.items() if needed), None)
        has_pairs = any(statistic.takes_pairs for statistic in statistics)
        # What is shown the tensors of each fold of the data; most is shown those of all.
        first = {each: needed for each, needed in statistics.items() if each in self._others}
        rest = {each: needed for each, needed in statistics.items() if each not in self._others}
        folds = [first] + [
            {self._others[each].statistics[number]: needed for each, needed in first.items()}
            for number in range(len(self.folds) - 1)
        ]
        all_see = self._put_together(rest)
        shown = [{**self._put_together(fold), **all_see} for fold in folds]

        def see(tensor: Tensor) -> None:
            if self._measured is not None and name not in self._measured:
                return
            if self._is_reference:
                if has_pairs:
                    self._pairs.keep(name, tensor)
                return
            try:
                mask = mask_for(tensor, base_name, "" if needed_one is None else needed_one.label())
            except LayoutError:
                if needed_one is not None:
                    raise
                return
            holds_numbers = tensor.is_floating_point() and tensor.dtype.itemsize > 1
            for statistic, is_needed in shown[self._fold].items():
                is_of_quantized = statistic in self._of_quantized
                if self._products not in (None, is_of_quantized):
                    continue
                if is_needed or holds_numbers:
                    seen = self._quantized_inputs.of(name, tensor) if is_of_quantized else tensor
                    if statistic.takes_pairs:
                        seen = self._pairs.of(name, seen, self._residuals.get(name))
                    self._sharing.show(statistic, seen, mask, dtype)

        self._handles[name].append(_register_hook(module, base_name, see))

    def _put_together(
        self, statistics: dict[Statistic, bool]
    ) -> dict[Statistic | TensorStatistics, bool]:
        """Let one pass over a tensor serve as many as it can, needed or not; others stay alone."""
        served = {each: needed for each, needed in statistics.items() if each.takes_summaries}
        for is_needed in (True, False):
            alike = [each for each, needed in served.items() if needed == is_needed]
            if len(alike) > 1:
                self._together |= dict.fromkeys(alike, TensorStatistics(alike))
        return {self._together.get(each, each): needed for each, needed in statistics.items()}


def _register_hook(
    module: torch.nn.Module, base_name: str, see: Callable[[Tensor], None]
) -> RemovableHandle:
    """Show a tensor of a module, whenever it is computed, to a function that changes nothing."""

    def look(value: Any) -> None:
        tensor = first_tensor(value)
        if tensor is not None and tensor.numel():
            see(tensor)

    if base_name == "input":
        return module.register_forward_pre_hook(
            lambda _, args, kwargs: look((args, kwargs)), with_kwargs=True
        )
    if base_name == "output":
        return module.register_forward_hook(lambda _, _args, output: look(output))
    # Of queries after their positions are put in, of keys and values as they enter the cache.
    handle: RemovableHandle = STATE_HOOKS[base_name](module, lambda _, states: look(states))
    return handle
