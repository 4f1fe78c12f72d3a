"""Any number of checkpoints beside the model they were made from, on the same text."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from calipers.calibration.data import Batch, Batches, calibration_batches, counted_tokens, limits_of
from calipers.calibration.data.columns import check_mask
from calipers.calibration.pipelines import call_model, moved
from calipers.checkpoint.headers import size_on_disk
from calipers.checkpoint.reader import load_model, load_tokenizer, loading_counted
from calipers.errors import (
    CalipersWarning,
    ConfigurationError,
    Option,
    TensorValueError,
    empty_data,
)
from calipers.evaluation.bootstrap import Bootstrap, Sums
from calipers.evaluation.loading import Checkpoint, find_checkpoint, hide_library_bars
from calipers.evaluation.noise import FACTOR, batches_to_repeat, noise_in_nats, rounded_otherwise
from calipers.evaluation.results import (
    BASE,
    CheckpointScores,
    Evaluation,
    Scores,
    difference,
    key,
    perplexity,
)
from calipers.evaluation.scoring import LayerComparison, LayerError, score
from calipers.options import ComputeOptions, DataOptions, EvaluateKeywords, EvaluateOptions
from calipers.runtime.offloading import without_accelerate_hooks
from calipers.runtime.precision import (
    computing_in,
    dtype_choice,
    forward_dtype,
    onloaded,
    usable_device,
)
from calipers.runtime.progress import Progress

if TYPE_CHECKING:
    from transformers import PreTrainedModel
    from typing_extensions import Unpack

    from calipers.evaluation.loading import Source


FEW_SAMPLES = 20
_SHAPE = ("vocab_size", "hidden_size", "num_hidden_layers")
_KEPT_LOGITS = 1 << 28
"""How many logits of the float model are kept, instead of computed anew for each checkpoint."""


class Comparison:
    """Runs one checkpoint after another beside the float model, and adds up what each loses."""

    def __init__(
        self,
        base: PreTrainedModel,
        batches: Batches,
        progress: Progress,
        compute: ComputeOptions,
        *,
        measure_layers: bool,
    ) -> None:
        choice = dtype_choice(compute.dtype)
        self._device = usable_device(compute.device) or base.device
        self._dtype = forward_dtype(choice, base, self._device)
        if choice == "auto" and self._dtype != base.dtype:
            own, chosen = (str(each).removeprefix("torch.") for each in (base.dtype, self._dtype))
            warning = CalipersWarning(
                f"This CPU has no {own} instructions: the models compute in {chosen}, with the "
                f"weights that they have in {own}",
                hint=Option("dtype", own) + " is slower, and closer to what others run.",
            )
            warnings.warn(warning, stacklevel=3)
        self._base, self._batches = base, batches
        self._progress, self._measure_layers = progress, measure_layers
        self._done: dict[str, Checkpoint] = {}
        self._layers: dict[str, tuple[LayerError, ...]] = {}
        self._noise: dict[str, float] = {}
        self._sums: dict[str, Tensor] = {}
        self._vocabulary = getattr(base.config.get_text_config(), "vocab_size", None)
        places = sum(batch["input_ids"].numel() for batch in batches)
        are_few = places * (self._vocabulary or _KEPT_LOGITS) <= _KEPT_LOGITS
        # With layers, the float model must run again anyway.
        self._kept: list[Tensor] | None = [] if are_few and not measure_layers else None

    def run_base(self) -> None:
        """Run the float model alone."""
        found: list[dict[str, Tensor]] = []
        with onloaded([self._base], self._device), computing_in(self._dtype, [self._base]):
            for number, batch in self._counted("the float model", found):
                logits = self._logits(self._base, batch)
                if self._kept is not None:
                    self._kept.append(logits.cpu())
                found.append(self._scored("the float model", number, logits, batch, None))
            sums = _joined(found)
            if not sums["tokens"].any():
                what = "has only samples of one token, which predict none"
                raise empty_data("The data", what)
            self._measure_noise(BASE, self._base, found)
        samples = int((sums["tokens"] > 0).sum())
        if samples < FEW_SAMPLES:
            warnings.warn(
                f"Only {samples} samples were evaluated: the intervals, which come from drawing "
                f"samples, are unreliable. Use at least {FEW_SAMPLES}, better hundreds.",
                CalipersWarning,
                stacklevel=3,
            )
        self._sums |= {"tokens": sums["tokens"], key("nll", BASE): sums["nll"]}

    def load_and_run(self, checkpoint: Checkpoint, *, trust_remote_code: bool) -> None:
        """Load a checkpoint, run it beside the float model, and let go of it."""
        with hide_library_bars(), checkpoint.failures_explained():
            loading = self._progress.waiting(f"loading {checkpoint.name}")
            with loading as begin, loading_counted(begin):
                model = checkpoint.load(trust_remote_code=trust_remote_code)
            self._run(checkpoint, model)

    def _run(self, checkpoint: Checkpoint, model: PreTrainedModel) -> None:
        name = checkpoint.name
        layers = LayerComparison(self._base, model) if self._measure_layers else None
        found: list[dict[str, Tensor]] = []
        with without_accelerate_hooks(model), onloaded([self._base, model], self._device):
            if self._dtype not in (None, model.dtype):  # transformers unpacks it when it first runs
                token = torch.zeros(1, 1, dtype=torch.int64)
                self._logits(model, {"input_ids": token, "attention_mask": torch.ones_like(token)})
            with computing_in(self._dtype, [self._base, model]):
                for number, batch in self._counted(name, found):
                    mask = counted_tokens(batch)
                    # A checkpoint is ready only when it has run once: transformers unpacks it then.
                    with nullcontext() if layers is None else layers.other_runs():
                        logits = self._logits(model, batch)
                    with nullcontext() if layers is None else layers.base_runs(mask):
                        kept = None if self._kept is None else self._kept[number].to(self._device)
                        base = self._logits(self._base, batch) if kept is None else kept
                    found.append(self._scored(name, number, logits, batch, base))
                self._measure_noise(name, model, found)
        sums = _joined(found)
        self._sums |= {key(kind, name): sums[kind] for kind in ("nll", "kl", "agreed")}
        self._layers[name] = () if layers is None else layers.errors()
        self._done[name] = checkpoint

    def check_same_model(self, checkpoint: Checkpoint) -> None:
        """Refuse a checkpoint of another model."""
        ours, theirs = (each.config.get_text_config() for each in (self._base, checkpoint))
        for what in _SHAPE:
            expected, found = getattr(ours, what, None), getattr(theirs, what, None)
            if found != expected:
                raise ConfigurationError(
                    f"has {what} {found}, and the float model {expected}",
                    subject=f"'{checkpoint.name}'",
                    hint="Only checkpoints of the same model can be compared; give the model that "
                    "it was made from.",
                )

    def _measure_noise(
        self, name: str, model: PreTrainedModel, found: Sequence[Mapping[str, Tensor]]
    ) -> None:
        """Run some batches again with other roundings, and note what that does."""
        counts = [int((each["tokens"] > 0).sum()) for each in found]
        sizes = {number: count for number, count in enumerate(counts) if count}
        numbers = list(sizes)
        chosen = [numbers[index] for index in batches_to_repeat(list(sizes.values()))]
        again = []
        what = f"measuring the noise of {name or 'the float model'}"
        with self._progress.counting(what, len(chosen), "batches") as add:
            for number in chosen:
                batch = self._batches.batches[number]
                with rounded_otherwise(model, seed=number):
                    again.append(score(self._logits(model, batch), batch))
                add(1)
        before, after = _joined([found[number] for number in chosen]), _joined(again)
        counted = before["tokens"] > 0
        change, tokens = (after["nll"] - before["nll"])[counted], before["tokens"][counted]
        self._noise[name] = FACTOR * noise_in_nats(change, tokens, sum(sizes.values()))

    def evaluation(self, base_size: int | None, sizes: Mapping[str, int | None]) -> Evaluation:
        """Return what was found so far."""
        counted = self._sums["tokens"] > 0
        bootstrap = Bootstrap({name: each[counted] for name, each in self._sums.items()})
        totals = {name: each.sum() for name, each in self._sums.items()}
        noise = {}
        for name in (BASE, *self._done):
            nats = torch.tensor(self._noise[name], dtype=torch.float64)
            noise[name] = float(perplexity(totals, name) * nats.expm1())
        base = bootstrap.estimate(partial(perplexity, name=BASE))
        scores = {}
        for name, checkpoint in self._done.items():
            scores[name] = CheckpointScores(
                sizes[name],
                bootstrap.estimate(partial(perplexity, name=name)),
                difference(bootstrap, name, BASE, max(noise[name], noise[BASE])),
                bootstrap.estimate(partial(_per_token, name=key("kl", name))),
                bootstrap.estimate(partial(_per_token, name=key("agreed", name))),
                self._layers[name],
                checkpoint.notes,
                checkpoint.reliable,
                noise=noise[name],
            )
        return Evaluation(
            Scores(base_size, base, noise=noise[BASE]),
            scores,
            int(counted.sum()),
            int(self._sums["tokens"].sum()),
            bootstrap,
            self._vocabulary,
        )

    def _counted(
        self, name: str, found: Sequence[Mapping[str, Tensor]]
    ) -> Iterator[tuple[int, Batch]]:
        """Go through the batches, and show how far this is, and what was found by then."""
        nll = tokens = torch.zeros((), dtype=torch.float64)
        what = f"evaluating {name}"
        with self._progress.counting(what, self._batches.num_tokens, "tokens") as add:
            for number, batch in enumerate(self._batches):
                yield number, batch
                nll, tokens = nll + found[-1]["nll"].sum(), tokens + found[-1]["tokens"].sum()
                so_far = f"perplexity {float((nll / tokens).exp()):.4f} so far" if tokens else ""
                add(int(counted_tokens(batch).sum()), so_far)

    @torch.no_grad()
    def _logits(self, model: PreTrainedModel, batch: Batch) -> Tensor:
        logits: Tensor = call_model(model, moved(batch, self._device)).logits
        return logits

    def _scored(
        self, name: str, number: int, logits: Tensor, batch: Batch, base: Tensor | None
    ) -> dict[str, Tensor]:
        found = score(logits, batch, base)
        if not found["nll"].isfinite().all():
            before = sum(len(other["input_ids"]) for other in self._batches.batches[:number])
            broken = int((~found["nll"].isfinite()).nonzero()[0])
            raise TensorValueError(
                f"computes logits that are NaN or Inf, first in sample {before + broken}. It "
                "cannot be judged, and should not be served",
                subject=f"'{name}'",
                hint="Look for a scale that is not finite, or for activations that leave the range "
                "of its dtype.",
            )
        return found


def _per_token(sums: Sums, name: str) -> Tensor:
    return sums[name] / sums["tokens"]


def _joined(found: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    return {name: torch.cat([each[name] for each in found]) for name in found[0]}


def evaluate(
    model: Source,
    checkpoints: Mapping[str, Source] | Sequence[str | Path],
    dataset: Any,
    *,
    layers: bool = True,
    each: Callable[[Evaluation], object] | None = None,
    data: DataOptions | None = None,
    compute: ComputeOptions | None = None,
    **keywords: Unpack[EvaluateKeywords],
) -> Evaluation:
    """Compare checkpoints with the model they were made from, on text that neither has seen.

    Two models are in memory at a time. Models run with the weights that are stored. All
    intervals come from the same draws of samples, so that differences are those of the same text.

    :param model: the float model, or the path or name to load it from
    :param checkpoints: paths, or models and paths by name; may be empty
    :param dataset: the text; what :func:`calipers.oneshot` takes as data
    :param layers: whether to measure the error of each decoder layer, which takes longer
    :param each: is given what is known so far after the float model and after each checkpoint, so
        that nothing is lost if a later one fails
    :param data: which samples are taken: :class:`calipers.options.DataOptions`
    :param compute: where models compute, and in which dtype:
        :class:`calipers.options.ComputeOptions`; by default where the float model is
    :param keywords: the options of both groups, one by one
    """
    options = EvaluateOptions.merged(keywords, data=data, compute=compute)
    data, compute = options.data, options.compute
    trusted = compute.trust_remote_code
    named = _named(checkpoints)
    # Wrong options are refused before anything is loaded.
    usable_device(compute.device)
    check_mask(data.mask)
    dtype_choice(compute.dtype)
    with hide_library_bars():
        found = [find_checkpoint(name, at, trust_remote_code=trusted) for name, at in named.items()]
    sizes = {name: _stored_size(source) for name, source in named.items()}
    bars = Progress.of(compute.progress)
    with bars.waiting("loading the float model") as begin, loading_counted(begin):
        base = load_model(model, trust_remote_code=trusted, quantized=True)
        tokenizer = load_tokenizer(data.tokenizer, base, trust_remote_code=trusted)
    with bars.waiting("reading the data"):
        sampling = {**data.sampling(), **limits_of(base, data.max_seq_length)}
        batches = calibration_batches(dataset, tokenizer, use="evaluation", **sampling)

    def tell() -> Evaluation:
        known = comparison.evaluation(_stored_size(model), sizes)
        if each is not None:
            each(known)
        return known

    with without_accelerate_hooks(base):
        comparison = Comparison(base, batches, bars, compute, measure_layers=layers)
        for checkpoint in found:
            comparison.check_same_model(checkpoint)
        comparison.run_base()
        known = tell()
        for checkpoint in found:
            comparison.load_and_run(checkpoint, trust_remote_code=trusted)
            known = tell()
    return known


def _named(checkpoints: Mapping[str, Source] | Sequence[str | Path]) -> dict[str, Source]:
    """Give each checkpoint a name: that of its folder, or its path where folders share a name."""
    if isinstance(checkpoints, Mapping):
        return dict(checkpoints)
    paths = [str(path) for path in checkpoints]
    for path in paths:
        if paths.count(path) > 1:
            raise ConfigurationError(
                "is given twice", subject=f"The checkpoint '{path}'", hint="Give each once."
            )
    short = [Path(path).name for path in paths]
    return {
        name if short.count(name) == 1 else path: path
        for name, path in zip(short, paths, strict=True)
    }


def _stored_size(source: Source) -> int | None:
    if not isinstance(source, (str, Path)) or not Path(source).is_dir():
        return None
    return size_on_disk(Path(source)) or None
