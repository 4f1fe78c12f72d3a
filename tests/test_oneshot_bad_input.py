"""What bad input gets: a clear error, the model as it was, nothing written."""

from __future__ import annotations

import errno
import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from families import Untouched, build, saved, token_ids
from transformers import AutoModelForCausalLM, PreTrainedModel

import calipers
from calipers import errors
from calipers.checkpoint import shards
from calipers.checkpoint.writer import write_checkpoint

pytestmark = pytest.mark.filterwarnings("ignore::calipers.errors.CalipersWarning")


def modifiers(*each: dict[str, Any]) -> dict[str, Any]:
    return {"modifiers": [{"QuantizationModifier": options} for options in each]}


FP8 = modifiers({"targets": ["Linear"], "ignore": ["lm_head"], "scheme": "FP8"})


def refused(
    error: type[Exception],
    text: str,
    model: Any,
    recipe: Any,
    dataset: Any = None,
    *,
    output: Path,
    **options: Any,
) -> None:
    """The call fails with this error and text; model and disk are as they were."""
    untouched = Untouched(model) if isinstance(model, PreTrainedModel) else None
    beside = sorted(output.parent.rglob("*")) if output.parent.exists() else None
    with pytest.raises(error, match=re.escape(text)) as caught:
        calipers.oneshot(model, recipe, dataset, output_dir=output, progress=False, **options)
    assert isinstance(caught.value, errors.CalipersError)
    assert caught.value.exit_code != 0
    if untouched is not None:
        untouched.check()
    assert (sorted(output.parent.rglob("*")) if output.parent.exists() else None) == beside


@pytest.fixture
def output(tmp_path: Path) -> Path:
    return tmp_path / "place" / "out"


FAMILIES = pytest.mark.parametrize("family", ["llama", "llama tied", "mixtral"])


# Recipes


@FAMILIES
def test_two_modifiers_for_one_tensor(family: str, output: Path) -> None:
    both = modifiers(
        {"targets": ["Linear"], "scheme": "W4A16"},
        {"targets": ["re:.*q_proj"], "scheme": "W8A16"},
    )
    refused(
        errors.ClaimError,
        "quantize 'model.layers.0.self_attn.q_proj.weight'. A tensor is quantized once: narrow the "
        "targets of one of them, or add the module to its ignore list.",
        build(family),
        both,
        output=output,
    )


@FAMILIES
def test_a_group_size_that_does_not_divide(family: str, output: Path) -> None:
    recipe = modifiers(
        {
            "targets": ["Linear"],
            "weights": {"num_bits": 4, "strategy": "group", "group_size": 96},
        }
    )
    refused(
        errors.DivisibilityError,
        "model.layers.0.self_attn.q_proj, weight: 128 is not divisible by 96. Group sizes that "
        "divide it: 16, 32, 64, 128.",
        build(family),
        recipe,
        output=output,
    )


@FAMILIES
def test_no_module_matches(family: str, output: Path) -> None:
    recipe = modifiers({"targets": ["Conv2d"], "scheme": "W4A16"})
    refused(errors.UnmatchedPatternError, "'Conv2d'", build(family), recipe, output=output)


@FAMILIES
def test_an_ignored_name_that_is_not_there(family: str, output: Path) -> None:
    recipe = modifiers({"targets": ["Linear"], "ignore": ["lm_haed"], "scheme": "W4A16"})
    text = "Did you mean 'lm_head'?"
    refused(errors.UnmatchedPatternError, text, build(family), recipe, output=output)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"scheme": "W4A61"}, "Did you mean 'W4A16'?"),
        ({"scheme": "W4A16", "weight_observer": "mimnax"}, "Did you mean 'minmax'?"),
        ({"scheme": "W4A16", "weight_observer": {"name": "mse", "maxshrnk": 0.2}}, "'maxshrink'"),
        ({"scheme": "W4A16", "weight_observer": {"name": "mse", "maxshrink": 7}}, "maxshrink"),
        ({"scheme": "W4A16", "taregts": ["Linear"]}, "Did you mean 'targets'?"),
        ({"weights": {"num_bits": 4, "symetric": True}}, "Did you mean 'symmetric'?"),
    ],
)
def test_words_that_nobody_knows(options: dict[str, Any], text: str, output: Path) -> None:
    refused(errors.CalipersError, text, build(), modifiers(options), output=output)


def test_the_line_of_a_recipe_is_named(output: Path) -> None:
    recipe = "modifiers:\n  QuantizationModifier:\n    scheme: W4A16\n    ingore: [lm_head]\n"
    refused(errors.RecipeError, "line 4", build(), recipe, output=output)


# Data


@FAMILIES
def test_no_data_where_data_is_needed(family: str, output: Path) -> None:
    text = (
        "The recipe needs data for 14 tensors (the first is "
        "model.layers.0.self_attn.q_proj.input), and no dataset was given."
    )
    if family == "mixtral":
        text = "(the first is model.layers.0.self_attn.q_proj.input), and no dataset was given."
    refused(errors.NoDataError, text, build(family), FP8, output=output)


def test_the_pipeline_without_data_where_data_is_needed(output: Path) -> None:
    text = (
        "The recipe needs data for 14 tensors (the first is "
        'model.layers.0.self_attn.q_proj.input), and pipeline="datafree" uses none. Choose another '
        "pipeline, or"
    )
    options = {"pipeline": "datafree", "output": output}
    refused(errors.NoDataError, text, build(), FP8, token_ids(), **options)


@pytest.mark.parametrize("pipeline", ["basic", "sequential"])
@FAMILIES
@pytest.mark.parametrize("dataset", [[], [[]]], ids=["empty", "an empty row"])
def test_an_empty_dataset(dataset: Any, family: str, pipeline: str, output: Path) -> None:
    text = "there is nothing to calibrate with"
    options = {"pipeline": pipeline, "output": output}
    refused(errors.EmptyDataError, text, build(family), FP8, dataset, **options)


@pytest.mark.parametrize("pipeline", ["basic", "sequential"])
@FAMILIES
def test_a_dataset_of_padding(family: str, pipeline: str, output: Path) -> None:
    ids = token_ids(2, 8)
    batches = [{"input_ids": ids, "attention_mask": torch.zeros_like(ids)}]
    text = "is all padding: its attention_mask of shape (2, 8) is zero everywhere"
    options = {"pipeline": pipeline, "output": output}
    refused(errors.AllPaddingError, text, build(family), FP8, batches, **options)


def test_text_and_no_tokenizer(output: Path) -> None:
    refused(errors.NoTokenizerError, "no tokenizer", build(), FP8, ["a text"], output=output)


def test_token_ids_that_the_model_does_not_have(output: Path) -> None:
    data = [[1, 2, 99999]]
    refused(errors.TokenIdError, "99999", build(), FP8, data, output=output)


# The model


@pytest.mark.parametrize("pipeline", ["basic", "sequential"])
@pytest.mark.parametrize("scheme", ["FP8", "W4A16 imatrix", "kv"])
def test_activations_that_are_not_numbers(scheme: str, pipeline: str, output: Path) -> None:
    model = build()
    data = [[5] * 12, [5] * 12, [5, 6, 7] * 4, [5] * 12]
    with torch.no_grad():
        model.get_input_embeddings().weight[7] = float("nan")
    recipe, module = {
        "FP8": (FP8, "model.layers.0.self_attn.q_proj"),
        "W4A16 imatrix": (
            modifiers({"scheme": "W4A16", "ignore": ["lm_head"], "weight_observer": "imatrix_mse"}),
            "model.layers.0.self_attn.q_proj",
        ),
        "kv": (
            modifiers({"kv_cache_scheme": {"num_bits": 8, "type": "float", "strategy": "tensor"}}),
            "model.layers.0.self_attn",
        ),
    }[scheme]
    untouched = Untouched(model)
    with pytest.raises(errors.NonFiniteError) as caught:
        calipers.oneshot(
            model,
            recipe,
            data,
            output_dir=output,
            pipeline=pipeline,
            shuffle=False,
            packing=False,
            progress=False,
        )
    assert module in str(caught.value)
    assert "batch 2" in str(caught.value)
    untouched.check()
    assert not output.parent.exists()


def test_a_weight_that_is_not_a_number(output: Path) -> None:
    model = build()
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[3, 4] = float("inf")
    text = "model.layers.1.mlp.up_proj"
    refused(errors.NonFiniteError, text, model, "W4A16", output=output)


def test_a_model_that_is_quantized_already(tmp_path: Path, output: Path) -> None:
    model = build()
    calipers.oneshot(model, "W4A16", output_dir=tmp_path / "first", progress=False)
    text = "quantized already: its config has a quantization_config"
    first = tmp_path / "first"
    refused(errors.QuantizedModelError, text, first, "W8A16", output=output)
    refused(errors.QuantizedModelError, text, str(first), FP8, output=output, pipeline="sequential")
    refused(errors.AlreadyQuantizedError, "already quantized", model, "W8A16", output=output)


def test_a_module_that_is_no_model_of_transformers(output: Path) -> None:
    text = "Cannot load a model from 'Linear': it is not a model of transformers. "
    with pytest.raises(errors.ModelLoadError, match=text):
        calipers.oneshot(torch.nn.Linear(2, 2), "W8A16", output_dir=output)
    assert not output.exists()


def test_a_path_without_a_model(tmp_path: Path, output: Path) -> None:
    (tmp_path / "empty").mkdir()
    text = (
        f"Cannot load a model from '{tmp_path / 'empty'}': there is no config.json in it. Give the "
        "folder or the name of a Hugging Face model."
    )
    refused(errors.ModelLoadError, text, tmp_path / "empty", "W4A16", output=output)
    text = f"Cannot load a model from '{tmp_path / 'nowhere'}': there is no such folder. "
    for given in (tmp_path / "nowhere", str(tmp_path / "nowhere")):
        refused(errors.ModelLoadError, text, given, "W4A16", output=output)


@pytest.mark.parametrize("pipeline", ["auto", "sequential"])
def test_a_model_whose_tensors_are_missing(pipeline: Any, tmp_path: Path, output: Path) -> None:
    folder = saved(build(), tmp_path / "model")
    (folder / "model.safetensors").unlink()
    text = f"Cannot load a model from '{folder}'"
    refused(errors.ModelLoadError, text, folder, FP8, token_ids(), output=output, pipeline=pipeline)


# Options


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (
            {"pipeline": "sequental"},
            "pipeline='sequental' is not allowed. Did you mean 'sequential'? Allowed: auto, "
            "datafree, basic, sequential.",
        ),
        (
            {"on_unseen": "peer"},
            "on_unseen='peer' is not allowed. Did you mean 'peers'? Allowed: error, weights_only, "
            "peers.",
        ),
        ({"pipeline": None}, "pipeline=None is not allowed. Allowed: auto"),
        ({"device": "cudda"}, "device='cudda' cannot be used: "),
        ({"device": "meta"}, "device='meta' cannot be used: "),
        ({"max_shard_size": "large"}, "max_shard_size='large' is no size"),
        ({"num_calibration_samples": 0}, "num_samples=0 is not allowed"),
        ({"batch_size": -1}, "batch_size=-1 is not allowed"),
        ({"max_seq_length": 0}, "max_seq_length=0 is not allowed"),
    ],
)
def test_options_outside_their_domain(options: dict[str, Any], text: str, output: Path) -> None:
    given = {"output": output, **options}
    refused(errors.ConfigurationError, text, build(), FP8, token_ids(), **given)


# The output folder


def test_an_output_folder_that_exists_is_refused_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("calipers.entrypoint.load_model", lambda *_, **__: pytest.fail("loaded"))
    output = tmp_path / "out"
    output.mkdir()
    (output / "config.json").write_text("mine")
    text = f"The output folder '{output}' exists already. Nothing was written."
    refused(errors.CheckpointExistsError, text, build(), "W4A16", output=output)
    assert (output / "config.json").read_text() == "mine"


def test_overwriting_replaces_a_checkpoint_and_nothing_else(tmp_path: Path) -> None:
    output = tmp_path / "out"
    calipers.oneshot(build(), "W4A16", output_dir=output, progress=False)
    (output / "left over").touch()
    calipers.oneshot(build(), "W8A16", output_dir=output, overwrite=True, progress=False)
    assert not (output / "left over").exists()
    assert '"num_bits": 8' in (output / "config.json").read_text()
    other = tmp_path / "other"
    other.mkdir()
    (other / "thesis.txt").touch()
    text = "does not look like a checkpoint"
    options = {"output": other, "overwrite": True}
    refused(errors.NotACheckpointError, text, build(), "W4A16", **options)


def test_a_failed_run_keeps_the_old_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = tmp_path / "out"
    calipers.oneshot(build(), "W4A16", output_dir=output, progress=False)
    before = {path.name: path.read_bytes() for path in output.iterdir()}
    fail_after(monkeypatch, 5)
    text = "No space left on device"
    options = {"output": output, "overwrite": True}
    refused(errors.CheckpointWriteError, text, build(), "W8A16", **options)
    assert {path.name: path.read_bytes() for path in output.iterdir()} == before


# A full disk


def fail_after(monkeypatch: pytest.MonkeyPatch, tensors: int) -> None:
    """Let the disk be full when this many tensors are written."""
    write, count = shards.Shard._write, iter(range(10**6))

    def failing(shard: shards.Shard, name: str, tensor: torch.Tensor) -> None:
        if next(count) >= tensors:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write(shard, name, tensor)

    monkeypatch.setattr(shards.Shard, "_write", failing)


@FAMILIES
@pytest.mark.parametrize("tensors", [0, 7])
def test_a_disk_that_fills_up(
    tensors: int, family: str, output: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fail_after(monkeypatch, tensors)
    text = f"Writing the checkpoint '{output}' failed: No space left on device."
    refused(errors.CheckpointWriteError, text, build(family), FP8, token_ids(), output=output)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    place = tmp_path / "disk"
    place.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(place)]
    if os.geteuid() != 0 or subprocess.run(command, capture_output=True).returncode:
        pytest.skip("needs a disk of its own")
    yield place
    subprocess.run(["umount", str(place)], check=True)


def test_a_disk_that_is_too_small(small_disk: Path) -> None:
    text = "The checkpoint needs about 0.00"
    big = build(vocab_size=4096)
    refused(errors.DiskSpaceError, text, big, "W8A16", output=small_disk / "out")


def test_a_disk_that_another_program_fills(
    small_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("calipers.checkpoint.writer.free_space", lambda _: 10**12)
    text = "failed: No space left on device. What was written has been removed again"
    big = build(vocab_size=4096)
    refused(errors.CheckpointWriteError, text, big, "W8A16", output=small_disk / "out")


@pytest.mark.parametrize("pipeline", ["auto", "sequential"])
@pytest.mark.parametrize("holder", [".", "..", "link"])
def test_the_model_itself_is_not_overwritten(holder: str, pipeline: str, tmp_path: Path) -> None:
    source = tmp_path / "all" / "source"
    source.mkdir(parents=True)
    build().save_pretrained(source)
    (source.parent / "config.json").write_text("{}")
    (source / "link").symlink_to(source)
    output = (source / holder).resolve() if holder != "link" else source / "link"
    place = source.parent if holder == ".." else source
    text = (
        f"The output folder '{place}' would replace the model that is quantized, which was loaded "
        f"from '{source}'. Nothing was written. Choose another folder."
    )
    options: dict[str, Any] = {"output": output, "overwrite": True, "pipeline": pipeline}
    refused(errors.SourceFolderError, text, source, FP8, token_ids(), **options)
    loaded = AutoModelForCausalLM.from_pretrained(source)
    refused(errors.SourceFolderError, text, loaded, FP8, token_ids(), **options)
    with pytest.raises(errors.SourceFolderError, match=re.escape(text)):
        write_checkpoint(loaded, output, recipe="", overwrite=True)


@FAMILIES
def test_a_run_that_succeeds_is_noticed(family: str) -> None:
    """Otherwise none of the tests above would say anything."""
    model = build(family)
    untouched = Untouched(model)
    calipers.oneshot(model, "W8A16", progress=False)
    with pytest.raises(AssertionError):
        untouched.check()
