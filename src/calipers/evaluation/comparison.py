"""One checkpoint after another, beside the float model."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from calipers.calibration.data import Batch, Batches, counted_tokens
from calipers.calibration.pipelines import call_model, moved, onloaded
from calipers.checkpoint.reader import loading_counted
from calipers.errors import CalipersWarning, ConfigurationError, TensorValueError, empty_data
from calipers.evaluation.bootstrap import Bootstrap
from calipers.evaluation.layers import LayerComparison, LayerError
from calipers.evaluation.library_bars import hide_library_bars
from calipers.evaluation.loading import Checkpoint
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
from calipers.evaluation.scoring import score
from calipers.runtime.offloading import without_accelerate_hooks
from calipers.runtime.precision import computing_in
from calipers.runtime.progress import Progress

if TYPE_CHECKING:
    from transformers import PreTrainedModel

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
        device: torch.device,
        progress: Progress,
        *,
        measure_layers: bool,
        dtype: torch.dtype | None = None,
    ) -> None:
        self._dtype = dtype
        self._base, self._batches, self._device = base, batches, device
        self._progress, self._measure_layers = progress, measure_layers
        self._done: dict[str, Checkpoint] = {}
        self._layers: dict[str, tuple[LayerError, ...]] = {}
        self._noise: dict[str, float] = {}
        self._sums: dict[str, Tensor] = {}
        self._kept: list[Tensor] | None = [] if self._few_logits() else None

    def _few_logits(self) -> bool:
        if self._measure_layers:  # the float model must run again anyway
            return False
        places = sum(batch["input_ids"].numel() for batch in self._batches)
        size = getattr(self._base.config.get_text_config(), "vocab_size", _KEPT_LOGITS)
        return places * size <= _KEPT_LOGITS

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

    def load_and_run(self, checkpoint: Checkpoint, *, trust_remote_code: bool = False) -> None:
        """Load a checkpoint, run it beside the float model, and let go of it."""
        with hide_library_bars(), checkpoint.failures_explained():
            loading = self._progress.waiting(f"loading {checkpoint.name}")
            with loading as begin, loading_counted(begin):
                model = checkpoint.load(trust_remote_code=trust_remote_code)
            self.run_checkpoint(checkpoint, model)

    def run_checkpoint(self, checkpoint: Checkpoint, model: PreTrainedModel) -> None:
        """Run a checkpoint beside the float model."""
        name = checkpoint.name
        layers = LayerComparison(self._base, model) if self._measure_layers else None
        found: list[dict[str, Tensor]] = []
        with (
            without_accelerate_hooks(model),
            onloaded([self._base, model], self._device),
            self._computing(model),
        ):
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

    @contextmanager
    def _computing(self, model: PreTrainedModel) -> Iterator[None]:
        """Have both models compute in the chosen dtype, with the weights they have in their own."""
        if self._dtype not in (None, model.dtype):  # transformers unpacks it when it first runs
            token = torch.zeros(1, 1, dtype=torch.int64)
            self._logits(model, {"input_ids": token, "attention_mask": torch.ones_like(token)})
        with computing_in(self._dtype, [self._base, model]):
            yield

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
        told = Bootstrap({name: each[counted] for name, each in self._sums.items()})
        return Evaluation(
            Scores(
                base_size, told.estimate(lambda sums: perplexity(sums, BASE)), noise=self._off(BASE)
            ),
            {name: self._scores(name, sizes[name], told) for name in self._done},
            int(counted.sum()),
            int(self._sums["tokens"].sum()),
            told,
            getattr(self._base.config.get_text_config(), "vocab_size", None),
        )

    def _scores(self, name: str, size: int | None, told: Bootstrap) -> CheckpointScores:
        return CheckpointScores(
            size,
            told.estimate(lambda sums: perplexity(sums, name)),
            difference(told, name, BASE, max(map(self._off, (name, BASE)))),
            told.estimate(lambda sums: sums[key("kl", name)] / sums["tokens"]),
            told.estimate(lambda sums: sums[key("agreed", name)] / sums["tokens"]),
            self._layers[name],
            self._done[name].notes,
            self._done[name].reliable,
            noise=self._off(name),
        )

    def _off(self, name: str) -> float:
        """By how much roundings can change the perplexity of a model."""
        value = perplexity({name: each.sum() for name, each in self._sums.items()}, name)
        return float(value * torch.tensor(self._noise[name], dtype=torch.float64).expm1())

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


def _joined(found: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    return {name: torch.cat([each[name] for each in found]) for name in found[0]}
