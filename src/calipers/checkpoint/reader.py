"""Loading a model: into memory, or so that each tensor stays on disk until it is needed."""

from __future__ import annotations

import re
import traceback
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from contextlib import ExitStack, contextmanager, suppress
from copy import deepcopy
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from compressed_tensors.offload import offload_module
from compressed_tensors.offload.cache.disk import DiskCache
from compressed_tensors.utils import patch_attr
from torch import Tensor

from calipers.checkpoint.headers import first_float_dtype, stored_tensors
from calipers.checkpoint.location import (
    check_files,
    check_location,
    dequantized_dtype,
    gguf_file,
    has_no_safetensors,
    hub_access,
)
from calipers.errors import (
    CalipersError,
    ConfigurationError,
    ModelLoadError,
    Option,
    cannot_load,
    counted,
    damaged_file,
    library_errors,
    pickled_weights,
    shortened,
)
from calipers.files.safetensors_header import StoredTensor
from calipers.files.writing import remove_scratch, scratch_folder
from calipers.runtime.progress import Begin
from calipers.topology.names import expert_of

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase


_FILES = {
    "model": "config.json, generation_config.json and the weights",
    "tokenizer": "tokenizer.json, tokenizer_config.json and the files they name",
}
"""What is read together, so that an error can say which files to look at."""

_HALVES = {torch.float16, torch.bfloat16}
_FEW_TENSORS = 1000
_MANY_TENSORS = 1 << 20
_FEW_BYTES = 1 << 30


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


def check_weights(folder: Path, config: PreTrainedConfig, trust_remote_code: bool) -> None:
    """Refuse a folder whose files do not hold exactly the weights that its config asks for.

    Only what the architecture itself ties, computes or ignores may differ.
    """
    stored = stored_tensors(folder)
    if not stored:
        return  # a plan needs no weights, and transformers says it if a model does
    _check_experts(folder, config, stored)
    config = deepcopy(config)  # a quantizer writes into it
    quantizer = _quantizer(config)
    dtype = config.dtype or first_float_dtype(stored)
    most = 4 * len(stored) + _FEW_TENSORS
    model = build_on_meta(config, trust_remote_code, dtype, most_tensors=most)
    _check_buffers(folder, model, stored)
    if quantizer is not None:
        quantizer.preprocess_model(
            model=model,
            dtype=dtype,
            device_map=None,
            checkpoint_files=None,
            use_kernels=False,
        )
    _check_dtypes(folder, model, stored, quantizer is not None)
    refuse_different(str(folder), model, _load_without_values(model, stored, quantizer))


def refuse_different(name: str, model: PreTrainedModel, info: Mapping[str, Any]) -> None:
    """Refuse a model if transformers tells that it missed, ignored or changed weights.

    :param info: what ``from_pretrained`` returns with ``output_loading_info=True``
    """
    missing, unexpected = set(info["missing_keys"]), set(info["unexpected_keys"])
    mismatched = [
        f"{key} is {tuple(found)}, not {tuple(wanted)}"
        for key, found, wanted in info["mismatched_keys"]
    ]
    converted = info.get("conversion_errors", {})
    mismatched += [f"{key} cannot be put together" for key in converted]
    missing -= set(converted)
    unexpected -= {key for key, _ in model.named_buffers()}  # which the model computes itself
    if getattr(model.config, "quantization_config", None) is not None:
        unexpected = {key for key in unexpected if not _is_parameter_of_expert(key)}
    if missing or unexpected or mismatched:
        raise _other_weights(name, type(model).__name__, missing, unexpected, mismatched)


def build_on_meta(
    config: PreTrainedConfig,
    trust_remote_code: bool,
    dtype: torch.dtype | str | None,
    *,
    most_tensors: int = _MANY_TENSORS,
) -> PreTrainedModel:
    """Build a model whose tensors have shapes and dtypes, and no values.

    :param most_tensors: how many tensors it may have; a config can ask for any number
    """
    from transformers import AutoModelForCausalLM

    with torch.device("meta"), _no_more_than(most_tensors, str(config.name_or_path)):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
            config, dtype=dtype, trust_remote_code=trust_remote_code
        )
    return model


def _quantizer(config: PreTrainedConfig) -> Any:
    from transformers.quantizers.auto import get_hf_quantizer

    found, _, _ = get_hf_quantizer(config, None, None, True, {})  # type: ignore[no-untyped-call]
    return found


def _load_without_values(
    model: PreTrainedModel, stored: Mapping[str, StoredTensor], quantizer: Any
) -> dict[str, Any]:
    """Let transformers load tensors without values, and return what it tells of it."""
    from transformers import core_model_loading
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.modeling_utils import LoadStateDictConfig

    empty = {
        name: torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
        for name, tensor in stored.items()
    }
    how = LoadStateDictConfig(
        device_map={"": "meta"},
        dtype=model.dtype,
        dtype_plan=model._get_dtype_plan(model.dtype),
        hf_quantizer=quantizer,
        weight_mapping=get_model_conversion_mapping(  # type: ignore[arg-type]
            model, None, quantizer
        ),
    )
    with patch_attr(core_model_loading, "tqdm", lambda items, **_: items):  # no bar for nothing
        info, _ = core_model_loading.convert_and_load_state_dict_in_model(model, empty, how)
    model.tie_weights(missing_keys=info.missing_keys, recompute_mapping=False)
    model._adjust_missing_and_unexpected_keys(info)
    return {**info.to_dict(), "conversion_errors": info.conversion_errors}


@contextmanager
def _no_more_than(tensors: int, name: str) -> Iterator[None]:
    """Stop building a model that has too many tensors."""
    register = torch.nn.Module.register_parameter
    left = tensors

    def counted(module: torch.nn.Module, key: str, parameter: Any) -> None:
        nonlocal left
        left -= 1
        if left < 0:
            problem = f"it describes a model of more than {tensors:,} tensors"
            raise damaged_file(Path(name) / "config.json", problem)
        register(module, key, parameter)

    with patch_attr(torch.nn.Module, "register_parameter", counted):
        yield


def _check_buffers(
    folder: Path, model: PreTrainedModel, stored: Mapping[str, StoredTensor]
) -> None:
    """Refuse a config whose computed tensors, which no file holds, would fill the memory."""
    needed = sum(buffer.nbytes for buffer in model.buffers())
    if needed > 4 * sum(tensor.size for tensor in stored.values()) + _FEW_BYTES:
        problem = f"the model that it describes computes {needed / 1e9:,.0f} GB of buffers"
        raise damaged_file(folder / "config.json", problem)


def _check_dtypes(
    folder: Path, model: PreTrainedModel, stored: Mapping[str, StoredTensor], quantized: bool
) -> None:
    """Refuse tensors whose bits would be read as other numbers than they were written as."""
    expected = model.state_dict()
    dtypes = {tensor.dtype for tensor in stored.values()}
    mixed = not quantized and dtypes.issuperset(_HALVES)
    different = []
    for name, tensor in stored.items():
        wanted = expected[name].dtype if name in expected else tensor.dtype
        if name not in expected and name.endswith(".weight") and not quantized:
            wanted = model.dtype  # of a tensor that transformers converts
        if _is_other_kind(tensor.dtype, wanted) or (mixed and _other_half(tensor.dtype, wanted)):
            different.append(f"{name} is {tensor.dtype}, not {wanted}")
    if different:
        raise _other_weights(str(folder), type(model).__name__, mismatched=different)


def _is_other_kind(found: torch.dtype, wanted: torch.dtype) -> bool:
    """Whether numbers change their meaning, and not only their precision."""
    if found.is_floating_point != wanted.is_floating_point:
        return True
    return found != wanted and found.itemsize == wanted.itemsize == 1


def _other_half(found: torch.dtype, wanted: torch.dtype) -> bool:
    """Whether a dtype of 16 bits is not the one of the model; one checkpoint has one of them."""
    return {found, wanted} == _HALVES


def _check_experts(
    folder: Path, config: PreTrainedConfig, stored: Mapping[str, StoredTensor]
) -> None:
    """Refuse experts of which some tensors are missing.

    transformers takes those it finds in the order of their numbers, whatever these are.
    """
    numbers: dict[str, dict[str, set[int]]] = defaultdict(lambda: defaultdict(set))
    for name in stored:
        if expert := expert_of(name):
            numbers[expert.experts][expert.rest].add(expert.number)
    missing = []
    for experts, tensors in numbers.items():
        every = range(max(max(found) for found in tensors.values()) + 1)
        if len(every) > len(stored):
            raise damaged_file(folder, f"'{experts}' has an expert with number {every[-1]}")
        for tensor, found in tensors.items():
            missing += [f"{experts}.{number}.{tensor}" for number in every if number not in found]
    if missing:
        raise _other_weights(str(folder), type(config).__name__.removesuffix("Config"), missing)


def _other_weights(
    name: str,
    model: str,
    missing: Iterable[str] = (),
    unexpected: Iterable[str] = (),
    mismatched: Iterable[str] = (),
) -> ModelLoadError:
    """Say how files of weights differ from those of the model that the config describes.

    :param missing: tensors of the model that no file holds
    :param unexpected: tensors of the files that the model has no place for
    :param mismatched: tensors that are not as the model has them, each with how they differ
    """
    kinds = {"missing": missing, "unknown to the model": unexpected, "different": mismatched}
    told = [
        f"{counted(len(tensors), 'tensor')} {kind} ({shortened(tensors)})"
        for kind, tensors in ((kind, sorted(tensors)) for kind, tensors in kinds.items())
        if tensors
    ]
    return ModelLoadError(
        f"are not those of the {model} that its config.json describes: {'; '.join(told)}. "
        "Nothing was put in their place",
        subject=f"The weights of '{name}'",
        hint="Compare config.json with the original, or copy or download the model again.",
    )


def _is_parameter_of_expert(key: str) -> bool:
    """Whether a tensor is one of those for which transformers has no place in fused experts.

    Whoever wrote the checkpoint was warned of it; vLLM reads them.
    """
    return expert_of(key) is not None and key.endswith(("_scale", "_zero_point"))


@contextmanager
def loading_counted(begin: Begin) -> Iterator[None]:
    """Count the tensors that are loaded, in place of the bars that transformers would show.

    :param begin: is told how many there are
    """
    from transformers.utils import logging

    class Counted(logging.EmptyTqdm):
        """What transformers takes for a bar."""

        def __iter__(self) -> Iterator[Any]:
            yield from _counted(self._iterator or (), begin)

    def made(_: Callable[..., Any], arguments: tuple[Any, ...], options: dict[str, Any]) -> Any:
        return Counted(*arguments, **options)  # type: ignore[no-untyped-call]

    before = logging.set_tqdm_hook(made)
    try:
        yield
    finally:
        logging.set_tqdm_hook(before)


def _counted(loaded: Iterable[Any], begin: Begin) -> Iterator[Any]:
    if not isinstance(loaded, Sized):
        yield from loaded
        return
    add = begin(len(loaded), "tensors")
    for each in loaded:
        yield each
        add(1)
