"""What is wrong is said in one sentence, in the words of the command, and nothing is left."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest
from shell import refused, run
from unprivileged import as_anybody

W4A16 = ("--scheme", "W4A16")
WITH_DATA = (*W4A16, "--observer", "optimal")


# Words


def test_a_misspelt_scheme(model: Path, tmp_path: Path) -> None:
    arguments = ("plan", model, "--scheme", "W4A61")
    refused(arguments, "unknown scheme 'W4A61'. Did you mean 'W4A16'?", cwd=tmp_path)


def test_a_misspelt_observer(model: Path, tmp_path: Path) -> None:
    arguments = ("quantize", model, *W4A16, "--observer", "optimall", "-o", "out")
    text = "--observer: unknown observer 'optimall'. Did you mean 'optimal'?"
    refused(arguments, text, cwd=tmp_path)


def test_a_misspelt_option_of_an_observer_told_as_data(model: Path, tmp_path: Path) -> None:
    option = ("--observer", "optimal,importence=hessian")
    done = run("plan", str(model), *W4A16, *option, "--json", cwd=tmp_path)
    error = json.loads(done.stderr)["error"]
    assert (done.returncode, error["exit_code"], error["type"]) == (2, 2, "RecipeError")
    assert error["message"].startswith(
        "--observer: Unknown option 'importence' for observer 'optimal'. Did you mean 'importance'?"
    )


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ((), "The command has neither --scheme nor --recipe. Give one of them"),
        ((*W4A16, "--recipe", "r.yaml"), "The command has both --scheme and --recipe. Give one"),
        (("--recipe", "r.yaml", "--ignore", "x"), "--ignore has no meaning beside --recipe."),
        ((*W4A16, "--data", "gone.txt"), "--data 'gone.txt' does not exist. Give the path of a"),
    ],
)
def test_options_that_do_not_go_together(
    options: Sequence[str], text: str, model: Path, tmp_path: Path
) -> None:
    refused(("quantize", model, *options, "-o", "out"), text, cwd=tmp_path)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (("--samples", "0"), "--samples 0 is not allowed. Allowed: a whole number, 1 or more."),
        (("--seq-len", "long"), "--seq-len long is not allowed. Allowed: a whole number, 1 or"),
        (("--group-size", "x"), "--group-size x is not allowed. Allowed: a whole number, 1 or"),
        (("--dtype", "fp16"), "--dtype fp16 is not allowed. Did you mean 'float16'? Allowed: "),
        (("--dtype", "BF16"), "Did you mean 'bfloat16'?"),
        (("--pipeline", "sequentail"), "Did you mean 'sequential'?"),
    ],
)
def test_values_that_no_option_has(
    options: Sequence[str], text: str, model: Path, tmp_path: Path
) -> None:
    """Also where the value would have no effect: no data is needed here."""
    refused(("quantize", model, *W4A16, *options, "-o", "out"), text, cwd=tmp_path)


def test_all_mistakes_are_told_at_once(model: Path, tmp_path: Path) -> None:
    options = ("--data", "gone.txt", "--samples", "0", "--batch-size", "-1", "--dtype", "fp16")
    arguments = ("quantize", str(model), "-s", "W4A61", *options, "--on-unseen", "x", "-o", "out")
    done = run(*arguments, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    first, *mistakes = done.stderr.splitlines()
    assert first == "Error: There are 6 mistakes:"
    expected = (
        *("--data 'gone.txt' does not exist", "unknown scheme 'W4A61'. Did you mean 'W4A16'?"),
        *(
            "--samples 0 is not",
            "--batch-size -1 is not",
            "--dtype fp16 is not",
            "--on-unseen x is",
        ),
    )
    for told, text in zip(mistakes, expected, strict=True):
        assert told.startswith(f"  {text}")
    told = json.loads(run(*arguments, "--json", cwd=tmp_path).stderr)["error"]
    assert (told["type"], told["exit_code"]) == ("SeveralMistakesError", 2)


def test_an_option_without_its_value(model: Path, tmp_path: Path) -> None:
    arguments = ("plan", model, *W4A16, "--observer", "optimal,hessian")
    text = "'hessian' in 'optimal,hessian' is no option of an observer. Give NAME=VALUE."
    refused(arguments, text, cwd=tmp_path)


def test_a_broken_recipe(model: Path, tmp_path: Path) -> None:
    (tmp_path / "r.yaml").write_text("modifiers:\n  QuantizationModifier:\n    shceme: W4A16\n")
    arguments = ("quantize", model, "--recipe", "r.yaml", "-o", "out")
    text = "r.yaml, line 3: unknown key 'shceme' in QuantizationModifier. Did you mean 'scheme'?"
    refused(arguments, text, cwd=tmp_path)


# Models


@pytest.mark.parametrize(
    ("files", "name", "texts"),
    [
        (["m/readme.txt"], "m", ["'m': there is no config.json in it. Give the folder or the"]),
        (["m.safetensors"], "m.safetensors", ["it is a file"]),
        (["m/Q4_K.gguf"], "m", ["'m/Q4_K.gguf': it does not begin as files in GGUF do"]),
        (["m/a.gguf", "m/b.gguf"], "m", ["'m' holds several models in GGUF: a.gguf, b.gguf"]),
        (
            ["m/config.json", "m/pytorch_model.bin"],
            "m",
            ["The weights of 'm' are pickles (pytorch_model.bin)", "safetensors only", "convert"],
        ),
        (["m.pt"], "m.pt", ["are pickles (m.pt), which can run any code"]),
        (["m/weights.pth"], "m", ["are pickles (weights.pth)"]),
        ([], "./gone", ["Cannot load a model from './gone': there is no such folder."]),
        ([], "no such name!", ["'no such name!': there is no such folder."]),
    ],
)
def test_what_is_no_model(
    files: Sequence[str], name: str, texts: Sequence[str], tmp_path: Path
) -> None:
    for file in files:
        (tmp_path / file).parent.mkdir(exist_ok=True)
        (tmp_path / file).touch()
    refused(("quantize", name, *W4A16, "-o", "out"), *texts, cwd=tmp_path)


@pytest.mark.slow
def test_a_name_that_is_not_in_the_cache(tmp_path: Path) -> None:
    texts = (
        "Cannot load a model from 'nobody/nothing': there is no such folder, and on the hub: ",
    )
    cache = {"HF_HOME": str(tmp_path / "cache"), "HF_HUB_OFFLINE": "1"}
    done = run("plan", "nobody/nothing", *W4A16, cwd=tmp_path, env=cache)
    assert (done.returncode, done.stdout) == (2, "")
    assert texts[0] in done.stderr
    assert done.stderr.count("\n") == 1


# Data


def test_text_without_a_tokenizer(model: Path, text: Path, tmp_path: Path) -> None:
    bare = tmp_path / "bare"
    bare.mkdir()
    for name in ("config.json", "model.safetensors"):
        shutil.copy(model / name, bare)
    arguments = ("quantize", bare, *WITH_DATA, "--data", text, "-o", "out")
    refused(arguments, "is text, and no tokenizer was given. Pass --tokenizer …", cwd=tmp_path)


def test_data_that_is_not_text(model: Path, tmp_path: Path) -> None:
    (tmp_path / "d.txt").write_bytes(b"abc\xff\xfe\x00")
    arguments = ("quantize", model, *WITH_DATA, "--data", "d.txt", "-o", "out")
    text = "The data file 'd.txt' is not UTF-8 text: byte 0xff at offset 3 of the file."
    refused(arguments, text, cwd=tmp_path)


def test_data_that_is_empty(model: Path, tmp_path: Path) -> None:
    (tmp_path / "d.jsonl").touch()
    arguments = ("quantize", model, *WITH_DATA, "--data", "d.jsonl", "-o", "out")
    refused(arguments, "The data file 'd.jsonl' is empty", "Give at least one text", cwd=tmp_path)


def test_no_data_where_it_is_needed(model: Path, tmp_path: Path) -> None:
    arguments = ("quantize", model, "--scheme", "FP8", "-o", "out")
    texts = ("there are no --measurements. Pass --measurements …", "or --data …")
    refused(arguments, "needs data for 14 tensors", *texts, cwd=tmp_path)


# Files that cannot be read to their end


@pytest.mark.parametrize(
    ("pipe", "arguments"),
    [
        ("stats.safetensors", (*W4A16, "--measurements", "stats.safetensors")),
        ("recipe.yaml", ("--recipe", "recipe.yaml")),
        ("data.jsonl", (*WITH_DATA, "--data", "data.jsonl")),
        ("model/config.json", W4A16),
        ("model/tokenizer.json", W4A16),
    ],
)
def test_a_pipe_in_place_of_a_file(
    pipe: str, arguments: Sequence[str], model: Path, tmp_path: Path
) -> None:
    shutil.copytree(model, tmp_path / "model")
    (tmp_path / pipe).unlink(missing_ok=True)
    os.mkfifo(tmp_path / pipe)
    texts = (pipe, "is a pipe (FIFO), and only regular files are")
    signal.alarm(120)  # ends this process if it waits for a writer
    refused(("quantize", "model", *arguments, "-o", "out"), *texts, cwd=tmp_path)
    signal.alarm(0)


@pytest.mark.parametrize(
    ("file", "arguments", "text"),
    [
        ("recipe.yaml", ("--recipe", "recipe.yaml"), "at most 16,777,216 of such a file are read"),
        ("data.json", (*WITH_DATA, "--data", "data.json"), "Write it with one record per line"),
        ("data.jsonl", (*WITH_DATA, "--data", "data.jsonl"), "line 1 has more than 64 MiB"),
        ("model/config.json", W4A16, "and at most 100,000,000 are read"),
        ("model/tokenizer.json", W4A16, "and at most 100,000,000 are read"),
    ],
)
def test_a_file_larger_than_memory(
    file: str, arguments: Sequence[str], text: str, model: Path, tmp_path: Path
) -> None:
    shutil.copytree(model, tmp_path / "model")
    with (tmp_path / file).open("wb") as opened:
        opened.truncate(2**42)  # without a block on the disk
    refused(("quantize", "model", *arguments, "-o", "out"), file, text, cwd=tmp_path)


# Output


def test_an_output_that_is_there(model: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.txt").touch()
    arguments = ("quantize", model, *W4A16, "-o", "out")
    refused(arguments, "exists already. Nothing was written.", "--overwrite", code=7, cwd=tmp_path)
    text = "replaces quantized checkpoints and empty folders only"
    refused((*arguments, "--overwrite"), text, "thesis.txt", code=7, cwd=tmp_path)


def test_a_path_that_cannot_be_made(model: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    arguments = ("quantize", model, *W4A16, "-o", "file/a/b")
    text = f"Cannot write a checkpoint to '{tmp_path}/file/a/b': '{tmp_path}/file' is a file."
    refused(arguments, text, code=7, cwd=tmp_path)


@pytest.mark.slow
def test_a_folder_that_is_read_only(model: Path, tmp_path: Path) -> None:
    place = tmp_path / "place"
    place.mkdir()
    place.chmod(0o555)
    arguments = ("quantize", model, *W4A16, "-o", place / "a" / "out")
    text = f"Cannot write a checkpoint to '{place}/a/out': '{place}' is not writable. Choose"
    if subprocess.run(["true"], preexec_fn=as_anybody).returncode:
        pytest.skip("root cannot give up its rights here")
    refused(arguments, text, code=7, cwd=tmp_path, preexec_fn=as_anybody)


# Failures


def test_debug_shows_the_traceback_and_the_sentence(model: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    done = run("quantize", str(model), *W4A16, "-o", "out", "--debug", cwd=tmp_path)
    assert done.returncode == 7
    assert done.stderr.startswith("Traceback")
    assert done.stderr.splitlines()[-1].startswith("Error: The output folder")
