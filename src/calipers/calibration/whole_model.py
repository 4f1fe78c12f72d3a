"""Forward passes of a whole model: as it was, and as it becomes, with gradients where wanted."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial, wraps
from typing import Any, TypeAlias

import torch
from compressed_tensors.offload import OffloadCache
from compressed_tensors.quantization import QuantizationArgs
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from calipers.calibration.data import Batch, Batches, counted_tokens
from calipers.calibration.partial_forward import replace_activation, replace_forward
from calipers.calibration.pipelines import call_model, moved
from calipers.errors import ConfigurationError, DataError, Option, counted
from calipers.numerics.qparams import ActivationQuantizer, fake_quantize
from calipers.observers import QParamsDict
from calipers.planning.plan import Changes
from calipers.planning.specs import ModuleSpec
from calipers.runtime.precision import bytes_of_copies, computing_in, free_memory, onloaded
from calipers.runtime.progress import Progress
from calipers.runtime.ranks import Ranks
from calipers.topology.model import Topology

LEAST_HELD_OUT = 2  # samples
FEWEST = 2 * LEAST_HELD_OUT
_COPIES_OF_LOGITS = 6  # of both models, their logarithms, and gradients
_LOGITS_AT_ONCE = 1 << 26  # numbers; several samples share a forward pass up to here

Values: TypeAlias = Mapping[tuple[str, str], Callable[[], Tensor]]
"""(module, tensor) → what finds its value each time that it is needed."""


@dataclass(frozen=True)
class WholeModel:
    """A model in memory, all of whose parts are solved, and the data of this process.

    :param modules: those that are quantized
    :param changes: what was solved; the model is still as it was
    :param device: where the model computes
    :param dtype: in which it does; None: its own
    """

    model: torch.nn.Module
    modules: tuple[ModuleSpec, ...]
    changes: Changes
    batches: Batches
    device: torch.device
    dtype: torch.dtype | None
    ranks: Ranks
    progress: Progress

    def stored(self, name: str, local: str) -> Tensor:
        """Return a tensor as it was solved, or else as it is, in its own dtype."""
        new = self.changes.tensors.get((name, local))
        found = getattr(self.model.get_submodule(name), local) if new is None else new
        assert isinstance(found, Tensor)
        return found.detach()

    @contextmanager
    def ready(self) -> Iterator[None]:
        """Have the model ready to compute, with no gradients to what it consists of."""
        before = {parameter: parameter.requires_grad for parameter in self.model.parameters()}
        with onloaded([self.model], self.device), computing_in(self.dtype, [self.model]):
            self.model.requires_grad_(False)
            try:
                yield
            finally:
                for parameter, requires_grad in before.items():
                    parameter.requires_grad_(requires_grad)

    def quantized_weights(self) -> Iterator[tuple[str, QuantizationArgs, QParamsDict]]:
        """Go through the weights that are quantized, with their parameters on the device."""
        for module in self.modules:
            spec, qparams = (
                module.tensor("weight"),
                self.changes.qparams.get((module.name, "weight")),
            )
            if spec is not None and qparams is not None:
                yield module.name, spec.args, moved(dict(qparams), self.device)

    def solved(self) -> Values:
        """Return the values that the model would compute with if it were frozen now."""
        values: dict[tuple[str, str], Callable[[], Tensor]] = {
            place: partial(torch.Tensor.detach, tensor)
            for place, tensor in self.changes.tensors.items()
        }
        for name, args, qparams in self.quantized_weights():
            weight = self.stored(name, "weight").to(self.device)
            values[name, "weight"] = partial(fake_quantize, weight, args=args, **qparams)
        return values

    def samples(self, held_out: float, batch_size: int, seed: int) -> Samples:
        """Choose the samples that are held out, a part of those of all processes.

        :param batch_size: samples of a step, of all processes
        """
        counts = self.ranks.share(self.batches.num_samples)
        before, total = sum(counts[: self.ranks.rank]), sum(counts)
        chosen = torch.randperm(total, generator=torch.Generator().manual_seed(seed))
        most = total - LEAST_HELD_OUT  # as many at least are trained on
        apart = set(chosen[: min(max(LEAST_HELD_OUT, round(held_out * total)), most)].tolist())
        training: list[Batch] = []
        judged: list[Batch] = []
        mine = -(-batch_size // self.ranks.world_size)
        for batch in self.batches:
            rows, length = batch["input_ids"].shape
            fitting = max(1, _LOGITS_AT_ONCE // (length * _vocabulary(self.model)))
            size = min(mine, fitting)
            held = [row for row in range(rows) if before + row in apart]
            if any(len(value) != rows for value in batch.values()):  # cannot be taken apart
                held, size, fitting = [*range(rows)] if before in apart else [], rows, rows
            rest = [row for row in range(rows) if row not in held]
            judged += (rows_of(batch, held[i : i + fitting]) for i in range(0, len(held), fitting))
            training += (rows_of(batch, rest[i : i + size]) for i in range(0, len(rest), size))
            before += rows
        mine_steps = _grouped(training, mine)
        longest = max(self.ranks.share(len(mine_steps)))
        return Samples(tuple(training), tuple(judged), mine, longest, seed + self.ranks.rank)

    def predictions(self, batch: Batch) -> tuple[Tensor, int]:
        """Run a batch; return the logits where the next token counts, and how many these are."""
        batch = moved(batch, self.device)
        counted = batch["attention_mask"][:, :-1].bool() & counted_tokens(batch)[:, 1:].bool()
        logits: Tensor = call_model(self.model, batch).logits[:, :-1][counted]
        return logits, len(logits)

    @contextmanager
    def quantized(self, values: Values) -> Iterator[None]:
        """Let the model compute with other values, and with quantized activations.

        Those of a decoder layer are found when it runs, and, if gradients are wanted, once more
        when these are: only one layer's are there at a time. So are activations inside of it.
        """
        topology = Topology.of(self.model)
        by_layer: dict[str | None, dict[tuple[str, str], Callable[[], Tensor]]] = defaultdict(dict)
        for place, value in values.items():
            by_layer[topology.layer_of(place[0])][place] = value
        with ExitStack() as stack:
            for name, quantize in activation_quantizers(self.modules, self.changes):
                module = self.model.get_submodule(name)
                stack.callback(replace_activation(module, quantize).remove)
            stack.enter_context(self._in_place(by_layer.pop(None, {})))
            for layer in topology.layers:
                module = self.model.get_submodule(layer)
                replace_forward(stack, module, self._layer_forward(module, by_layer[layer]))
            yield

    def _layer_forward(self, layer: torch.nn.Module, values: Values) -> Callable[..., Any]:
        compute = layer.forward

        def run(*args: Any, **kwargs: Any) -> Any:
            with self._in_place(values):
                return compute(*args, **kwargs)

        @wraps(compute)  # hooks read the signature
        def forward(*args: Any, **kwargs: Any) -> Any:
            if not torch.is_grad_enabled():
                return run(*args, **kwargs)
            return checkpoint(run, *args, use_reentrant=False, **kwargs)

        return forward

    @contextmanager
    def _in_place(self, values: Values) -> Iterator[None]:
        with ExitStack() as stack:
            for (name, local), value in values.items():
                module = self.model.get_submodule(name)
                tensor = value()
                # Found before the parameter of this name.
                vars(module)[local] = tensor.to(self.device, self.dtype or tensor.dtype)
                stack.callback(vars(module).pop, local, None)
            yield


def check_whole_model(
    model: Any,
    modules: Iterable[ModuleSpec],
    batches: Batches,
    device: torch.device,
    dtype: torch.dtype,
    ranks: Ranks,
) -> None:
    """Refuse a model, or data, with which nothing can work on the whole model in the end."""
    problem = "cannot be worked on as a whole, as the recipe has it"
    if any(isinstance(module._parameters, OffloadCache) for module in model.modules()):
        raise ConfigurationError(
            problem + ": its tensors are offloaded",
            subject=type(model).__name__,
            hint="Load it into memory ("
            + Option("pipeline", "sequential")
            + " leaves a model that is loaded from a folder on disk), or take the step out of the "
            "recipe",
        )
    samples = sum(ranks.share(batches.num_samples))
    if samples < FEWEST:
        raise DataError(
            f"has {counted(samples, 'sample')}: too few to train on some and judge by others",
            subject="The data",
            hint=f"Give at least {FEWEST} samples, or take the step out of the recipe",
        )
    numbers = sum(model.get_submodule(m.name).weight.numel() for m in modules if m.tensor("weight"))
    longest = max((batch["input_ids"].shape[1] for batch in batches), default=0)
    logits = max(_LOGITS_AT_ONCE, longest * _vocabulary(model))
    # Codes, new weights, the model in the dtype it computes in, and logits with their gradients.
    needed = numbers * 4 + bytes_of_copies(model, dtype, device) + logits * 4 * _COPIES_OF_LOGITS
    if needed > (free := free_memory(device)):
        raise ConfigurationError(
            f"{problem}: that takes about {needed / 1e9:.1f} GB of memory, and {device} has "
            f"{free / 1e9:.1f} GB left",
            subject=type(model).__name__,
            hint="Take the step out of the recipe, or give shorter samples ("
            + Option("max_seq_length")
            + ") or more memory",
        )


def _vocabulary(model: Any) -> int:
    """Return how many logits a token has."""
    return int(getattr(model.config.get_text_config(), "vocab_size", 1))


@dataclass(frozen=True)
class Samples:
    """The samples of this process: those that a model is trained on, and those held out.

    :param size: samples of a step
    :param steps_per_epoch: the same in all processes
    """

    training: tuple[Batch, ...]
    held_out: tuple[Batch, ...]
    size: int
    steps_per_epoch: int
    seed: int

    def steps(self) -> Iterator[list[Batch]]:
        """Go through the batches of each step, epoch after epoch, in an order that is drawn."""
        generator = torch.Generator().manual_seed(self.seed)
        while True:
            order = torch.randperm(len(self.training), generator=generator).tolist()
            groups = _grouped([self.training[index] for index in order], self.size)
            groups = groups[: self.steps_per_epoch]
            # A process with fewer samples than others has nothing to add to the last steps.
            yield from (*groups, *([[]] * (self.steps_per_epoch - len(groups))))


def _grouped(batches: Sequence[Batch], size: int) -> list[list[Batch]]:
    """Put batches together until each group has so many samples."""
    groups: list[list[Batch]] = []
    left = 0
    for batch in batches:
        if left <= 0:
            groups.append([])
            left = size
        groups[-1].append(batch)
        left -= len(batch["input_ids"])
    return groups


def rows_of(batch: Batch, rows: Sequence[int]) -> Batch:
    """Return some samples of a batch."""
    if len(rows) == len(batch["input_ids"]):
        return batch
    return {name: value[list(rows)] for name, value in batch.items()}


def activation_quantizers(
    modules: Iterable[ModuleSpec], changes: Changes
) -> Iterator[tuple[str, ActivationQuantizer]]:
    """Go through the activations that a frozen model quantizes."""
    for module in modules:
        for spec in module.tensors:
            qparams = changes.qparams.get((module.name, spec.base_name))
            # One without data is left as it is, unless it follows from each value.
            if spec.base_name != "weight" and (qparams is not None or spec.args.dynamic is True):
                yield module.name, ActivationQuantizer(spec.base_name, spec.args, qparams or {})
