"""``calipers quantize``, from a folder to a checkpoint."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
import torch
from families import PROBE
from shell import PROGRAM, environment, run, run_here
from transformers import AutoModelForCausalLM

from calipers.checkpoint.headers import size_on_disk

OPTIONS = ("--scheme", "W4A16", "--observer", "imatrix_mse,grid=10", "--seq-len", "64")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("place")


def test_a_checkpoint_is_written_and_told_of(model: Path, text: Path, place: Path) -> None:
    output = place / "my out"
    done = run(
        *("quantize", str(model), *OPTIONS, "--data", str(text), "--samples", "80"),
        *("--dtype", "bfloat16", "-o", str(output)),  # whatever this machine is fast with
    )
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    assert lines[0].startswith(f"Written to {output}: 658 kB → 220 kB (33%), 4.")
    assert lines[1] == "  14 weights: int4 per group 128, imatrix_mse(grid=10)"
    assert lines[2] == "80 samples, 5,120 tokens seen."
    assert lines[4] == "Modules whose output loses most, and through what:"
    assert [line.split()[-1] for line in lines[5:10]] == ["weight"] * 5
    assert lines[-8:] == [
        "What each layer loses:",
        f"  calipers show '{output}'",
        "Whether it will load and run elsewhere:",
        f"  calipers lint '{output}'",
        "All of it as a page:",
        f"  calipers report '{output}' -o report.html",
        "Next, on text that calibration has not seen:",
        f"  calipers evaluate {model} '{output}' --data {text} --skip 80 --seq-len 64",
    ]
    assert [path.name for path in place.iterdir()] == ["my out"]
    quantized = AutoModelForCausalLM.from_pretrained(output)
    assert bool(torch.isfinite(quantized(PROBE).logits).all())


def test_the_same_as_data_and_over_what_is_there(model: Path, text: Path, place: Path) -> None:
    output = place / "my out"
    arguments = ("quantize", str(model), "-s", "FP8_DYNAMIC", "-o", str(output), "-d", str(text))
    told = json.loads(run_here(*arguments, "--overwrite", "--json").stdout)
    assert told["output"] == str(output)
    assert (told["before"], told["after"]) == (size_on_disk(model), size_on_disk(output))
    assert (told["samples"], told["tokens"], told["pipeline"]) == (0, 0, "datafree")
    assert len(told["quantized"]) == 28
    assert len(told["errors"]) == 14
    assert list(told["errors"].values()) == sorted(told["errors"].values(), reverse=True)
    assert told["next"].startswith("calipers evaluate ")


@pytest.mark.slow
def test_data_from_standard_input(model: Path, text: Path, tmp_path: Path) -> None:
    lines = [json.dumps({"text": line}) for line in text.read_text().split(".")]
    (tmp_path / "data.jsonl").write_text("\n".join(lines))
    arguments = ("quantize", str(model), *OPTIONS, "--samples", "80", "--no-packing", "-o")
    run_here(*arguments, str(tmp_path / "file"), "-d", str(tmp_path / "data.jsonl"))
    with (tmp_path / "data.jsonl").open("rb") as data:
        piped = subprocess.run(
            [*PROGRAM, *arguments, str(tmp_path / "piped"), "-d", "-"],
            stdin=data,
            env=environment(),
            capture_output=True,
            text=True,
        )
    assert piped.returncode == 0, piped.stderr
    assert "80 samples, " in piped.stdout
    assert piped.stdout.endswith("--data HELD_OUT.jsonl\n")  # what was read cannot be read again
    file, out = ((tmp_path / name / "model.safetensors").read_bytes() for name in ("file", "piped"))
    assert file == out


def test_states_of_attention_have_names(model: Path, text: Path, tmp_path: Path) -> None:
    (tmp_path / "recipe.yaml").write_text(
        "modifiers: {QuantizationModifier: {kv_cache_scheme: {num_bits: 8, type: float, "
        "strategy: tensor, dynamic: false, symmetric: true}}}"
    )
    arguments = ("--recipe", str(tmp_path / "recipe.yaml"), "-d", str(text), "--samples", "80")
    done = run_here(
        *("quantize", str(model), *arguments, "--seq-len", "64", "-o", str(tmp_path / "out"))
    )
    assert "  2 key states: float8 per tensor" in done.stdout
    assert "  2 value states: float8 per tensor" in done.stdout


def test_data_that_nothing_needs_is_told_of(model: Path, text: Path, tmp_path: Path) -> None:
    arguments = ("quantize", str(model), "-s", "W8A16", "-o", str(tmp_path / "out"))
    assert "No data was needed.\n" in run_here(*arguments).stdout
    told = run_here(*arguments, "--data", str(text), "--overwrite").stdout
    assert "No data was needed, and --data was not read.\n" in told


def test_what_would_lose_less_is_told_of_few_bits(model: Path, text: Path, tmp_path: Path) -> None:
    arguments = ("quantize", str(model), "-o", str(tmp_path / "out"), "--overwrite", "-s")
    told = run_here(*arguments, "W4A16").stdout
    assert "14 weights rounded to nearest with memoryless_minmax: --method gptq, or" in told
    few = ("--data", str(text), "--samples", "4", "--seq-len", "64")
    gptq = ("W4A16", "--method", "gptq", "--observer", "memoryless_minmax", *few)
    for others in (("W8A16",), ("W4A16", "--observer", "memoryless_mse"), gptq):
        assert json.loads(run_here(*arguments, *others, "--json").stdout)["better"] == ""


def test_a_recipe_with_several_formats(model: Path, text: Path, tmp_path: Path) -> None:
    (tmp_path / "recipe.yaml").write_text(
        "modifiers:\n"
        "  - QuantizationModifier: {targets: ['re:.*mlp.*'], scheme: W4A16}\n"
        "  - QuantizationModifier: {targets: ['re:.*self_attn.*proj'], scheme: FP8}\n"
    )
    done = run_here(
        *("quantize", str(model), "--recipe", str(tmp_path / "recipe.yaml"), "-d", str(text)),
        *("-o", str(tmp_path / "out"), "--samples", "80", "--seq-len", "64", "--seed", "3"),
        *("--batch-size", "4", "--pipeline", "sequential", "--max-shard-size", "100kB"),
    )
    assert done.exit_code == 0
    assert "  8 weights: float8 per tensor, memoryless_minmax\n" in done.stdout
    assert "  8 inputs: float8 per tensor, static_minmax\n" in done.stdout
    assert "  6 weights: int4 per group 128, memoryless_minmax\n" in done.stdout
    assert (tmp_path / "out" / "model.safetensors.index.json").exists()


def test_a_warning_is_a_sentence_and_the_result_is_there(
    model: Path, text: Path, tmp_path: Path
) -> None:
    few = ("--samples", "2", "--seq-len", "16", "--data", str(text), "-s", "FP8")
    done = run_here("quantize", str(model), *few, "-o", str(tmp_path / "out"), "--json")
    assert done.exit_code == 0
    warned = json.loads(done.stderr.splitlines()[-1])["warning"]
    assert "static ranges from so little data are unreliable" in warned
    assert json.loads(done.stdout)["tokens"] == 32
