"""Load models and tokenizers: into memory, lazily from disk, or without weights.

transformers gives weights that it does not find random values. So the names, shapes and dtypes in
the headers are sent through its own loading first, with tensors that have no values: what it would
miss, ignore or refuse is known before anything is loaded, and before memory is taken for a model
whose config asks for more than there is.
"""

from __future__ import annotations

import re
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

from calipers.checkpoint.headers import first_float_dtype, stored_tensors
from calipers.checkpoint.location import (
    check_files,
    dequantized_dtype,
    gguf_file,
    load_config,
    loading_errors,
    refuse_quantized,
)
from calipers.errors import (
    ModelLoadError,
    cannot_load,
    counted,
    damaged_file,
    shortened,
)
from calipers.files.safetensors_header import StoredTensor
from calipers.files.writing import remove_scratch, scratch_folder
from calipers.runtime.progress import Begin
from calipers.topology.names import expert_of

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase


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
    config = load_config(name, trust_remote_code, quantized=quantized)
    if (file := gguf_file(name)) is not None:
        with loading_errors(name, files=file.name):
            return _load_gguf(file, dtype)
    with loading_errors(name):
        if Path(name).is_dir():
            check_weights(Path(name), config, trust_remote_code)
        if on_disk_for is not None and Path(name).is_dir():
            lazy = _left_on_disk(Path(name), config, on_disk_for, trust_remote_code)
            if lazy is not None:
                return lazy
        result: Any = AutoModelForCausalLM.from_pretrained(
            name,
            dtype=dtype or "auto",
            trust_remote_code=trust_remote_code,
            use_safetensors=True,
            output_loading_info=True,
        )
        loaded: PreTrainedModel = result[0]
        refuse_different(name, loaded, result[1])
    loaded.eval()  # type: ignore[no-untyped-call]
    return loaded


def _load_gguf(file: Path, dtype: torch.dtype | None) -> PreTrainedModel:
    """Load a model from GGUF, dequantized."""
    import transformers
    from transformers.utils import logging

    options: dict[str, Any] = {}
    if hasattr(transformers, "GgufConfig"):  # older versions dequantize without being asked
        options["quantization_config"] = transformers.GgufConfig(dequantize=True)
    with ExitStack() as stack:
        with suppress(ImportError):  # its bar cannot be turned off otherwise
            reader = import_module("transformers.modeling_gguf_pytorch_utils")
            stack.enter_context(patch_attr(reader, "tqdm", logging.tqdm))
        result: Any = transformers.AutoModelForCausalLM.from_pretrained(
            file.parent,
            gguf_file=file.name,
            dtype=dtype or dequantized_dtype(file),
            output_loading_info=True,
            **options,
        )
    model: PreTrainedModel = result[0]
    refuse_different(str(file), model, result[1])
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
    """Build a model on the meta device; files of weights that are there are checked all the same.

    :param quantized: whether it may be quantized already; it is built as if it were not
    """
    name = str(name)
    config = load_config(name, trust_remote_code, quantized=quantized)
    file = gguf_file(name)
    name = str(file or name)
    with loading_errors(name):
        if Path(name).is_dir():
            check_weights(Path(name), config, trust_remote_code)
        dtype = config.dtype if file is None else dequantized_dtype(file)
        dtype = dtype or first_float_dtype(stored_tensors(Path(name)))
        model = build_on_meta(config, trust_remote_code, dtype)
        model.tie_weights()
    # Some tensors keep a dtype of their own, whatever that of the model is.
    kept: dict[str, torch.dtype] = model._get_dtype_plan(model.dtype)
    for pattern, own_dtype in kept.items():
        matches = re.compile(re.escape(pattern).replace(r"\*", ".*")).search
        for key, tensor in (*model.named_parameters(), *model.named_buffers()):
            if matches(key):
                tensor.data = tensor.data.to(own_dtype)
    model.config._name_or_path = name
    if Path(name).is_dir() and model.can_generate():
        options: dict[str, Any] = dict.fromkeys(("cache_dir", "proxies", "token", "revision"))
        options |= {"local_files_only": True, "force_download": False}
        options |= {"subfolder": "", "trust_remote_code": False}
        adjust: Any = model.adjust_generation_fn
        with loading_errors(name, files="generation_config.json"):
            adjust(None, False, False, name, **options)
    return model


def build_unchecked(folder: Path, most_tensors: int) -> PreTrainedModel:
    """Build the model of a config without its weights, whatever the files beside it hold."""
    config = load_config(str(folder), False, quantized=True)
    with loading_errors(str(folder)):
        model = build_on_meta(config, False, config.dtype, most_tensors=most_tensors)
        model.tie_weights()
    return model


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
    in_folder = Path(name).is_dir()
    if tokenizer is None and file is None:
        may_have_one = any(Path(name).glob("*token*")) if in_folder else not Path(name).exists()
        if not name or not may_have_one:
            return None
    if in_folder:
        check_files(Path(name).iterdir())
    from transformers import AutoTokenizer

    with loading_errors(name, "tokenizer", None if file is None else file.name):
        loaded: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
            name if file is None else file.parent,
            trust_remote_code=trust_remote_code,
            **({} if file is None else {"gguf_file": file.name}),
        )
    return loaded


def _left_on_disk(
    folder: Path, config: PreTrainedConfig, device: torch.device, trust_remote_code: bool
) -> PreTrainedModel | None:
    """Build a model whose weights stay in the files of ``folder``; None if they cannot."""
    from transformers import AutoModelForCausalLM
    from transformers.conversion_mapping import get_model_conversion_mapping

    register = torch.nn.Module.register_parameter

    def register_on_meta(
        module: torch.nn.Module, name: str, parameter: torch.nn.Parameter | None
    ) -> None:
        if parameter is not None:
            empty = parameter.detach().to("meta")
            parameter = torch.nn.Parameter(empty, requires_grad=parameter.requires_grad)
        register(module, name, parameter)

    # Not on "meta" as a whole: buffers, which no file holds, are computed.
    with patch_attr(torch.nn.Module, "register_parameter", register_on_meta):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
            config, dtype=config.dtype, trust_remote_code=trust_remote_code
        )
        model.tie_weights()
    model.config._name_or_path = str(folder)
    stored, parameters = stored_tensors(folder), dict(model.named_parameters())
    is_converted = bool(get_model_conversion_mapping(model, add_legacy=False))
    if is_converted or not parameters.keys() <= stored.keys():
        return None
    for name, parameter in parameters.items():
        DiskCache.index[parameter] = {
            "safetensors_file": str(stored[name].file),
            "weight_name": name,
            "dtype": str(parameter.dtype).removeprefix("torch."),
        }
    storage = scratch_folder()
    weakref.finalize(model, remove_scratch, storage)
    for module in model.modules():
        offload_module(module, device, "disk", offload_dir=str(storage.path))
    model.eval()  # type: ignore[no-untyped-call]
    return model


def check_weights(folder: Path, config: PreTrainedConfig, trust_remote_code: bool) -> None:
    """Refuse a folder whose files do not hold exactly the weights that its config asks for.

    Only what the architecture itself ties, computes or ignores may differ.
    """
    from transformers.quantizers.auto import get_hf_quantizer

    stored = stored_tensors(folder)
    if not stored:
        return  # a plan needs no weights, and transformers says it if a model does
    _check_experts(folder, config, stored)
    config = deepcopy(config)  # a quantizer writes into it
    quantizer, _, _ = get_hf_quantizer(config, None, None, True, {})  # type: ignore[no-untyped-call]
    dtype = config.dtype or first_float_dtype(stored)
    most = 4 * len(stored) + _FEW_TENSORS
    model = build_on_meta(config, trust_remote_code, dtype, most_tensors=most)
    needed = sum(buffer.nbytes for buffer in model.buffers())
    if needed > 4 * sum(tensor.size for tensor in stored.values()) + _FEW_BYTES:
        problem = f"the model that it describes computes {needed / 1e9:,.0f} GB of buffers"
        raise damaged_file(folder / "config.json", problem)
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
        f"{key} is {tuple(shape)}, not {tuple(expected)}"
        for key, shape, expected in info["mismatched_keys"]
    ]
    converted = info.get("conversion_errors", {})
    mismatched += [f"{key} cannot be put together" for key in converted]
    missing -= set(converted)
    unexpected -= {key for key, _ in model.named_buffers()}  # which the model computes itself
    if getattr(model.config, "quantization_config", None) is not None:
        # transformers has no place for these in fused experts; vLLM reads them, and whoever wrote
        # the checkpoint was warned.
        unexpected = {
            key
            for key in unexpected
            if expert_of(key) is None or not key.endswith(("_scale", "_zero_point"))
        }
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

    register = torch.nn.Module.register_parameter
    left = most_tensors

    def register_counted(module: torch.nn.Module, key: str, parameter: Any) -> None:
        nonlocal left
        left -= 1
        if left < 0:
            problem = f"it describes a model of more than {most_tensors:,} tensors"
            raise damaged_file(Path(str(config.name_or_path)) / "config.json", problem)
        register(module, key, parameter)

    with (
        torch.device("meta"),
        patch_attr(torch.nn.Module, "register_parameter", register_counted),
    ):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
            config, dtype=dtype, trust_remote_code=trust_remote_code
        )
    return model


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
        # Whether numbers change their meaning, and not only their precision.
        other_kind = tensor.dtype.is_floating_point != wanted.is_floating_point
        other_byte = tensor.dtype != wanted and tensor.dtype.itemsize == wanted.itemsize == 1
        # One checkpoint has one dtype of 16 bits.
        other_half = mixed and {tensor.dtype, wanted} == _HALVES
        if other_kind or other_byte or other_half:
            different.append(f"{name} is {tensor.dtype}, not {wanted}")
    if different:
        raise _other_weights(str(folder), type(model).__name__, mismatched=different)


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
        every = range(max(max(present) for present in tensors.values()) + 1)
        if len(every) > len(stored):
            raise damaged_file(folder, f"'{experts}' has an expert with number {every[-1]}")
        for tensor, present in tensors.items():
            missing += [f"{experts}.{number}.{tensor}" for number in every if number not in present]
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
    differences = [
        f"{counted(len(tensors), 'tensor')} {kind} ({shortened(tensors)})"
        for kind, tensors in ((kind, sorted(tensors)) for kind, tensors in kinds.items())
        if tensors
    ]
    return ModelLoadError(
        f"are not those of the {model} that its config.json describes: {'; '.join(differences)}. "
        "Nothing was put in their place",
        subject=f"The weights of '{name}'",
        hint="Compare config.json with the original, or copy or download the model again.",
    )


@contextmanager
def loading_counted(begin: Begin) -> Iterator[None]:
    """Count the tensors that are loaded, in place of the bars that transformers would show.

    :param begin: is told how many there are
    """
    from transformers.utils import logging

    class Counted(logging.EmptyTqdm):
        """What transformers takes for a bar."""

        def __iter__(self) -> Iterator[Any]:
            items = self._iterator or ()
            add = begin(len(items), "tensors") if isinstance(items, Sized) else lambda _: None
            for item in items:
                yield item
                add(1)

    def made(_: Callable[..., Any], arguments: tuple[Any, ...], options: dict[str, Any]) -> Any:
        return Counted(*arguments, **options)  # type: ignore[no-untyped-call]

    before = logging.set_tqdm_hook(made)
    try:
        yield
    finally:
        logging.set_tqdm_hook(before)
