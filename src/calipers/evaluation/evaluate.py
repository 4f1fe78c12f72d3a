"""Any number of checkpoints beside the model they were made from, on the same text."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from calipers.calibration.data import calibration_batches, limits_of
from calipers.calibration.pipelines import usable_device
from calipers.calibration.precision import DtypeChoice, dtype_choice, forward_dtype
from calipers.calibration.progress import Progress
from calipers.checkpoint.reader import load_model, load_tokenizer
from calipers.checkpoint.sizes import size_on_disk
from calipers.errors import CalipersWarning, SameNameError
from calipers.evaluation.judging import Judge
from calipers.evaluation.loading import find_checkpoint
from calipers.evaluation.quiet import without_bars_of_others
from calipers.evaluation.results import Evaluation

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from calipers.evaluation.loading import Source


def evaluate(
    model: Source,
    checkpoints: Mapping[str, Source] | Sequence[str | Path],
    dataset: Any,
    *,
    tokenizer: PreTrainedTokenizerBase | str | Path | None = None,
    num_samples: int = 512,
    max_seq_length: int | None = None,
    batch_size: int = 1,
    packing: bool | None = None,
    seed: int = 0,
    skip: int = 0,
    text_column: str | None = None,
    device: torch.device | str | None = None,
    dtype: DtypeChoice | torch.dtype = "auto",
    layers: bool = True,
    trust_remote_code: bool = False,
    progress: bool | Progress | None = None,
    each: Callable[[Evaluation], object] | None = None,
) -> Evaluation:
    """Judge checkpoints by the model they were made from, on text that neither has seen.

    Two models are in memory at a time. Models run with the weights that are stored. All
    intervals come from the same draws of samples, so that differences are those of the same text.

    :param model: the float model, or the path or name to load it from
    :param checkpoints: paths, or models and paths by name; may be empty
    :param dataset: the text; what :func:`calipers.oneshot` takes as data
    :param tokenizer: the tokenizer, or where it is; by default the one that belongs to the model
    :param num_samples: how many samples to take
    :param max_seq_length: the longest sample, in tokens; None: 2048, or what the model can take
        where that is less
    :param batch_size: samples per batch
    :param packing: whether samples are joined and cut to equal length, so that nothing is padded
    :param seed: of the choice of samples
    :param skip: how many samples to pass over: those that calibration took from the same data,
        with the same seed, length and packing
    :param text_column: the column of the text, where records have several
    :param device: where the models compute; by default where the float model is
    :param dtype: the dtype in which the models compute: ``float32``, ``bfloat16``, ``float16``, or
        ``auto``: that of the float model, or float32 on a CPU that has no instructions for it
    :param layers: whether to measure the error of each decoder layer, which takes longer
    :param trust_remote_code: whether code that comes with a model may run
    :param progress: whether to show progress bars; None: where a person looks at standard error,
        and elsewhere a line about every 30 seconds
    :param each: is given what is known so far after the float model and after each checkpoint, so
        that nothing is lost if a later one fails
    """
    named = _named(checkpoints)
    place, computes_in = usable_device(device), dtype_choice(dtype)
    bars = Progress.of(progress)
    with without_bars_of_others():
        found = [
            find_checkpoint(name, source, trust_remote_code=trust_remote_code)
            for name, source in named.items()
        ]
    with bars.waiting("loading the float model"):
        base = load_model(model, trust_remote_code=trust_remote_code, quantized=True)
        words = load_tokenizer(tokenizer, base, trust_remote_code=trust_remote_code)
    with bars.waiting("reading the data"):
        batches = calibration_batches(
            dataset,
            words,
            num_samples=num_samples,
            batch_size=batch_size,
            packing=packing,
            seed=seed,
            text_column=text_column,
            use="evaluation",
            skip=skip,
            **limits_of(base, max_seq_length),
        )
    place = place or base.device
    forward = forward_dtype(computes_in, base, place)
    if computes_in == "auto" and forward != base.dtype:
        _tell_of_dtype(base.dtype, forward)
    judge = Judge(base, batches, place, bars, measure_layers=layers, dtype=forward)
    sizes = {name: _stored_size(source) for name, source in named.items()}

    def tell() -> Evaluation:
        known = judge.evaluation(_stored_size(model), sizes)
        if each is not None:
            each(known)
        return known

    for checkpoint in found:
        judge.check_alike(checkpoint)
    judge.judge_base()
    known = tell()
    for checkpoint in found:
        with without_bars_of_others(), checkpoint.failures_explained():
            with bars.waiting(f"loading {checkpoint.name}"):
                loaded = checkpoint.load(trust_remote_code=trust_remote_code)
            judge.judge(checkpoint, loaded)
        del loaded  # before the next one is loaded
        known = tell()
    return known


def _tell_of_dtype(own: torch.dtype, forward: torch.dtype) -> None:
    names = [str(dtype).removeprefix("torch.") for dtype in (own, forward)]
    warnings.warn(
        f"This CPU has no {names[0]} instructions: the models compute in {names[1]}, with the "
        f"weights that they have in {names[0]}. dtype={names[0]} is slower, and closer to what "
        "others run.",
        CalipersWarning,
        stacklevel=3,
    )


def _named(checkpoints: Mapping[str, Source] | Sequence[str | Path]) -> dict[str, Source]:
    """Give each checkpoint a name: that of its folder, or its path where folders share a name."""
    if isinstance(checkpoints, Mapping):
        return dict(checkpoints)
    paths = [str(path) for path in checkpoints]
    for path in paths:
        if paths.count(path) > 1:
            raise SameNameError(path)
    short = [Path(path).name for path in paths]
    return {
        name if short.count(name) == 1 else path: path
        for name, path in zip(short, paths, strict=True)
    }


def _stored_size(source: Source) -> int | None:
    if not isinstance(source, (str, Path)) or not Path(source).is_dir():
        return None
    return size_on_disk(Path(source)) or None
