"""Every error a user can meet, each with its own message and command-line exit code."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar


class CalipersError(Exception):
    """Base of all errors that Calipers raises on purpose."""

    exit_code: ClassVar[int] = 1

    def __str__(self) -> str:
        # KeyError, a base of some subclasses, would show the repr of the message.
        return str(self.args[0]) if self.args else ""


class CalipersWarning(UserWarning):
    """Something works, but not as the user may think it does."""


class ConfigurationError(CalipersError, ValueError):
    """What the user asked for cannot be done by anybody."""

    exit_code = 2


class UnsupportedFormatError(ConfigurationError):
    """The arguments name a number format that does not exist here."""

    def __init__(self, what: str) -> None:
        super().__init__(
            f"{what} is not a supported format. Supported: int with 2 to 8 bits and float with 8 "
            "bits (fp8 e4m3), symmetric or not; float with 4 bits (fp4 e2m1), symmetric."
        )


class LayoutError(ConfigurationError):
    """A strategy and a tensor that do not fit each other."""


class StrategyError(LayoutError):
    """A strategy that has no meaning for this kind of tensor."""

    def __init__(self, strategy: str, base_name: str, allowed: Iterable[str]) -> None:
        super().__init__(
            f"Strategy '{strategy}' cannot be applied to '{base_name}'. "
            f"Allowed for '{base_name}': {_listing(allowed)}."
        )


class UnsuitableError(ConfigurationError):
    """An observer that is not made for this kind of tensor, strategy or format."""


class CountedStrategyError(UnsuitableError, LayoutError):
    """A strategy with too many scales to count the values of each."""

    def __init__(self, where: str, strategy: str) -> None:
        super().__init__(
            f"{where}: values are counted per tensor or per head (strategies tensor and "
            f"attn_head), not per '{strategy}'. Use 'static_minmax' or 'mse' for this strategy."
        )


class EntropyFormatError(UnsuitableError):
    """A format whose codes are too few for entropy to tell anything."""

    def __init__(self, where: str, what: str) -> None:
        super().__init__(
            f"{where}: entropy compares distributions of 8-bit codes, int8 or fp8, not {what}. "
            "Use 'percentile' or 'mse' for this format."
        )


class UnknownBaseNameError(ConfigurationError):
    """A tensor role that does not exist."""

    def __init__(self, base_name: object, known: Iterable[str]) -> None:
        super().__init__(f"Unknown base_name {base_name!r}. Allowed: {_listing(known)}.")


class DivisibilityError(LayoutError):
    """A group size that does not divide the dimension it cuts."""

    def __init__(self, strategy: str, base_name: str, size: int, group_size: int) -> None:
        super().__init__(
            f"Strategy '{strategy}' needs group_size to divide the last dimension of "
            f"'{base_name}': {size} is not divisible by {group_size}. {_sizes_that_divide(size)}."
        )


class TensorKindError(CalipersError, TypeError):
    """A tensor of a kind that cannot be observed."""

    exit_code = 2


class ComplexTensorError(TensorKindError):
    """Complex numbers have no order, hence no range."""

    def __init__(self, where: str, dtype: object) -> None:
        super().__init__(
            f"{where} was given a complex tensor ({dtype}). Observe its real and imaginary parts "
            "separately, or exclude the module."
        )


class NonFiniteError(CalipersError, ValueError):
    """NaN or Inf in an observed tensor."""

    exit_code = 3

    def __init__(self, where: str, count: int, total: int, shape: Sequence[int]) -> None:
        super().__init__(
            f"{where} was given {count} non-finite value{'s' if count > 1 else ''} (NaN or Inf) "
            f"among {total}, in a tensor of shape {tuple(shape)}. Nothing was recorded. Find out "
            'where they come from, or pass nonfinite="ignore" to leave them out and count them.'
        )


class UncountableError(CalipersError, ValueError):
    """Values beyond what bfloat16 can hold, in whose bins they would be counted."""

    exit_code = 3

    def __init__(self, where: str, low: float, high: float, dtype: object) -> None:
        super().__init__(
            f"{where} was given values from {low:g} to {high:g} ({dtype}). They are counted as "
            "bfloat16, which ends at ±3.38953e+38. Nothing was recorded. Scale the tensor down, "
            "or use 'static_minmax'."
        )


class NonFiniteRangeError(CalipersError, ValueError):
    """A range from which no scale can be made."""

    exit_code = 3

    def __init__(self, where: str, count: int, total: int) -> None:
        super().__init__(
            f"{where}: {count} of {total} ranges have no finite, positive scale. Their min or max "
            "is NaN, Inf, or beyond what the dtype of the scale can hold."
        )


class ShapeChangedError(CalipersError, ValueError):
    """A stream whose tensors do not agree in shape."""

    exit_code = 2

    def __init__(self, where: str, field: str, before: Sequence[int], now: Sequence[int]) -> None:
        super().__init__(
            f"{where} has seen tensors with {field} of shape {tuple(before)}, and now one of shape "
            f"{tuple(now)}. One observer watches one tensor: use another one, or reset() this one."
        )


class UnknownOptionError(ConfigurationError):
    """An option that the observer does not have."""

    def __init__(self, owner: str, option: str, known: Iterable[str]) -> None:
        known = sorted(known)
        self.option = option
        super().__init__(
            f"Unknown option '{option}' for observer '{owner}'.{did_you_mean(option, known)} "
            f"Options: {_listing(known)}."
        )


class InvalidOptionError(ConfigurationError):
    """An option with a value outside its domain."""

    def __init__(self, owner: str, problems: Iterable[str]) -> None:
        super().__init__(f"Observer '{owner}': {'; '.join(problems)}.")


class UnknownObserverError(CalipersError, KeyError):
    """A name under which no observer is registered."""

    exit_code = 2

    def __init__(self, name: str, known: Iterable[str]) -> None:
        known = sorted(known)
        super().__init__(
            f"Unknown observer '{name}'.{did_you_mean(name, known)} Registered: {_listing(known)}. "
            "A class of your own is given as 'path/to/file.py:Class'."
        )


class RegistrationError(ConfigurationError):
    """A class that cannot be registered, or a plug-in that cannot be loaded."""


class NoStatisticsError(CalipersError, AssertionError):
    """Parameters were asked for before anything was observed."""

    exit_code = 4

    def __init__(self, location: str = "") -> None:
        place = f" Nothing reached {location}." if location else ""
        super().__init__(f"No statistics available. Call observer(value) first.{place}")


class FusedStatisticsError(CalipersError, AssertionError):
    """Some of the observers that share a global scale have seen nothing."""

    exit_code = 4

    def __init__(self, where: str, missing: Iterable[str]) -> None:
        super().__init__(
            f"{where} shares its global_scale with observers that have no statistics: "
            f"{_listing(missing)}. Call each of them on its tensor before get_qparams() on any."
        )


class WeightGoneError(CalipersError, AssertionError):
    """A result that needs the weight, which a saved or merged observer does not have."""

    def __init__(self, where: str, problem: str) -> None:
        super().__init__(
            f"{where} {problem} the weight it observed, which a report and a global scale "
            "shared with fused observers need. Call observer(weight) again."
        )


class MergeError(CalipersError, ValueError):
    """Two statistics that cannot become one."""

    exit_code = 5


class NotMergeableError(MergeError):
    """A statistic that forgets too much to be merged."""

    def __init__(self, where: str, fields: Mapping[str, str]) -> None:
        reasons = ", ".join(f"{name} ({reason})" for name, reason in fields.items())
        super().__init__(
            f"{where} cannot merge: what it keeps depends on the order of the data: {reasons}. "
            "Use a statistic with memory of all data, such as 'static_minmax'."
        )


class ConfigurationMismatchError(MergeError):
    """Statistics that were gathered under different configurations."""

    def __init__(self, action: str, ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> None:
        differing = sorted(k for k in {*ours, *theirs} if ours.get(k) != theirs.get(k))
        lines = [f"  {key}: {ours.get(key)!r} here, {theirs.get(key)!r} there" for key in differing]
        super().__init__("\n".join([f"Cannot {action}: the configurations differ.", *lines]))


class SavedStateError(CalipersError, ValueError):
    """A saved field that cannot be what was saved."""

    exit_code = 5

    def __init__(self, where: str, field: str, problem: str) -> None:
        super().__init__(
            f"{where} cannot load '{field}': {problem}. Nothing was loaded. The file is damaged; "
            "save it again from the observer that gathered it."
        )


class SyncError(CalipersError, RuntimeError):
    """Ranks whose statistics cannot be reduced to one."""

    exit_code = 6


class ImportanceError(CalipersError, ValueError):
    """Importance was demanded (strict) and cannot be used."""

    exit_code = 3

    def __init__(self, where: str, problem: str) -> None:
        self.reason = f"{where}: {problem}."
        super().__init__(f"{self.reason} With strict=False it would fall back to plain error.")


class ImportanceUnsupportedError(ImportanceError, NotImplementedError):
    """Importance was demanded (strict) for a kind of tensor or strategy that has none."""


class ChangedInputError(CalipersError, RuntimeError):
    """A tensor that was changed in place while it was being shared."""

    exit_code = 3

    def __init__(self, where: str) -> None:
        super().__init__(
            f"{where} reads a tensor that other modules read too, and that one of them changes in "
            "place before all have read it: it cannot be measured once for all. Pass "
            "share_inputs=False to measure it for each of them."
        )


class RankFailedError(CalipersError, RuntimeError):
    """Another process of the job raised an error."""

    exit_code = 6

    def __init__(self, rank: int, step: str, error: str) -> None:
        super().__init__(f"Rank {rank} failed while {step}, so this process stops too. {error}")


class RankLostError(CalipersError, RuntimeError):
    """Another process of the job does not answer any more."""

    exit_code = 6

    def __init__(self, step: str, seconds: float, ranks: Sequence[int]) -> None:
        self.ranks = tuple(ranks)
        names = ", ".join(f"rank {rank}" for rank in ranks)
        super().__init__(
            f"{names[0].upper()}{names[1:]} did not finish {step} and gave no sign of life for "
            f"{seconds:g} s, so this process stops too. Look at the output of that rank: it died, "
            "or its machine cannot be reached."
        )


class StoreLostError(CalipersError, RuntimeError):
    """What the processes of the job have in common is gone."""

    exit_code = 6

    def __init__(self, step: str, problem: str) -> None:
        super().__init__(
            f"The store of the process group cannot be reached after {step}: "
            f"{problem.strip().splitlines()[0]} It is kept by torchrun or, without it, by rank 0: "
            "look at the output of that process."
        )


class RanksDisagreeError(ConfigurationError):
    """Processes of one job that were not given the same."""

    def __init__(self, what: str, values: Sequence[Any]) -> None:
        other = next(rank for rank, value in enumerate(values) if value != values[0])
        super().__init__(
            f"The ranks do not agree on {what}: rank 0 has {values[0]}, "
            f"rank {other} has {values[other]}. "
            "Every process must be given the same model, recipe, data and options."
        )


class UnseenModulesError(CalipersError, ValueError):
    """Modules whose parameters need data that never reached them."""

    exit_code = 4

    def __init__(self, names: Sequence[str], shown: str, hint: str) -> None:
        self.names = tuple(names)
        super().__init__(
            f"{len(names)} module{'s' if len(names) != 1 else ''} saw no tokens: {shown}. {hint}"
        )


class NoDecoderLayersError(ConfigurationError):
    """A model that has no stack of layers to go through one by one."""

    def __init__(self, model: str) -> None:
        super().__init__(
            f"{model} has no ModuleList of layers, so it cannot be calibrated layer by layer. "
            'Pass pipeline="basic".'
        )


class ModelLoadError(CalipersError, OSError):
    """A model or tokenizer that cannot be loaded."""

    exit_code = 2

    def __init__(self, name: str, problem: str, what: str = "model") -> None:
        super().__init__(
            f"Cannot load a {what} from '{name}': {problem.strip().splitlines()[0].rstrip('.')}. "
            f"Give the folder or the name of a Hugging Face {what}."
        )


class RemoteCodeError(ModelLoadError):
    """A model or tokenizer with code of its own, which nobody has allowed to run."""

    def __init__(self, name: str, what: str = "model") -> None:
        OSError.__init__(
            self,
            f"The {what} '{name}' comes with Python code of its own, which was not run. Read it, "
            "and if you trust it pass trust_remote_code=True.",
        )


class QuantizedModelError(ConfigurationError):
    """A model that somebody has quantized before."""

    def __init__(self, name: str) -> None:
        super().__init__(
            f"{name} is quantized already: its config has a quantization_config. Start from the "
            "model in 16 or 32 bits."
        )


class NoDataError(ConfigurationError):
    """A plan that needs data, and no data."""

    def __init__(self, tensors: Sequence[str]) -> None:
        super().__init__(
            f"The recipe needs data for {len(tensors)} tensors (the first is {tensors[0]}), and no "
            "dataset was given. Pass dataset=…, or choose dynamic activations and observers that "
            "look at weights alone. plan.table() shows which tensors need data."
        )


class RecipeError(ConfigurationError):
    """A recipe that cannot be read, or that does not make sense.

    :param problem: what is wrong, without the place
    :param path: the keys that lead to it, as far as they are known
    :param source: the file, or another word for where the recipe comes from
    :param line: the line in it
    """

    def __init__(
        self,
        problem: str,
        *,
        path: Iterable[str | int] = (),
        source: str | None = None,
        line: int | None = None,
    ) -> None:
        self.problem = problem
        self.path = tuple(path)
        place = [*([source] if source else []), *([f"line {line}"] if line else [])]
        super().__init__(f"{', '.join(place)}: {problem}" if place else problem)


class UnmatchedPatternError(RecipeError):
    """A pattern that matches nothing in the model it is meant for."""


class ClaimError(RecipeError):
    """Two modifiers that both want to quantize one tensor."""

    def __init__(self, tensor: str, first: str, second: str) -> None:
        super().__init__(
            f"Both {first} and {second} quantize '{tensor}'. A tensor is quantized once: narrow "
            "the targets of one of them, or add the module to its ignore list."
        )


class AlreadyQuantizedError(RecipeError):
    """A recipe for modules that are quantized already."""

    def __init__(self, modules: Sequence[str]) -> None:
        super().__init__(
            f"{_counted(modules)} already quantized (has a quantization_scheme). Start from the "
            "unquantized model, or ignore these modules."
        )


class UnfitError(RecipeError):
    """A tensor that cannot be quantized as the recipe says."""

    def __init__(self, module: str, base_name: str, problem: object) -> None:
        super().__init__(f"Module '{module}', {base_name}: {problem}")


class ModulesDivisibilityError(DivisibilityError):
    """Modules whose sizes the groups or blocks of the recipe do not divide."""

    SHOWN: ClassVar[int] = 5

    def __init__(self, offenders: Sequence[tuple[str, str, int, int]]) -> None:
        lines = [
            f"  {module}, {base_name}: {size} is not divisible by {group_size}. "
            f"{_sizes_that_divide(size)}."
            for module, base_name, size, group_size in offenders[: self.SHOWN]
        ]
        if len(offenders) > self.SHOWN:
            lines.append(f"  and {len(offenders) - self.SHOWN} more")
        count = len(offenders)
        LayoutError.__init__(
            self,
            f"The group or block size of the recipe does not divide {count} "
            f"tensor{'s' if count > 1 else ''}:\n"
            + "\n".join(lines)
            + "\nChoose another group_size, or ignore these modules.",
        )


class DataError(CalipersError, ValueError):
    """Calibration data that cannot be used."""

    exit_code = 2


class DataFileMissingError(DataError, FileNotFoundError):
    """A path under which there is nothing."""

    def __init__(self, path: str) -> None:
        super().__init__(
            f"The data file '{path}' does not exist. A text itself is given in a list: [text]. A "
            "dataset of a hub is loaded first: datasets.load_dataset(name, split=...)."
        )


class DataFileError(DataError):
    """A file that does not hold what its name says."""

    def __init__(self, path: str, problem: str, advice: str) -> None:
        super().__init__(f"The data file '{path}' {problem}. {advice}.")


class NotTextError(DataError):
    """A file that should be text and is not."""

    def __init__(self, where: str, byte: int, offset: int) -> None:
        super().__init__(
            f"{where} is not UTF-8 text: byte 0x{byte:02x} at offset {offset} of the file. Save it "
            "as UTF-8, or give another kind of data: .jsonl, .json, .parquet."
        )


class BrokenJsonError(DataError):
    """A file or a line of it that is not JSON."""

    def __init__(self, where: str, problem: str) -> None:
        super().__init__(f"{where} is not valid JSON: {problem}. Correct or remove it.")


class TextColumnError(DataError):
    """A dataset in which the text was not found."""

    def __init__(self, where: str, wanted: str | None, columns: Iterable[str]) -> None:
        columns = list(columns)
        problem = (
            "no column is known to hold the text."
            if wanted is None
            else f"there is no column '{wanted}'.{did_you_mean(wanted, columns)}"
        )
        super().__init__(
            f"{where}: {problem} Columns: {_listing(columns) or 'none'}. "
            "Name the one to read with text_column=..."
        )


class RecordError(DataError):
    """A record from which no text and no token ids can be read."""

    def __init__(self, where: str, problem: str) -> None:
        super().__init__(
            f"{where} {problem}. A record is a text, a list of token ids, a chat (a list of "
            "messages with role and content), or an object with one of them in a column."
        )


class NoTokenizerError(DataError):
    """Text, and nobody to turn it into token ids."""

    def __init__(self, where: str) -> None:
        super().__init__(
            f"{where} is text, and no tokenizer was given. Pass the tokenizer of the model, or "
            "token ids instead of text."
        )


class ChatTemplateError(DataError):
    """A chat that the tokenizer cannot turn into text."""

    def __init__(self, where: str, problem: str) -> None:
        super().__init__(
            f"{where} is a chat, and {problem}. Use the tokenizer of a chat model, set its "
            "chat_template, or name a column of plain text with text_column=..."
        )


class EmptyDataError(DataError):
    """Data without a single token."""

    def __init__(self, what: str, problem: str = "is empty") -> None:
        super().__init__(
            f"{what} {problem}: there is nothing to calibrate with. Give at least one text or "
            "list of token ids; several hundred make reliable ranges."
        )


class AllPaddingError(DataError):
    """A batch of which no token counts."""

    def __init__(self, where: str, shape: Sequence[int]) -> None:
        super().__init__(
            f"{where} is all padding: its attention_mask of shape {tuple(shape)} is zero "
            "everywhere. The mask is 1 for tokens that count; correct it, or leave the batch out."
        )


class BatchError(DataError):
    """A batch that a model could not take."""

    def __init__(self, where: str, problem: str) -> None:
        super().__init__(
            f"{where} {problem}. A batch is a dict with input_ids of shape (rows, tokens) and, "
            "if there is padding, an attention_mask of the same shape."
        )


class TokenIdError(DataError):
    """Token ids that the model does not have."""

    def __init__(self, where: str, problem: str, vocab_size: int | None) -> None:
        allowed = "0 and up" if vocab_size is None else f"0 to {vocab_size - 1}"
        super().__init__(
            f"{where} {problem}. Allowed token ids: whole numbers, {allowed}. Does the tokenizer "
            "belong to this model?"
        )


class UnknownDatasetError(DataError, TypeError):
    """An object that is no kind of dataset."""

    def __init__(self, what: str, advice: str = "") -> None:
        super().__init__(
            f"A dataset cannot be {what}. Allowed: the path of a text, .jsonl, .json or .parquet "
            "file or of a folder of save_to_disk; a Dataset of datasets; a list of texts, chats, "
            "records or lists of token ids; a 2-D tensor of token ids; a DataLoader or another "
            f"iterable of batches with input_ids.{advice}"
        )


class SplitsError(DataError):
    """A dataset of several splits, of which none was chosen."""

    def __init__(self, splits: Iterable[str]) -> None:
        splits = list(splits)
        example = f": dataset[{splits[0]!r}]" if splits else ""
        super().__init__(
            f"The dataset has several splits: {_listing(splits) or 'none'}. "
            f"Choose one of them{example}."
        )


class DataOptionError(DataError, ConfigurationError):
    """An option of the data outside its domain."""

    def __init__(self, option: str, value: object, allowed: str) -> None:
        super().__init__(f"{option}={value!r} is not allowed: {option} must be {allowed}.")


class MissingPackageError(DataError, ImportError):
    """Data of a kind that needs a package which is not installed."""

    def __init__(self, what: str, package: str) -> None:
        super().__init__(
            f"Reading {what} needs the package {package}, which is not installed. "
            "Install it with: pip install 'calipers[data]'"
        )


class CheckpointError(CalipersError):
    """A checkpoint that cannot be written."""

    exit_code = 7


class CheckpointExistsError(CheckpointError, FileExistsError):
    """The output folder is there already."""

    def __init__(self, directory: object) -> None:
        super().__init__(
            f"The output folder '{directory}' exists already. Nothing was written. Choose another "
            "one, or pass overwrite=True to replace it."
        )


class NotACheckpointError(CheckpointError, FileExistsError):
    """A folder that holds something else than a checkpoint, and so is not replaced."""

    def __init__(self, directory: object, found: Sequence[str]) -> None:
        shown = _listing(sorted(found)[:3]) + (", …" if len(found) > 3 else "")
        super().__init__(
            f"The output folder '{directory}' does not look like a checkpoint: it has no "
            f"config.json, but {shown}. overwrite=True replaces empty folders and checkpoints "
            "only. Choose another folder, or remove this one yourself."
        )


class OutputPathError(CheckpointError, OSError):
    """A path at which no folder can be made."""

    def __init__(self, directory: object, problem: str) -> None:
        super().__init__(
            f"Cannot write a checkpoint to '{directory}': {problem}. Choose another output folder."
        )


class DiskSpaceError(CheckpointError, OSError):
    """A disk too small for the checkpoint."""

    def __init__(self, directory: object, needed: int, free: int) -> None:
        super().__init__(
            f"The checkpoint needs about {_gigabytes(needed)}, but the disk of '{directory}' has "
            f"{_gigabytes(free)} free. Nothing was written. Free some space, or choose a folder on "
            "another disk."
        )


class CheckpointWriteError(CheckpointError, OSError):
    """The operating system refused to write."""

    def __init__(self, directory: object, problem: object) -> None:
        super().__init__(
            f"Writing the checkpoint '{directory}' failed: {problem}. What was written has been "
            "removed again; the model is unchanged, and can be written to another folder."
        )


class NotFrozenError(CheckpointError, ValueError):
    """A module whose quantization parameters are not final."""

    def __init__(self, module: str, status: object) -> None:
        super().__init__(
            f"Module '{module}' has a quantization scheme, but its status is {status}, not "
            "'frozen'. Calibrate and freeze the model before writing it."
        )


class StoredLayoutError(CheckpointError, ValueError):
    """A quantized tensor that the checkpoint's layout would cut into pieces or join with others."""

    def __init__(self, tensor: str, together: Iterable[str]) -> None:
        super().__init__(
            f"'{tensor}' is quantized, but checkpoints of this model hold it in another shape, "
            f"into which transformers converts {_listing(together)}. Quantized tensors cannot be "
            "converted. Add the module to 'ignore'."
        )


class FusedExpertsError(CalipersError, NotImplementedError):
    """Experts in stacked parameters that cannot be told apart faithfully."""

    exit_code = 3

    def __init__(self, where: str, module_class: str, problem: str) -> None:
        super().__init__(
            f"The experts of '{where}' ({module_class}) are stacked in one parameter and cannot be "
            f"turned into Linear layers: {problem}. "
            'To quantize the rest of the model, leave them out: ignore: ["re:.*experts.*"].'
        )


class MaskShapeError(LayoutError):
    """A mask whose tokens are not those of the tensor that is watched."""

    def __init__(self, where: str, mask: tuple[int, ...], tensor: tuple[int, ...]) -> None:
        super().__init__(
            f"{where}: the mask of shape {mask} does not say which tokens of the tensor of shape "
            f"{tensor} count. Use batch_size=1 or pack the data, so that there is no padding."
        )


class HiddenQueriesError(ConfigurationError):
    """An attention implementation in which queries cannot be looked at."""

    def __init__(self, model: str, implementation: str) -> None:
        super().__init__(
            f"{model} computes attention by '{implementation}', in which the queries cannot be "
            'seen or quantized. Call model.set_attn_implementation("sdpa") first, or quantize the '
            "keys and values alone (kv_cache_scheme)."
        )


class UnknownChoiceError(ConfigurationError):
    """A word that is none of those an option knows."""

    def __init__(self, option: str, given: object, known: Iterable[str]) -> None:
        known = list(known)
        super().__init__(
            f"{option}={given!r} is not allowed.{did_you_mean(str(given), known)} "
            f"Allowed: {_listing(known)}."
        )


class DeviceError(ConfigurationError):
    """A device that there is not."""

    def __init__(self, given: object, problem: str) -> None:
        super().__init__(
            f"device={given!r} cannot be used: {problem.strip().splitlines()[0].rstrip('.')}. Give "
            "a device of torch such as 'cpu' or 'cuda:0', or leave it out to compute where the "
            "model is."
        )


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return a sentence with the nearest known word, or nothing.

    >>> did_you_mean("minmaxx", ["mse", "minmax"])
    " Did you mean 'minmax'?"
    """
    by_lower = {each.lower(): each for each in known}
    nearest = difflib.get_close_matches(word.lower(), list(by_lower), n=1)
    return f" Did you mean '{by_lower[nearest[0]]}'?" if nearest else ""


def _listing(words: Iterable[str]) -> str:
    return ", ".join(words)


def _counted(names: Sequence[str], shown: int = 5) -> str:
    listed = ", ".join(f"'{name}'" for name in names[:shown])
    more = f" and {len(names) - shown} more" if len(names) > shown else ""
    return f"{listed}{more} {'is' if len(names) == 1 else 'are'}"


def _sizes_that_divide(size: int) -> str:
    divisors = [d for d in (16, 32, 64, 96, 128, 256) if size % d == 0]
    if divisors:
        return f"Group sizes that divide it: {_listing(map(str, divisors))}"
    return "Use strategy 'channel', or ignore this module"


def _gigabytes(size: int) -> str:
    return f"{size / 1e9:,.3f} GB"
