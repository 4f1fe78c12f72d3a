"""Calibration data."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from calipers.errors.base import CalipersError, ConfigurationError, counted, did_you_mean, listing


class NoDataError(ConfigurationError):
    """A plan that needs data, and no data that runs."""

    def __init__(self, tensors: Sequence[str], *, has_dataset: bool = False) -> None:
        problem, remedy = (
            ('pipeline="datafree" uses none', "Choose another pipeline")
            if has_dataset
            else ("no dataset was given", "Pass dataset=…")
        )
        super().__init__(
            f"The recipe needs data for {counted(len(tensors), 'tensor')} (the first is "
            f"{tensors[0]}), and {problem}. {remedy}, or choose dynamic "
            "activations and observers that look at weights alone. plan.table() shows which "
            "tensors need data."
        )


class DataError(CalipersError, ValueError):
    """Calibration data that cannot be used."""

    exit_code = 2


class DataFileMissingError(DataError, FileNotFoundError):
    """A path under which there is nothing."""

    def __init__(self, path: str) -> None:
        super().__init__(
            f"The data file '{path}' does not exist. A text itself is given in a list: [text]. A "
            "data set of the hub is named ORG/NAME[@CONFIG][:SPLIT]."
        )


class NamedDatasetError(DataError):
    """A data set that `datasets` cannot load under its name."""

    def __init__(self, name: str, problem: str) -> None:
        super().__init__(
            f"The data set '{name}' cannot be read: {problem}. Allowed: NAME[@CONFIG][:SPLIT], "
            "where NAME is a data set on the hub or a folder of data files, and SPLIT is train "
            "unless you name another."
        )


class HubUnreachableError(NamedDatasetError, FileNotFoundError):
    """A name that is neither a file nor in the cache, and no hub to ask."""

    def __init__(self, name: str) -> None:
        DataError.__init__(
            self,
            f"'{name}' is no file or folder here and not in the cache of datasets, and the hub, "
            "which may have a data set of that name, cannot be reached. Correct the path, or try "
            "again with a network. A text itself is given in a list: [text].",
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
            f"{where}: {problem} Columns: {listing(columns) or 'none'}. "
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
            f"{where} is text, and no tokenizer was given. Pass tokenizer=… (the folder or the "
            "name of the one that belongs to the model), or token ids instead of text."
        )


class ChatTemplateError(DataError):
    """A chat that the tokenizer cannot turn into text."""

    def __init__(self, where: str, problem: str) -> None:
        super().__init__(
            f"{where} is a chat, and {problem}. Use the tokenizer of a chat model, set its "
            "chat_template, or name a column of plain text with text_column=..."
        )


class TokenizerError(DataError):
    """A text at which the tokenizer fails."""

    def __init__(self, where: str, problem: str) -> None:
        super().__init__(
            f"The tokenizer cannot turn {where} into tokens: {problem}. Does it belong to this "
            "model? Compare its files with the original, or pass tokenizer=..."
        )


class EmptyDataError(DataError):
    """Data without a single token."""

    def __init__(self, what: str, problem: str = "is empty") -> None:
        super().__init__(
            f"{what} {problem}: there is nothing to run the model on. Give at least one text or "
            "list of token ids; several hundred make reliable figures."
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
            "file or of a folder of save_to_disk; the name of a data set; a Dataset of datasets; a "
            "list of texts, chats, records or lists of token ids; a 2-D tensor of token ids; a "
            f"DataLoader or another iterable of batches with input_ids.{advice}"
        )


class SplitsError(DataError):
    """A dataset of several splits, of which none was chosen."""

    def __init__(self, splits: Iterable[str], folder: str | None = None) -> None:
        splits = list(splits)
        first = splits[0] if splits else "…"
        example = f": dataset[{first!r}]" if folder is None else f": '{folder}:{first}'"
        super().__init__(
            f"The dataset has several splits: {listing(splits) or 'none'}. "
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


class NoLibrarySourcesError(DataError, FileNotFoundError):
    """A Python that came without the sources of its standard library."""

    def __init__(self, folder: object) -> None:
        super().__init__(
            f"The demo calibrates and evaluates with the sources of Python's standard library, and "
            f"'{folder}' has none of them. Run it with a Python that was installed with its "
            "library as .py files."
        )
