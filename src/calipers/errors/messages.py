"""What several files say of models, checkpoints, data, tensors, observers and recipes."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from calipers.errors.base import (
    CalipersWarning,
    CheckpointError,
    CheckpointExistsError,
    CodeNotAllowedError,
    ConfigurationError,
    DataError,
    FusedExpertsError,
    LayoutError,
    MeasurementsError,
    MergeError,
    ModelLoadError,
    NoStatisticsError,
    RecipeError,
    TensorValueError,
)
from calipers.errors.text import Option, Text, counted, first_line, in_one_line, listing, nearest

_CHOSEN_ON_TOP = ("weight_observer", "activation_observer")
"""Keys of a modifier that are options of functions and commands, too."""


# Options and data


def not_allowed(
    option: str, value: object, allowed: str | Collection[str], meant: str | None = None
) -> ConfigurationError:
    """Refuse a value outside the domain of an option: a description, or all its words.

    :param meant: the allowed word that the value stands for elsewhere; by default the nearest
    """
    if meant is None and not isinstance(allowed, str):
        meant = nearest(str(value), allowed)
    subject = Option(option, value)
    return ConfigurationError("is not allowed", subject=subject, meant=meant, allowed=allowed)


def check_whole_number(option: str, value: object, least: int | None = None) -> None:
    """Refuse a value of an option that is no whole number, or less than the least one."""
    is_whole = isinstance(value, int) and not isinstance(value, bool)
    if not is_whole or (least is not None and value < least):  # type: ignore[operator]
        bound = "" if least is None else f", {least} or more"
        raise not_allowed(option, value, f"a whole number{bound}")


def no_meaning(option: str, value: object, here: str) -> ConfigurationError:
    """Refuse an option beside which something else was given."""
    subject = Option(option, value)
    return ConfigurationError(f"has no meaning for {here}", subject=subject, hint="Leave it out.")


def empty_data(subject: str, problem: str = "is empty") -> DataError:
    """Refuse data without a single token."""
    return DataError(
        Text(problem) + ": there is nothing to run the model on",
        subject=subject,
        hint="Give at least one text or list of token ids; several hundred make reliable figures.",
    )


def unreadable_record(place: str, problem: str) -> DataError:
    """Refuse a record from which no text and no token ids can be read."""
    return DataError(
        problem,
        subject=place,
        hint="A record is a text, a list of token ids, a chat (a list of messages with role and "
        "content), or an object with one of them in a column.",
    )


def several_splits(splits: Iterable[str], folder: str | None = None) -> DataError:
    """Refuse a dataset of several splits, of which none was chosen."""
    splits = list(splits)
    first = splits[0] if splits else "…"
    example = f"dataset[{first!r}]" if folder is None else f"'{folder}:{first}'"
    return DataError(
        f"The dataset has several splits: {listing(splits) or 'none'}",
        hint=f"Choose one of them: {example}.",
    )


# Models and checkpoints


def cannot_load(name: str, problem: str, kind: str = "model") -> ModelLoadError:
    """Say why there is no model or tokenizer under a name."""
    return ModelLoadError(
        f"Cannot load a {kind} from '{name}': {first_line(problem)}",
        hint=f"Give the folder or the name of a Hugging Face {kind}.",
    )


def damaged_file(file: object, problem: str) -> ModelLoadError:
    """Say what is wrong with a file of a model or tokenizer."""
    return ModelLoadError(
        f"is damaged or incomplete: {in_one_line(problem).rstrip('.')}",
        subject=f"The file '{file}'",
        hint="Correct it, or copy or download it again.",
    )


def damaged_measurements(file: object, problem: str) -> MeasurementsError:
    """Say what is wrong with a file of measurements."""
    return MeasurementsError(
        f"is damaged, or no file of measurements: {in_one_line(problem).rstrip('.')}",
        subject=f"The file '{file}'",
        hint="Copy it again from where it was made, or measure again.",
    )


def cannot_write(directory: object, problem: str) -> CheckpointError:
    """Say why there can be no output folder at a path."""
    return CheckpointError(
        f"Cannot write a checkpoint to '{directory}': {problem}",
        hint="Choose another output folder.",
    )


def would_replace(directory: object, source: object, what: str = "model") -> CheckpointExistsError:
    """Refuse an output folder in whose place lies something that the checkpoint is made from."""
    return CheckpointExistsError(
        f"would replace the {what} in use, '{source}'. Nothing was written",
        subject=f"The output folder '{directory}'",
        hint="Choose another folder.",
    )


def inside_source(directory: object, source: object) -> CheckpointExistsError:
    """Refuse an output folder within that of the model which the checkpoint is made from."""
    return CheckpointExistsError(
        f"is inside that of the model in use, '{source}', to which nothing is added. Nothing was "
        "written",
        subject=f"The output folder '{directory}'",
        hint="Choose a folder elsewhere, such as one beside it.",
    )


def cannot_write_file(path: object, problem: str) -> CheckpointError:
    """Say why there can be no output file at a path."""
    return CheckpointError(f"Cannot write to '{path}': {problem}", hint="Choose another file.")


def file_in_use(path: object, source: object, what: str) -> CheckpointExistsError:
    """Refuse an output file in whose place lies something that it is made from."""
    return CheckpointExistsError(
        f"would replace the {what} in use, '{source}', or a part of it. Nothing was written",
        subject=f"The output file '{path}'",
        hint="Choose another file.",
    )


def cannot_unfuse(where: str, module: object, problem: str) -> FusedExpertsError:
    """Say why experts in stacked parameters cannot be told apart."""
    return FusedExpertsError(
        f"are stacked in one parameter and cannot be turned into Linear layers: {problem}",
        subject=f"The experts of '{where}' ({type(module).__name__})",
        hint='To quantize the rest of the model, leave them out: ignore: ["re:.*experts.*"]',
    )


# Tensors, formats and statistics


def unsupported_format(what: str) -> ConfigurationError:
    """Refuse a number format that does not exist here."""
    return ConfigurationError(
        "is not a supported format",
        subject=what,
        allowed="int with 2 to 8 bits and float with 8 bits (fp8 e4m3), symmetric or not; float "
        "with 4 bits (fp4 e2m1), symmetric",
    )


def mask_of_scores() -> LayoutError:
    """Refuse a mask that is no mask of tokens."""
    return LayoutError(
        "The mask must be 1 for tokens that count and 0 for others; this looks like one that is "
        "added to attention scores"
    )


def not_finite(where: str, count: int, total: int, shape: Sequence[int]) -> TensorValueError:
    """Refuse a tensor with NaN or Inf in it."""
    return TensorValueError(
        f"was given {counted(count, 'non-finite value')} (NaN or Inf) among {total}, in a tensor "
        f"of shape {tuple(shape)}. Nothing was recorded",
        subject=where,
        hint='Find out where they come from, or pass nonfinite="ignore" to leave them out and '
        "count them",
    )


def no_statistics(location: str = "") -> NoStatisticsError:
    """Say that nothing was observed yet."""
    nothing = f" Nothing reached {location}." if location else ""
    return NoStatisticsError(
        "No statistics available", hint=f"Call observer(value) first.{nothing}"
    )


def weight_gone(where: str, problem: str) -> NoStatisticsError:
    """Refuse a result that needs the weight, which a saved or merged observer does not have."""
    return NoStatisticsError(
        f"{problem} the weight it observed, which a report and a global scale shared with fused "
        "observers need",
        subject=where,
        hint="Call observer(weight) again",
    )


def different_configurations(
    action: str, ours: Mapping[str, Any], theirs: Mapping[str, Any]
) -> MergeError:
    """Refuse statistics that were gathered under another configuration; show both."""
    differing = sorted(k for k in {*ours, *theirs} if ours.get(k) != theirs.get(k))
    lines = [f"  {key}: {ours.get(key)!r} here, {theirs.get(key)!r} there" for key in differing]
    return MergeError("\n".join([f"Cannot {action}: the configurations differ.", *lines]))


# Recipes


def code_not_allowed(
    name: str,
    key: str = "",
    *,
    path: Iterable[str | int] = (),
    source: str | None = None,
    line: int | None = None,
) -> CodeNotAllowedError:
    """Refuse to run a file.

    :param name: the file and its class, ``path/to/file.py:Class``
    :param key: the key of the recipe that names it
    """
    owner, _, option = key.rpartition(".")
    where = key
    if source is None and option in _CHOSEN_ON_TOP:
        where = Option(option, owner=owner)  # it may have been given as one: no file names it
    return CodeNotAllowedError(
        f"'{name}' is Python code, which was not run: it could do anything that you can",
        where=where,
        hint=f"If you trust the file '{name.rpartition(':')[0]}', pass "
        + Option("allow_code", True),
        path=path,
        source=source,
        line=line,
    )


def no_effect(subject: Option) -> CalipersWarning:
    """Warn of an observer that was chosen, and that nothing will use."""
    return CalipersWarning(
        "has no effect: what it would watch is not quantized, or is dynamic (its scale is found "
        "while the model runs)",
        subject=subject,
    )


def unfit(module: str, base_name: str, problem: str, hint: str = "") -> RecipeError:
    """Refuse a tensor that cannot be quantized as the recipe says."""
    return RecipeError(problem, where=tensor_of(module, base_name), hint=hint)


def tensor_of(module: str, base_name: str) -> str:
    """Return how messages call a tensor of a module."""
    return f"Module '{module}', {base_name}"
