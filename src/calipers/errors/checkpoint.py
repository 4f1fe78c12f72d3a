"""What several files say of models that are loaded and checkpoints that are written."""

from __future__ import annotations

from calipers.errors.base import (
    CheckpointError,
    CheckpointExistsError,
    MeasurementsError,
    ModelLoadError,
)
from calipers.errors.formatting import first_line, in_one_line


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


def pickled_weights(name: str, file: str) -> ModelLoadError:
    """Refuse weights that are pickles, which can run any code."""
    return ModelLoadError(
        f"are pickles ({file}), which can run any code when they are opened; Calipers opens "
        "safetensors only",
        subject=f"The weights of '{name}'",
        hint="If you trust where they come from, convert the model once, with transformers: "
        "AutoModelForCausalLM.from_pretrained(folder).save_pretrained(other_folder), the same "
        "with AutoTokenizer, and give the other folder.",
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
