"""The options of functions and commands in groups, each frozen and complete in itself.

A function takes groups (``data=DataOptions(num_samples=64)``), single keywords
(``num_samples=64``), or both, as long as nothing is said twice. Commands take the options that have
a flag here, with the documentation that they have here. Nothing heavy is imported.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, Literal, TypedDict

from calipers.errors import ConfigurationError, Option, nearest

if TYPE_CHECKING:
    from datetime import timedelta
    from pathlib import Path

    import torch
    from transformers import PreTrainedTokenizerBase
    from typing_extensions import Self

    from calipers.runtime.precision import DtypeChoice
    from calipers.runtime.progress import Progress

    Tokenizer = PreTrainedTokenizerBase | str | Path | None
    Device = torch.device | str | None
    Dtype = DtypeChoice | torch.dtype

Pipeline = Literal["auto", "datafree", "basic", "sequential"]
OnUnseen = Literal["error", "weights_only", "peers"]
MaskChoice = Literal["assistant"]

_OBSERVER = "NAME[,OPTION=VALUE…]"

IGNORED_BY_DEFAULT = ("lm_head",)
"""What a preset leaves as it is, if nobody says otherwise."""

KEYWORDS = {"num_calibration_samples": "num_samples"}
"""Keywords of functions → options, where they differ."""


def option(default: Any, *flags: str, metavar: str = "") -> Any:
    """Declare an option that commands have.

    :param flags: ``--this/--not-this`` for one that can be switched off
    :param metavar: what stands for its value; ``N`` is a whole number, and none a switch
    """
    return field(default=default, metadata={"flags": flags, "metavar": metavar})


@dataclass(frozen=True, kw_only=True)
class OptionGroup:
    """Options that belong together: a frozen dataclass that remembers which of them were given."""

    def __new__(cls, **given: Any) -> Self:
        """Refuse options that the group does not have."""
        for name in given:
            if name not in cls.names():
                raise unknown_option(name, cls.names(), cls.__name__)
        group = super().__new__(cls)
        object.__setattr__(group, "_given", frozenset(given))
        return group

    @classmethod
    def names(cls) -> list[str]:
        """Return the names of all options of the group."""
        return [each.name for each in fields(cls)]

    @classmethod
    def flags(cls) -> dict[str, tuple[str, ...]]:
        """Return the options that commands have, with their flags."""
        return {each.name: each.metadata["flags"] for each in fields(cls) if each.metadata}

    @classmethod
    def docs(cls) -> dict[str, str]:
        """Return what is said about each option.

        >>> DataOptions.docs()["seed"]
        'the seed of the shuffling'
        """
        parts = re.split(r":param (\w+): ", " ".join((cls.__doc__ or "").split()))[1:]
        return {name: text.strip() for name, text in zip(parts[::2], parts[1::2], strict=True)}

    def gives(self, name: str) -> bool:
        """Whether an option was given, and is not just at its default."""
        return name in vars(self)["_given"]

    def values(self) -> dict[str, Any]:
        """Return all options with their values."""
        return {name: getattr(self, name) for name in self.names()}

    def given(self) -> dict[str, Any]:
        """Return the options that were given, with their values.

        >>> DataOptions(seed=7).given()
        {'seed': 7}
        """
        return {name: value for name, value in self.values().items() if self.gives(name)}


@dataclass(frozen=True, kw_only=True)
class DataOptions(OptionGroup):
    """Which samples of the data are taken, and how they become batches.

    :param tokenizer: the tokenizer, or where it is; by default the one that belongs to the model
    :param num_samples: how many samples to take, over all processes
    :param max_seq_length: the longest sample, in tokens; by default 2048, or what the model can
        take where that is less
    :param batch_size: samples per batch; by default one, or, for GPTQ on quantized inputs, samples
        of like length together
    :param packing: whether samples are joined and cut to equal length, so that nothing is padded;
        by default for text files
    :param shuffle: whether to take samples from everywhere, or from the beginning
    :param seed: the seed of the shuffling
    :param skip: how many samples to pass over: those that an earlier call took from the same data,
        with the same seed, length and packing
    :param text_column: the column of the text, where records have several
    :param mask: which tokens count: ``assistant`` are those that the data marks by
        ``assistant_masks``, ``loss_mask`` or ``labels``, or chats by the generation blocks of their
        template; the others still run through the model. By default all tokens count
    """

    tokenizer: Tokenizer = option(None, "--tokenizer", metavar="PATH")
    num_samples: int = option(512, "--samples", metavar="N")
    max_seq_length: int | None = option(None, "--seq-len", metavar="N")
    batch_size: int | None = option(None, "--batch-size", metavar="N")
    packing: bool | None = option(None, "--packing/--no-packing")
    shuffle: bool = True
    seed: int = option(0, "--seed", metavar="N")
    skip: int = option(0, "--skip", metavar="N")
    text_column: str | None = option(None, "--text-column", metavar="NAME")
    mask: MaskChoice | None = option(None, "--mask", metavar="NAME")

    def sampling(self) -> dict[str, Any]:
        """Return what says which samples are taken, without the tokenizer."""
        options = self.values() | {"batch_size": 1 if self.batch_size is None else self.batch_size}
        del options["tokenizer"]
        return options


@dataclass(frozen=True, kw_only=True)
class ComputeOptions(OptionGroup):
    """Where and how a model computes.

    :param device: where the model computes, such as ``cuda:0``; by default where it is
    :param dtype: the dtype of the forward pass: ``float32``, ``bfloat16``, ``float16``, or
        ``auto``: that of the model, or float32 on a CPU that has no instructions for it. What is
        stored has the model's own in any case
    :param trust_remote_code: whether code that comes with the model may run
    :param progress: whether to show progress bars; None: where a person looks at standard error,
        and elsewhere a line about every 30 seconds
    """

    device: Device = option(None, "--device", metavar="NAME")
    dtype: Dtype = option("auto", "--dtype", metavar="NAME")
    trust_remote_code: bool = option(False, "--trust-remote-code")
    progress: bool | Progress | None = None


@dataclass(frozen=True, kw_only=True)
class CalibrationOptions(OptionGroup):
    """How data runs through a model, and what becomes of modules that it does not reach.

    :param pipeline: how data runs: ``basic`` (the whole model), ``sequential`` (layer by layer),
        ``datafree`` (not at all), or ``auto``
    :param on_unseen: what becomes of modules that no token reached: ``error``, ``weights_only`` or
        ``peers``
    :param calibrate_all_experts: whether experts see all tokens, not only those routed to them
    :param share_inputs: whether a tensor that several modules read is measured once for all
    :param folds: how many parts of the data are measured apart, 1 to 8, so that what is found on
        the others can be judged on each: GPTQ chooses its damping by that, and measurements tell
        whether the data sufficed. 1: none
    :param timeout: how long a process that gives no sign of life is waited for by the others;
        None: less than a minute, or ten for one that has not joined them yet
    """

    pipeline: Pipeline = option("auto", "--pipeline", metavar="NAME")
    on_unseen: OnUnseen = option("error", "--on-unseen", metavar="NAME")
    calibrate_all_experts: bool = option(False, "--calibrate-all-experts")
    share_inputs: bool = option(True, "--share-inputs/--no-share-inputs")
    folds: int = option(2, "--folds", metavar="N")
    timeout: timedelta | None = None


@dataclass(frozen=True, kw_only=True)
class RecipeOptions(OptionGroup):
    """What is put on top of a recipe.

    :param method: how weights are rounded: ``rtn``, each to nearest; ``gptq``, with error feedback;
        ``rounding``, which then learns how to round, layer by layer; both need data; or the method
        of a step of a package. By default as the recipe says
    :param group_size: how many weights share a scale, where the recipe has groups
    :param weight_observer: the observer of weights, instead of those that the recipe names, such as
        ``mse`` or ``optimal,importance=hessian``
    :param activation_observer: the same for static activations
    :param allow_code: whether observers in files, ``path/to/file.py:Class``, which the recipe
        names, may run
    """

    method: str | None = option(None, "--method", metavar="NAME")
    group_size: int | None = option(None, "--group-size", metavar="N")
    weight_observer: Any = option(None, "--observer", "--weight-observer", metavar=_OBSERVER)
    activation_observer: Any = option(None, "--activation-observer", metavar=_OBSERVER)
    allow_code: bool = option(False, "--allow-code")


@dataclass(frozen=True, kw_only=True)
class OutputOptions(OptionGroup):
    """Where the checkpoint goes, and how it is cut.

    :param output_dir: where the checkpoint goes; None writes nothing
    :param overwrite: whether an existing checkpoint is replaced
    :param max_shard_size: the largest size of a file of tensors
    """

    output_dir: str | Path | None = option(None, "--output", "-o", metavar="FOLDER")
    overwrite: bool = option(False, "--overwrite")
    max_shard_size: int | str = option("5GB", "--max-shard-size", metavar="SIZE")


class EvaluateKeywords(TypedDict, total=False):
    """Single options of :func:`calipers.evaluate`, for those who check types."""

    tokenizer: Tokenizer
    num_samples: int
    max_seq_length: int | None
    batch_size: int | None
    packing: bool | None
    shuffle: bool
    seed: int
    skip: int
    text_column: str | None
    mask: MaskChoice | None
    device: Device
    dtype: Dtype
    trust_remote_code: bool
    progress: bool | Progress | None


class MeasureKeywords(EvaluateKeywords, total=False):
    """Single options of :func:`calipers.measure`, for those who check types."""

    num_calibration_samples: int
    pipeline: Pipeline
    calibrate_all_experts: bool
    share_inputs: bool
    folds: int
    timeout: timedelta | None


class CheckpointKeywords(TypedDict, total=False):
    """What is done to weights and where they go: options of whoever writes a checkpoint."""

    method: str | None
    group_size: int | None
    weight_observer: Any
    activation_observer: Any
    allow_code: bool
    overwrite: bool
    max_shard_size: int | str


class OneshotKeywords(MeasureKeywords, CheckpointKeywords, total=False):
    """Single options of :func:`calipers.oneshot`, for those who check types."""

    on_unseen: OnUnseen
    output_dir: str | Path | None


class QuantizeKeywords(CheckpointKeywords, total=False):
    """Single options of :func:`calipers.quantize`, for those who check types."""

    device: Device
    trust_remote_code: bool
    progress: bool | Progress | None


@dataclass(frozen=True, kw_only=True)
class _Groups:
    """The groups that a function takes: a frozen dataclass whose fields are groups."""

    @classmethod
    def merged(cls, keywords: Mapping[str, Any], **groups: OptionGroup | None) -> Self:
        """Put single keywords into the groups they belong to.

        :param keywords: single options, by the names that the function has for them
        :param groups: the groups that were given, by the names of the fields
        """
        kinds: dict[str, Any] = {each.name: each.default_factory for each in fields(cls)}
        owners: dict[str, str] = {}
        values: dict[str, dict[str, Any]] = {}
        sources: dict[str, str] = {}  # option → how it was given
        for name, kind in kinds.items():
            group = groups.get(name) or kind()
            if not isinstance(group, kind):
                raise ConfigurationError(
                    f"must be {kind.__name__}",
                    subject=Option(name),
                    got=repr(group),
                    hint=f"Pass {name}={kind.__name__}(…), or its options one by one.",
                )
            owners |= dict.fromkeys(kind.names(), name)
            values[name] = group.given()
            for own, value in values[name].items():
                sources[own] = f"{name}={kind.__name__}({own}={value!r})"
        for keyword, value in keywords.items():
            own = KEYWORDS.get(keyword, keyword)
            if own not in owners:
                raise unknown_option(keyword, [*owners, *KEYWORDS])
            if own in sources:
                problem = f"is given twice: beside {sources[own]}"
                subject = Option(keyword, value)
                raise ConfigurationError(problem, subject=subject, hint="Keep one.")
            values[owners[own]][own] = value
            sources[own] = f"{keyword}={value!r}"
        return cls(**{name: kind(**values[name]) for name, kind in kinds.items()})


@dataclass(frozen=True, kw_only=True)
class MeasureOptions(_Groups):
    """All options of :func:`calipers.measure` that it shares with others."""

    data: DataOptions = field(default_factory=DataOptions)
    compute: ComputeOptions = field(default_factory=ComputeOptions)
    calibration: CalibrationOptions = field(default_factory=CalibrationOptions)


@dataclass(frozen=True, kw_only=True)
class OneshotOptions(MeasureOptions):
    """All options of :func:`calipers.oneshot`.

    >>> options = OneshotOptions.merged({"batch_size": 8}, output=OutputOptions(overwrite=True))
    >>> options.data.batch_size, options.output.overwrite
    (8, True)
    """

    changes: RecipeOptions = field(default_factory=RecipeOptions)
    output: OutputOptions = field(default_factory=OutputOptions)


@dataclass(frozen=True, kw_only=True)
class QuantizeOptions(_Groups):
    """All options of :func:`calipers.quantize` that it shares with others."""

    compute: ComputeOptions = field(default_factory=ComputeOptions)
    changes: RecipeOptions = field(default_factory=RecipeOptions)
    output: OutputOptions = field(default_factory=OutputOptions)


@dataclass(frozen=True, kw_only=True)
class EvaluateOptions(_Groups):
    """All options of :func:`calipers.evaluate` that it shares with others."""

    data: DataOptions = field(default_factory=DataOptions)
    compute: ComputeOptions = field(default_factory=ComputeOptions)


def unknown_option(name: str, known: list[str], owner: str = "") -> ConfigurationError:
    """Refuse an option that there is not."""
    return ConfigurationError(
        f"Unknown option '{name}'" + (f" of {owner}" if owner else ""),
        meant=nearest(name, known),
        allowed=known,
    )
