"""Loading a model: into memory, or so that each tensor stays on disk until it is needed."""

from __future__ import annotations

import re
import traceback
import weakref
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from compressed_tensors.offload import offload_module
from compressed_tensors.offload.cache.disk import DiskCache
from compressed_tensors.utils import patch_attr
from torch import Tensor

from calipers.checkpoint.completeness import build_on_meta, check_weights, refuse_different
from calipers.checkpoint.gguf_files import dequantized_dtype, gguf_file
from calipers.checkpoint.headers import first_float_dtype, stored_tensors
from calipers.checkpoint.hub import has_no_safetensors, hub_access
from calipers.checkpoint.location import check_files, check_location
from calipers.errors import (
    CalipersError,
    ConfigurationError,
    ModelLoadError,
    Option,
    cannot_load,
    library_errors,
    pickled_weights,
)
from calipers.files.locked_folder import remove_scratch, scratch_folder

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

_FILES = {
    "model": "config.json, generation_config.json and the weights",
    "tokenizer": "tokenizer.json, tokenizer_config.json and the files they name",
}
"""What is read together, so that an error can say which files to look at."""


def load_model(
    model: PreTrainedModel | str | Path,
    *,
    trust_remote_code: bool = False,
    on_disk_for: torch.device | None = None,
    quantized: bool = False,
    dtype: torch.dtype | None = None,
) -> PreTrainedModel:
    """Return the model that was given, or load it from a folder or by its name.

    :param on_disk_for: leave the weights on disk and read each when it is needed on this device;
        where the files do not hold the weights as the model does, they are loaded all the same
    :param quantized: whether it may be quantized already
    :param dtype: what a model that is not left on disk is loaded as; None: as it is stored
    """
    if not isinstance(model, (str, Path)):
        if not hasattr(model, "config"):
            raise cannot_load(type(model).__name__, "it is not a model of transformers")
        if not quantized:
            refuse_quantized(model.config, type(model).__name__)
        return model
    from transformers import AutoModelForCausalLM

    name = str(model)
    config = _load_config(name, trust_remote_code, quantized=quantized)
    if (file := gguf_file(name)) is not None:
        with _errors_of_loading(name, files=file.name):
            return _load_gguf(file, dtype)
    with _errors_of_loading(name):
        if Path(name).is_dir():
            check_weights(Path(name), config, trust_remote_code)
        if on_disk_for is not None and Path(name).is_dir():
            lazy = _left_on_disk(Path(name), config, on_disk_for, trust_remote_code)
            if lazy is not None:
                return lazy
        told: Any = AutoModelForCausalLM.from_pretrained(
            name,
            dtype=dtype or "auto",
            trust_remote_code=trust_remote_code,
            use_safetensors=True,
            output_loading_info=True,
        )
        loaded: PreTrainedModel = told[0]
        refuse_different(name, loaded, told[1])
    loaded.eval()  # type: ignore[no-untyped-call]
    return loaded


def _load_gguf(file: Path, dtype: torch.dtype | None) -> PreTrainedModel:
    """Load a model from GGUF; what is quantized in it is dequantized."""
    import transformers
    from transformers.utils import logging

    options: dict[str, Any] = {}
    if hasattr(transformers, "GgufConfig"):  # older versions dequantize without being asked
        options["quantization_config"] = transformers.GgufConfig(dequantize=True)
    with ExitStack() as stack:
        with suppress(ImportError):  # its bar cannot be turned off otherwise
            reader = import_module("transformers.modeling_gguf_pytorch_utils")
            stack.enter_context(patch_attr(reader, "tqdm", logging.tqdm))
        told: Any = transformers.AutoModelForCausalLM.from_pretrained(
            file.parent,
            gguf_file=file.name,
            dtype=dtype or dequantized_dtype(file),
            output_loading_info=True,
            **options,
        )
    model: PreTrainedModel = told[0]
    refuse_different(str(file), model, told[1])
    # It is a model like any other now, which transformers would still not save.
    for attribute in ("hf_quantizer", "is_quantized", "quantization_method"):
        vars(model).pop(attribute, None)
    vars(model.config).pop("quantization_config", None)
    model.config._name_or_path = str(file)
    model.eval()  # type: ignore[no-untyped-call]
    return model


def load_skeleton(
    name: str | Path, *, trust_remote_code: bool = False, quantized: bool = False
) -> PreTrainedModel:
    """Build a model without its weights: its tensors have shapes and dtypes, and no values.

    The files of weights, where they are on disk, must be those of the model all the same.

    :param quantized: whether it may be quantized already; it is built as if it were not
    """
    name = str(name)
    config = _load_config(name, trust_remote_code, quantized=quantized)
    file = gguf_file(name)
    name = str(file or name)
    with _errors_of_loading(name):
        if Path(name).is_dir():
            check_weights(Path(name), config, trust_remote_code)
        dtype = config.dtype if file is None else dequantized_dtype(file)
        dtype = dtype or first_float_dtype(stored_tensors(Path(name)))
        model = build_on_meta(config, trust_remote_code, dtype)
        model.tie_weights()
    _keep_precise(model)
    model.config._name_or_path = name
    if Path(name).is_dir():
        with _errors_of_loading(name, files="generation_config.json"):
            _load_generation_config(model, name)
    return model


def build_unchecked(folder: Path, most_tensors: int) -> PreTrainedModel:
    """Build the model of a config without its weights, whatever the files beside it hold."""
    config = _load_config(str(folder), False, quantized=True)
    with _errors_of_loading(str(folder)):
        model = build_on_meta(config, False, config.dtype, most_tensors=most_tensors)
        model.tie_weights()
    return model


def _load_generation_config(model: PreTrainedModel, folder: str) -> None:
    """Let a model that was built have the generation config that it has when it is loaded."""
    if model.can_generate():
        nothing = ("cache_dir", "proxies", "token", "revision")
        adjust: Any = model.adjust_generation_fn
        adjust(
            None,
            False,
            False,
            folder,
            force_download=False,
            local_files_only=True,
            subfolder="",
            trust_remote_code=False,
            **dict.fromkeys(nothing),
        )


def _keep_precise(model: PreTrainedModel) -> None:
    """Give tensors the dtype that transformers keeps them in, whatever that of the model is."""
    kept: dict[str, torch.dtype] = model._get_dtype_plan(model.dtype)
    for pattern, dtype in kept.items():
        matches = re.compile(re.escape(pattern).replace(r"\*", ".*")).search
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            if matches(name):
                tensor.data = tensor.data.to(dtype)


def load_tokenizer(
    tokenizer: PreTrainedTokenizerBase | str | Path | None,
    model: PreTrainedModel,
    *,
    trust_remote_code: bool = False,
) -> PreTrainedTokenizerBase | None:
    """Return the tokenizer that was given, or load it; by default the one beside the model."""
    if tokenizer is not None and not isinstance(tokenizer, (str, Path)):
        return tokenizer
    name = str(tokenizer or getattr(model.config, "_name_or_path", ""))
    file = gguf_file(name)
    if tokenizer is None and file is None and not _has_tokenizer(name):
        return None
    if Path(name).is_dir():
        check_files(Path(name).iterdir())
    from transformers import AutoTokenizer

    with _errors_of_loading(name, "tokenizer", None if file is None else file.name):
        loaded: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
            name if file is None else file.parent,
            trust_remote_code=trust_remote_code,
            **({} if file is None else {"gguf_file": file.name}),
        )
    return loaded


@contextmanager
def _errors_of_loading(name: str, what: str = "model", files: str | None = None) -> Iterator[None]:
    """Put what transformers says into words of ours."""
    files = files or _FILES[what]
    with library_errors(lambda words: _unusable(name, files, words)):
        try:
            with hub_access(name, what):
                yield
        except CalipersError:
            raise
        except (OSError, ValueError, ImportError) as error:
            if _is_about_code(error):
                raise _has_code(name, what) from error
            if what == "model" and has_no_safetensors(name):
                raise pickled_weights(name, "it has no model.safetensors") from error
            absent = "" if Path(name).exists() else "there is no such folder, and on the hub: "
            if absent or isinstance(error, OSError):
                raise cannot_load(name, absent + str(error).strip(), what) from error
            raise


def _is_about_code(error: Exception) -> bool:
    """Whether it comes from where transformers asks if code of a model may run."""
    from transformers.dynamic_module_utils import resolve_trust_remote_code

    asks = resolve_trust_remote_code.__code__
    return any(frame.f_code is asks for frame, _ in traceback.walk_tb(error.__traceback__))


def _unusable(name: str, files: str, problem: str) -> ModelLoadError:
    return ModelLoadError(
        f"cannot be used ({files}): {problem.rstrip('.')}",
        subject=f"The files of '{name}'",
        hint="Compare them with the original, or copy or download them again. If transformers "
        "loads them, their kind may be one that Calipers does not support.",
    )


def _has_code(name: str, what: str) -> ModelLoadError:
    return ModelLoadError(
        "comes with Python code of its own, which was not run",
        subject=f"The {what} '{name}'",
        hint="Read it, and if you trust it pass " + Option("trust_remote_code", True) + ".",
    )


def _load_config(
    name: str, trust_remote_code: bool, *, quantized: bool = False
) -> PreTrainedConfig:
    """Return the config of a model; one that is quantized is refused where it may not be."""
    from transformers import AutoConfig

    check_location(name, gguf=True)
    file = gguf_file(name)
    with _errors_of_loading(name, files="config.json" if file is None else file.name):
        config: PreTrainedConfig = AutoConfig.from_pretrained(
            name if file is None else file.parent,
            trust_remote_code=trust_remote_code,
            **({} if file is None else {"gguf_file": file.name}),
        )
        if not quantized:
            refuse_quantized(config, name)
    return config


def _has_tokenizer(name: str) -> bool:
    """Whether a folder, or a name on the hub, may have one."""
    if not name:
        return False
    return any(Path(name).glob("*token*")) if Path(name).is_dir() else not Path(name).exists()


def refuse_quantized(config: PreTrainedConfig, name: str) -> None:
    """Refuse a model whose config says that it is quantized."""
    if getattr(config, "quantization_config", None) is not None:
        raise ConfigurationError(
            "is quantized already: its config has a quantization_config",
            subject=name,
            hint="Start from the model in 16 or 32 bits.",
        )


def _left_on_disk(
    folder: Path, config: PreTrainedConfig, device: torch.device, trust_remote_code: bool
) -> PreTrainedModel | None:
    """Build a model whose weights stay in the files of ``folder``; None if they cannot."""
    from transformers.conversion_mapping import get_model_conversion_mapping

    files = {stored: tensor.file for stored, tensor in stored_tensors(folder).items()}
    with _parameters_without_memory():
        model = _build(config, trust_remote_code, config.dtype)
    model.config._name_or_path = str(folder)
    if get_model_conversion_mapping(model, add_legacy=False) or not files:
        return None
    parameters = dict(model.named_parameters())
    if not parameters.keys() <= files.keys():
        return None
    for name, parameter in parameters.items():
        _note_file(parameter, files[name], name)
    storage = scratch_folder()
    weakref.finalize(model, remove_scratch, storage)
    for module in model.modules():
        offload_module(module, device, "disk", offload_dir=str(storage.path))
    model.eval()  # type: ignore[no-untyped-call]
    return model


def _build(
    config: PreTrainedConfig, trust_remote_code: bool, dtype: torch.dtype | str | None
) -> PreTrainedModel:
    """Build a model without its weights, tied as it would be with them."""
    from transformers import AutoModelForCausalLM

    model: PreTrainedModel = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
        config, dtype=dtype, trust_remote_code=trust_remote_code
    )
    model.tie_weights()
    return model


@contextmanager
def _parameters_without_memory() -> Iterator[None]:
    """Let parameters have a shape and no values; buffers, which no file holds, are computed."""
    register = torch.nn.Module.register_parameter

    def without_memory(
        module: torch.nn.Module, name: str, parameter: torch.nn.Parameter | None
    ) -> None:
        if parameter is not None:
            empty = parameter.detach().to("meta")
            parameter = torch.nn.Parameter(empty, requires_grad=parameter.requires_grad)
        register(module, name, parameter)

    with patch_attr(torch.nn.Module, "register_parameter", without_memory):
        yield


def _note_file(parameter: Tensor, file: Path, name: str) -> None:
    DiskCache.index[parameter] = {
        "safetensors_file": str(file),
        "weight_name": name,
        "dtype": str(parameter.dtype).removeprefix("torch."),
    }
