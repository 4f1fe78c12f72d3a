"""Models that are loaded and checkpoints that are written."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from calipers.errors.base import (
    CalipersError,
    ConfigurationError,
    counted,
    in_one_line,
    listing,
    shortened,
)


class ModelLoadError(CalipersError, OSError):
    """A model or tokenizer that cannot be loaded."""

    exit_code = 2

    def __init__(self, name: str, problem: str, what: str = "model") -> None:
        first = (problem.strip().splitlines() or ["no reason is given"])[0]
        super().__init__(
            f"Cannot load a {what} from '{name}': {first.rstrip('.')}. "
            f"Give the folder or the name of a Hugging Face {what}."
        )


class DamagedFileError(ModelLoadError):
    """A file of a model or tokenizer that does not hold what it should."""

    def __init__(self, file: object, problem: str) -> None:
        OSError.__init__(
            self,
            f"The file '{file}' is damaged or incomplete: {in_one_line(problem).rstrip('.')}. "
            "Correct it, or copy or download it again.",
        )


class UnreadableModelError(ModelLoadError):
    """A model or tokenizer at whose files a library fails."""

    def __init__(self, name: str, files: str, problem: str) -> None:
        OSError.__init__(
            self,
            f"The files of '{name}' cannot be used ({files}): {problem.rstrip('.')}. Compare them "
            "with the original, or copy or download them again. If transformers loads them, their "
            "kind may be one that Calipers does not support.",
        )


class WeightsError(ModelLoadError):
    """Files of weights that are not those of the model that the config describes.

    :param missing: tensors of the model that no file holds
    :param unexpected: tensors of the files that the model has no place for
    :param mismatched: tensors that are not as the model has them, each with how they differ
    """

    def __init__(
        self,
        name: str,
        model: str,
        missing: Iterable[str] = (),
        unexpected: Iterable[str] = (),
        mismatched: Iterable[str] = (),
    ) -> None:
        self.missing, self.unexpected, self.mismatched = map(
            sorted, (missing, unexpected, mismatched)
        )
        kinds = (
            (self.missing, "missing"),
            (self.unexpected, "unknown to the model"),
            (self.mismatched, "different"),
        )
        told = [
            f"{counted(len(tensors), 'tensor')} {kind} ({shortened(tensors)})"
            for tensors, kind in kinds
            if tensors
        ]
        OSError.__init__(
            self,
            f"The weights of '{name}' are not those of the {model} that its config.json describes: "
            f"{'; '.join(told)}. Nothing was put in their place. Compare config.json with the "
            "original, or copy or download the model again.",
        )


class GgufError(ModelLoadError):
    """A model in the format of llama.cpp."""

    def __init__(self, name: str, file: str) -> None:
        OSError.__init__(
            self,
            f"'{name}' is a model in GGUF, the format of llama.cpp ({file}), and most such models "
            "are quantized already. Give the folder or the name of the Hugging Face model that it "
            "was made from. If there is none, transformers can turn it back: "
            f'AutoModelForCausalLM.from_pretrained(folder, gguf_file="{file}") and '
            "save_pretrained(…), the same with AutoTokenizer.",
        )


class PickledModelError(ModelLoadError):
    """A model whose weights are pickles, which can run any code."""

    def __init__(self, name: str, file: str) -> None:
        OSError.__init__(
            self,
            f"The weights of '{name}' are pickles ({file}), which can run any code when they are "
            "opened; Calipers opens safetensors only. If you trust where they come from, convert "
            "the model once, with transformers: "
            "AutoModelForCausalLM.from_pretrained(folder).save_pretrained(other_folder), the same "
            "with AutoTokenizer, and give the other folder.",
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


class SourceFolderError(CheckpointError, FileExistsError):
    """An output folder in whose place lies something that the checkpoint is made from."""

    def __init__(self, directory: object, source: object, what: str = "model") -> None:
        super().__init__(
            f"The output folder '{directory}' would replace the {what} in use, '{source}'. Nothing "
            "was written. Choose another folder."
        )


class NotACheckpointError(CheckpointError, FileExistsError):
    """A folder that holds something else than a checkpoint, and so is not replaced."""

    def __init__(self, directory: object, foreign: Sequence[str]) -> None:
        self.foreign = tuple(foreign)
        if foreign:
            problem = f"what is in it does not all belong to a checkpoint: {shortened(foreign, 3)}"
            advice = "move these away"
        else:
            problem = (
                "neither calipers.json nor a quantization_config in config.json says that a "
                "quantized checkpoint was written there"
            )
            advice = "remove it yourself"
        super().__init__(
            f"The output folder '{directory}' is not replaced: {problem}. overwrite=True replaces "
            f"quantized checkpoints and empty folders only. Choose another folder, or {advice}."
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
            f"into which transformers converts {listing(together)}. Quantized tensors cannot be "
            "converted. Add the module to 'ignore'."
        )


def _gigabytes(size: int) -> str:
    return f"{size / 1e9:,.3f} GB"
