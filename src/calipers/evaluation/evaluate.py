"""Any number of checkpoints beside the model they were made from, on the same text."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from calipers.calibration.data import calibration_batches, limits_of
from calipers.calibration.data.columns import check_mask
from calipers.calibration.pipelines import usable_device
from calipers.checkpoint.reader import load_model, load_tokenizer, loading_counted
from calipers.checkpoint.sizes import size_on_disk
from calipers.errors import CalipersWarning, ConfigurationError, Option
from calipers.evaluation.comparison import Comparison
from calipers.evaluation.library_bars import hide_library_bars
from calipers.evaluation.loading import find_checkpoint
from calipers.evaluation.results import Evaluation
from calipers.options import ComputeOptions, DataOptions, EvaluateKeywords, EvaluateOptions
from calipers.runtime.offloading import without_accelerate_hooks
from calipers.runtime.precision import dtype_choice, forward_dtype
from calipers.runtime.progress import Progress

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from calipers.evaluation.loading import Source


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
    trusted = options.compute.trust_remote_code
    named = _named(checkpoints)
    usable_device(options.compute.device)
    check_mask(options.data.mask)
    dtype_choice(options.compute.dtype)
    with hide_library_bars():
        found = [find_checkpoint(name, at, trust_remote_code=trusted) for name, at in named.items()]
    sizes = {name: _stored_size(source) for name, source in named.items()}

    def tell() -> Evaluation:
        known = comparison.evaluation(_stored_size(model), sizes)
        if each is not None:
            each(known)
        return known

    with _compared(model, dataset, layers, options) as comparison:
        for checkpoint in found:
            comparison.check_same_model(checkpoint)
        comparison.run_base()
        known = tell()
        for checkpoint in found:
            comparison.load_and_run(checkpoint, trust_remote_code=trusted)
            known = tell()
    return known


@contextmanager
def _compared(
    model: Source, dataset: Any, layers: bool, options: EvaluateOptions
) -> Iterator[Comparison]:
    """Load the float model and the data."""
    data, compute = options.data, options.compute
    bars = Progress.of(compute.progress)
    with bars.waiting("loading the float model") as begin, loading_counted(begin):
        base = load_model(model, trust_remote_code=compute.trust_remote_code, quantized=True)
        tokenizer = load_tokenizer(
            data.tokenizer, base, trust_remote_code=compute.trust_remote_code
        )
    with bars.waiting("reading the data"):
        sampling = {**data.sampling(), **limits_of(base, data.max_seq_length)}
        batches = calibration_batches(dataset, tokenizer, use="evaluation", **sampling)
    computes_in = dtype_choice(compute.dtype)
    with without_accelerate_hooks(base):
        device = usable_device(compute.device) or base.device
        forward = forward_dtype(computes_in, base, device)
        if computes_in == "auto" and forward != base.dtype:
            _tell_of_dtype(base.dtype, forward)
        yield Comparison(base, batches, device, bars, measure_layers=layers, dtype=forward)


def _tell_of_dtype(own: torch.dtype, forward: torch.dtype) -> None:
    names = [str(dtype).removeprefix("torch.") for dtype in (own, forward)]
    told = CalipersWarning(
        f"This CPU has no {names[0]} instructions: the models compute in {names[1]}, with the "
        f"weights that they have in {names[0]}",
        hint=Option("dtype", names[0]) + " is slower, and closer to what others run.",
    )
    warnings.warn(told, stacklevel=4)


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
