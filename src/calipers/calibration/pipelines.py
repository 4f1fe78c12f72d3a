"""How data runs through a model: not at all, through the whole, or layer by layer."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from calipers.calibration.context import Calibration
from calipers.calibration.coverage import EarlyLook
from calipers.calibration.data import Batch, Batches, counted_tokens
from calipers.calibration.layer_stream import LayerStream
from calipers.calibration.partial_forward import (
    ActivationCache,
    Budget,
    NewValues,
    QuantizedForward,
    ResumePoints,
    StopForward,
    stop_after_calls,
)
from calipers.errors import ModelRunError, library_errors
from calipers.numerics.qparams import ActivationQuantizer
from calipers.observers.spec import COUNTS, RANGE
from calipers.planning.specs import TensorSpec
from calipers.runtime.precision import computing_in, free_memory, onloaded
from calipers.runtime.progress import Add, Progress
from calipers.runtime.ranks import Ranks
from calipers.topology.model import decoder_layers
from calipers.topology.tracing import (
    Stage,
    calls_of,
    residuals_of,
    stages_of,
    traced,
)


@dataclass(frozen=True)
class Part:
    """Modules that are ready to be solved together.

    :param names: theirs
    :param states: module → its tensors, if they were read from files for this part
    :param stream: the data of a whole layer whose modules were solved in parts before; None: the
        modules are to be solved
    :param is_final: whether they are not tuned together with the rest of their layer later on
    """

    names: tuple[str, ...]
    states: Mapping[str, dict[str, Tensor]] = field(default_factory=dict)
    stream: LayerStream | None = None
    is_final: bool = True


Parts = Generator[Part, NewValues, None]
"""Yields the parts of a model; each ``yield`` returns the new values that later parts must see."""


@dataclass(frozen=True)
class Run:
    """What a pipeline works with.

    :param device: where the model, or the layer at work, computes
    :param dtype: in which it does; None: its own
    :param early: warns of modules that no token has reached, while the data still runs
    :param after_batch: is called, with its number, when a batch has run through the whole model
    :param what: what is done with the data, as people are told
    """

    calibration: Calibration
    ranks: Ranks
    progress: Progress
    device: torch.device
    dtype: torch.dtype | None = None
    early: EarlyLook | None = None
    after_batch: Callable[[int], None] | None = None
    what: str = "calibrating"

    def counting_tokens(self, batches: Batches) -> AbstractContextManager[Add]:
        """Show how many tokens have run."""
        return self.progress.counting(self.what, batches.num_tokens, "tokens")

    def finish(self, names: Iterable[str]) -> Part:
        """End the measuring of some modules, which can be solved then."""
        part = Part(tuple(names))
        self.calibration.finish(part.names)
        return part


def run_datafree(run: Run, _: Batches | None = None) -> Parts:
    """Run no data: all modules can be solved at once."""
    yield run.finish(run.calibration.plan.names)


def run_basic(run: Run, batches: Batches) -> Parts:
    """Run each batch through the whole model."""
    calibration = run.calibration
    model = calibration.model
    head = getattr(model, "get_output_embeddings", lambda: None)()
    idle = [name for name, module in model.named_modules() if module is head]
    if any(map(calibration.measurements.needed, idle)):
        idle = []
    calibration.remove_hooks(idle)
    with onloaded([model], run.device):
        with (
            run.ranks.step("calibrating the model"),
            computing_in(run.dtype, [model]),
            run.counting_tokens(batches) as add,
        ):
            for index, batch in enumerate(batches):
                run.ranks.check()
                counted = counted_tokens(batch)
                with calibration.batch(index, counted):
                    call_model(model, moved(batch, run.device), skip_head=bool(idle))
                add(int(counted.sum()))
                if run.early is not None:
                    run.early.after(index, len(batches), calibration.plan.names)
                if run.after_batch is not None:
                    run.after_batch(index)
        yield run.finish(calibration.plan.names)


def call_model(model: torch.nn.Module, batch: Batch, *, skip_head: bool = False) -> Any:
    """Run a batch without a cache and, where the model can, without logits that nobody needs.

    Tokens have the positions they would have without padding. What no module takes is left out,
    such as columns that only data sets and trainers need.
    """
    accepted = inspect.signature(model.forward).parameters
    kwargs: dict[str, Any] = {"use_cache": False, "logits_to_keep": 1 if skip_head else 0}
    mask = batch.get("attention_mask")
    if mask is not None and not bool(mask.all()):
        kwargs["position_ids"] = (mask.cumsum(-1) - 1).clamp(min=0)
    wanted = {name: value for name, value in kwargs.items() if name in accepted}
    extra = batch.keys() - {"input_ids", "attention_mask"}
    if extra:
        # Models hand keywords that they do not know to their parts, so the parts are asked, too.
        forwards = {type(module).forward for module in model.modules()}
        known = {name for each in forwards for name in inspect.signature(each).parameters}
        batch = {name: value for name, value in batch.items() if name not in extra - known}
    with errors_of_forward(model):
        return model(**{**wanted, **batch})


def errors_of_forward(model: torch.nn.Module) -> AbstractContextManager[None]:
    """Tell what a model raises while it runs as an error about the model."""

    def error_of(words: str) -> ModelRunError:
        return ModelRunError(
            f"failed while data ran through it: {words}",
            subject=type(model).__name__,
            hint="If it fails in transformers by itself, too, compare its config.json with the "
            "original",
        )

    return library_errors(error_of)


def moved(value: Any, device: torch.device) -> Any:
    """Return a structure with its tensors on a device."""
    return tree_map_only(Tensor, lambda tensor: tensor.to(device), value)


# One decoder layer at a time, for models larger than the device that computes

Call = tuple[tuple[Any, ...], dict[str, Any]]

_SPARED = 8  # of free memory, an eighth is for activations that are needed again


def run_sequential(run: Run, batches: Batches) -> Parts:
    """Run all batches through one layer after another.

    Only the layer at work is on the device. Between layers the hidden states of all batches are
    where the batches are; a layer can be solved as soon as its data is through.
    """
    layers, names = decoder_layers(run.calibration.model), run.calibration.plan.names
    stack = LayerStack(run, list(layers.values()))
    # A module that several layers share is ready with the last of them.
    last = {module: prefix for prefix, layer in layers.items() for module in layer.modules()}
    inside: dict[str, list[str]] = {prefix: [] for prefix in layers}
    for name in names:
        layer_of = last.get(run.calibration.module(name))
        if layer_of is not None:
            inside[layer_of].append(name)
    layered = set(chain.from_iterable(inside.values()))
    outside = [name for name in names if name not in layered]
    with run.ranks.step("embedding the data"), run.progress.waiting("embedding the data"):
        stack.enter(batches)
    # What lies before the layers has seen its data by now; what lies behind them has not.
    shared = run.ranks.share({name for name in outside if run.calibration.tokens(name)})
    before = [name for name in outside if name in set().union(*shared)]
    yield run.finish(before)
    in_stages = run.calibration.plan.propagation != "float"
    by_layer = run.progress.counting(run.what, len(layers), "layers")
    with by_layer if in_stages else run.counting_tokens(batches) as add:
        for number, (prefix, layer) in enumerate(layers.items()):
            with onloaded([layer], run.device):
                if not in_stages:
                    with stack.at_work(prefix, layer):
                        stack.run_layer(number, inside[prefix], add)
                    yield run.finish(inside[prefix])
                else:
                    yield from _run_in_stages(stack, number, prefix, inside[prefix], add)
    behind = [name for name in outside if name not in before]
    if any(map(run.calibration.measurements.needed, behind)):
        what = "calibrating what comes after the layers"
        with run.ranks.step(what), run.progress.waiting(what):
            stack.leave(batches)
    yield run.finish(behind)


def _run_in_stages(
    stack: LayerStack, number: int, prefix: str, names: list[str], add: Add
) -> Parts:
    """Give the modules of a layer one after another, each calibrated on what the others became."""
    run, layer = stack.run, stack.layers[number]
    solved = QuantizedForward(run.calibration.model, run.device, run.dtype)
    with stack.at_work(prefix, layer):
        mine = [(s.names, s.calls, s.residuals) for s in stack.stages(number, prefix, names)]
    # Routers may send the first batches of processes to different experts: one decides for all.
    stages = [Stage(*stage) for stage in next(filter(None, run.ranks.share(mine)), ())]
    unsolved = [name for stage in stages for name in stage.names]
    share = 1 / (len(stages) + 1)  # of the layer; the last one is for what comes out of it
    batch_done = partial(add, share * stack.share_of_batch)
    is_tuned = run.calibration.plan.tunes_layers and bool(stages)
    for stage in stages:
        short_names = dict.fromkeys(name.rpartition(".")[2] for name in stage.names)
        add(0, f"layer {number + 1}, {', '.join(short_names)}")
        with stack.at_work(prefix, layer):
            stack.measure(number, stage, solved, unsolved, batch_done)
        solved.add((yield replace(run.finish(stage.names), is_final=not is_tuned)))
        unsolved = unsolved[len(stage.names) :]
    with stack.at_work(prefix, layer):
        stack.advance_reference(number)
    if is_tuned:
        stream = stack.stream(number, prefix, solved)
        solved.add((yield Part(tuple(names), stream=stream)))
    with stack.at_work(prefix, layer):
        stack.advance(number, solved, batch_done)


class LayerStack:
    """The layers of a model, with what goes into the next of them for each batch."""

    def __init__(self, run: Run, layers: Sequence[torch.nn.Module]) -> None:
        self.run, self.layers = run, layers
        self._hidden: list[Tensor] = []
        self._reference: list[Tensor] = []  # what they would be if nothing were quantized
        self._masks: list[Tensor] = []
        self._calls: list[list[Call]] = []
        self._beside: tuple[Any, ...] | None = None  # what a layer returns beside hidden states
        self._caches: dict[bool, ActivationCache] = {}  # of the layer at work: is reference → its

    @property
    def share_of_batch(self) -> float:
        """What one batch is of all of them."""
        return 1 / max(1, len(self._hidden))

    def enter(self, batches: Batches) -> None:
        """Run what comes before the layers, and note what each layer is called with."""
        with self._rest_onloaded(), _own_forwards(self.layers):
            for index, batch in enumerate(batches):
                if index == 0:
                    self._beside = self._learn_result(batch)
                calls: list[Call] = []
                for layer in self.layers:
                    vars(layer)["forward"] = self._noting(calls, batch["input_ids"].device)
                counted = counted_tokens(batch)
                with self.run.calibration.batch(index, counted):
                    self._start(batch)
                self._calls.append(calls)
                self._masks.append(counted)
        if self.run.calibration.plan.propagation == "both":
            self._reference = list(self._hidden)

    def run_layer(self, number: int, names: list[str], add: Add) -> None:
        """Run all batches through a layer, and tell the progress of each.

        :param names: the modules of the layer that are to see data
        """
        for index, hidden in enumerate(self._hidden):
            self.run.ranks.check()
            with self.run.calibration.batch(index, self._masks[index]):
                self._hidden[index] = self._through(number, index, hidden)
            add(int(self._masks[index].sum()) / len(self.layers))
            self._look_early(index, names)

    @contextmanager
    def at_work(self, prefix: str, layer: torch.nn.Module) -> Iterator[None]:
        """Have a layer ready to compute."""
        with (
            self.run.ranks.step(f"calibrating {prefix}"),
            computing_in(self.run.dtype, [layer]),
        ):
            yield

    def stages(self, number: int, prefix: str, names: list[str]) -> list[Stage]:
        """Trace in which order the modules of a layer work; none where there is no data.

        From then on activations of the layer are kept, in as much memory as can be spared.
        """
        if not self._hidden:
            return []
        with (
            torch.no_grad(),
            self.run.calibration.paused(),
            traced(prefix, self.layers[number]) as trace,
        ):
            self._through(number, 0, self._hidden[0])
        residuals = residuals_of(trace, names) if self._reference else {}
        submodules = self.layers[number].named_modules()
        inside = {f"{prefix}.{name}": module for name, module in submodules if name}
        points = ResumePoints.of(trace, inside, residuals.values())
        budget = Budget(free_memory(self.run.device) // _SPARED)
        streams = (False, True) if self._reference else (False,)
        self._caches = {is_reference: ActivationCache(points, budget) for is_reference in streams}
        return [
            stage._replace(residuals={n: residuals[n] for n in stage.names if n in residuals})
            for stage in stages_of(calls_of(trace, names), names)
        ]

    def measure(
        self,
        number: int,
        stage: Stage,
        solved: QuantizedForward,
        unsolved: Sequence[str],
        told: Callable[[], None],
    ) -> None:
        """Run all batches through a layer for the sake of some of its modules.

        :param unsolved: the modules of the layer that are still to be solved, these among them
        :param told: is called after each batch
        """
        calibration = self.run.calibration
        static = calibration.static_inputs(stage.names)
        if static:  # before their products: how they are quantized
            with calibration.only_products(False):
                self._run_stage(number, stage, solved, unsolved)
            calibration.quantize_inputs(self._solve_inputs(static))
        with calibration.only_products(True) if static else nullcontext():
            self._run_stage(number, stage, solved, unsolved, told)

    def _solve_inputs(self, inputs: Mapping[str, TensorSpec]) -> dict[str, ActivationQuantizer]:
        """Find the parameters of static inputs from what all processes have seen."""
        so_far = self.run.calibration.so_far()[0]  # parameters are of all data
        measured = {
            name: {k: deepcopy(s) for k, s in so_far[name, "input"].items() if k in (RANGE, COUNTS)}
            for name in inputs
        }
        self.run.ranks.merge([s for statistics in measured.values() for s in statistics.values()])
        solved = {}
        for name, spec in inputs.items():
            assert spec.observer is not None
            qparams = spec.observer.solve_stream(measured[name], name)
            if qparams is not None:
                solved[name] = ActivationQuantizer("input", spec.args, qparams)
        return self.run.ranks.share(solved)[0]

    def _run_stage(
        self,
        number: int,
        stage: Stage,
        solved: QuantizedForward,
        unsolved: Sequence[str],
        told: Callable[[], None] | None = None,
    ) -> None:
        """Run all batches through a layer as far as the modules of a stage."""
        calibration = self.run.calibration
        modules = [calibration.module(name) for name in stage.names]
        measured = calibration.measurements.tensors()
        # States of attention are inside of it.
        inner = ("output", "q", "k", "v")
        with_outputs = any((name, base) in measured for name in stage.names for base in inner)
        for index, hidden in enumerate(self._hidden):
            self.run.ranks.check()
            with (
                calibration.batch(index, self._masks[index]),
                calibration.only(stage.names),
                calibration.with_residuals(stage.residuals),
            ):
                if self._reference:
                    with (
                        calibration.as_reference(),
                        self._resuming(index, unsolved, is_reference=True),
                        stop_after_calls(modules, stage.calls),
                    ):
                        self._through(number, index, self._reference[index])
                # What is kept to resume from is not quantized yet: its hooks come first.
                with (
                    self._resuming(index, unsolved),
                    solved.in_place(),
                    stop_after_calls(modules, stage.calls, with_outputs=with_outputs),
                ):
                    self._through(number, index, hidden)
            self._look_early(index, stage.names)
            if told is not None:
                told()

    def advance_reference(self, number: int) -> None:
        """Run all batches through a layer as it was, if there is a stream without quantization."""
        for index, hidden in enumerate(self._reference):
            self.run.ranks.check()
            with (
                torch.no_grad(),
                self.run.calibration.paused(),
                self._resuming(index, (), is_reference=True),
            ):
                self._reference[index] = self._through(number, index, hidden)
        if True in self._caches:
            self._caches[True].clear()

    def advance(self, number: int, solved: QuantizedForward, told: Callable[[], None]) -> None:
        """Run all batches through a layer as it has become; ``told`` is called after each."""
        for index, hidden in enumerate(self._hidden):
            self.run.ranks.check()
            with (
                torch.no_grad(),
                self.run.calibration.paused(),
                self._resuming(index, ()),
                solved.in_place(),
            ):
                self._hidden[index] = self._through(number, index, hidden)
            told()
        self._caches.clear()

    def stream(self, number: int, prefix: str, solved: QuantizedForward) -> LayerStream:
        """Return what goes into a layer, and what the float one makes of the float stream."""

        @contextmanager
        def ready() -> Iterator[None]:
            layer = self.layers[number]
            with computing_in(self.run.dtype, [layer]), self.run.calibration.paused():
                yield

        def run(index: int) -> Tensor:
            return self._through(number, index, self._hidden[index])

        return LayerStream(
            prefix, self.run.device, self._reference, self._masks, run, solved, ready
        )

    def _resuming(
        self, index: int, unsolved: Sequence[str], *, is_reference: bool = False
    ) -> AbstractContextManager[None]:
        """Let a batch run through a layer from where earlier runs have come to."""
        modules = [self.run.calibration.module(name) for name in unsolved]
        return self._caches[is_reference].run(index, modules, is_changing=not is_reference)

    def _through(self, number: int, index: int, hidden: Tensor) -> Tensor:
        """Run a batch through a layer."""
        layer, device = self.layers[number], self.run.device
        args, kwargs = moved(self._calls[index][number], device)
        with errors_of_forward(layer):
            result = layer(hidden.to(device), *args, **kwargs)
        output: Tensor = result[0] if isinstance(result, tuple) else result
        return output.to(hidden.device)

    def _look_early(self, index: int, names: list[str]) -> None:
        if self.run.early is not None and names:
            self.run.early.after(index, len(self._hidden), names)

    def leave(self, batches: Batches) -> None:
        """Run what comes behind the layers."""
        with self._rest_onloaded(), _own_forwards(self.layers):
            for index, batch in enumerate(batches):
                final = self._hidden[index].to(self.run.device)
                for layer in self.layers:
                    vars(layer)["forward"] = lambda *_, final=final, **__: self._as_result(final)
                with self.run.calibration.batch(index, self._masks[index]):
                    call_model(self.run.calibration.model, moved(batch, self.run.device))

    def _noting(self, calls: list[Call], home: torch.device) -> Callable[..., Any]:
        """Return what stands for a layer: it notes the call and hands the hidden states on."""

        def forward(hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
            if not calls:
                self._hidden.append(hidden_states.to(home))
            calls.append((args, kwargs))
            if len(calls) == len(self.layers):
                raise StopForward  # the rest of the model need not run
            return self._as_result(hidden_states)

        return forward

    def _start(self, batch: Batch) -> None:
        with suppress(StopForward):
            call_model(self.run.calibration.model, moved(batch, self.run.device))

    def _as_result(self, hidden: Tensor) -> Any:
        return hidden if self._beside is None else (hidden, *self._beside)

    def _learn_result(self, batch: Batch) -> tuple[Any, ...] | None:
        """Find out what a layer returns in a tuple with its hidden states, unseen by observers."""
        first = self.layers[0]
        calls: list[Call] = []
        with torch.no_grad(), self.run.calibration.paused():

            def forward(*args: Any, **kwargs: Any) -> Any:
                calls.append((args, kwargs))
                raise StopForward

            with _own_forwards([first]):
                vars(first)["forward"] = forward
                self._start(batch)
            args, kwargs = calls[0]
            with onloaded([first], self.run.device), computing_in(self.run.dtype, [first]):
                result = first(*args, **kwargs)
            return result[1:] if isinstance(result, tuple) else None

    @contextmanager
    def _rest_onloaded(self) -> Iterator[None]:
        """Have everything ready to compute but the layers."""
        within = {module for layer in self.layers for module in layer.modules()}
        rest = [m for m in self.run.calibration.model.modules() if m not in within]
        with (
            onloaded(rest, self.run.device, recurse=False),
            computing_in(self.run.dtype, rest, recurse=False),
        ):
            yield


@contextmanager
def _own_forwards(layers: Sequence[torch.nn.Module]) -> Iterator[None]:
    """Bring the forward of each layer back in the end; hooks wait until it is the layer's turn."""
    own = [vars(layer).get("forward") for layer in layers]
    # Handles of hooks refer to the very dictionary the hook is in: its contents are restored.
    kept = [(h, h.copy()) for m in layers for h in (m._forward_pre_hooks, m._forward_hooks)]
    try:
        for hooks, _ in kept:
            hooks.clear()
        yield
    finally:
        for hooks, content in kept:
            hooks.update(content)
        for layer, forward in zip(layers, own, strict=True):
            vars(layer).pop("forward", None)
            if forward is not None:
                vars(layer)["forward"] = forward
