"""``calipers evaluate``: a table for people, figures for machines, and what it refuses."""

from __future__ import annotations

import json
import re
import signal
from pathlib import Path

import pytest
import torch
from shell import Terminal, run, run_here
from transformers import AutoModelForCausalLM, AutoTokenizer

import calipers
from calipers.demo import MODEL
from calipers.demo.text import library_pieces

SCHEMES = ("W8A16", "W4A16")
OPTIONS = ("--samples", "30", "--seq-len", "32", "--batch-size", "8")


@pytest.fixture(scope="module")
def outputs(model: Path, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("outputs")
    for scheme in SCHEMES:
        calipers.oneshot(model, scheme, output_dir=folder / scheme, progress=False)
    return [str(folder / scheme) for scheme in SCHEMES]


def test_checkpoints_side_by_side(model: Path, text: Path, outputs: list[str]) -> None:
    own = ("--dtype", "bfloat16")  # whatever this machine is fast with
    done = run("evaluate", str(model), *outputs, "--data", str(text), *own, *OPTIONS)
    assert done.returncode == 0
    said = [line.split(":")[0] for line in done.stderr.splitlines()]
    assert said == ["model", *SCHEMES]  # each as soon as it is done
    lines = [line for line in done.stdout.splitlines() if line.strip()]
    head = ["model", "size", "perplexity", "change", "noise floor", "KL divergence"]
    assert re.split(r"\s{2,}", lines[0].strip()) == [*head, "top-1 agreement", "above the best"]
    assert sum("the best" in line for line in lines[2:5]) == 1
    assert [line.split()[0] for line in lines[2:5]] == ["model", *SCHEMES]
    assert lines[2].split()[1:3] == ["658", "kB"]
    assert lines[5].startswith("30 samples, 930 tokens predicted.")
    assert "so may one below its noise floor" in lines[5]
    at = next(number for number, line in enumerate(lines) if line.split()[0] == "layer")
    assert lines[at].split() == ["layer", *SCHEMES]
    layers = [line.split()[0] for line in lines[at + 2 : at + 4]]
    assert layers == ["model.layers.0", "model.layers.1"]


def test_a_model_that_predicts_worse_than_chance(tmp_path: Path, text: Path) -> None:
    """A head whose sign is wrong: what would be likely is not, and uniform guesses are better."""
    loaded = AutoModelForCausalLM.from_pretrained(MODEL)
    AutoTokenizer.from_pretrained(MODEL).save_pretrained(tmp_path / "model")
    size = loaded.config.vocab_size
    for sign, is_worse in ((1, False), (-1, True)):
        with torch.no_grad():
            loaded.lm_head.weight.mul_(sign)
        loaded.save_pretrained(tmp_path / "model")
        arguments = ("evaluate", "model", "--data", str(text), *OPTIONS)
        done = run(*arguments, cwd=tmp_path)
        said = f"worse than chance: its perplexity is above the {size} tokens of its vocabulary."
        assert [said in line for line in done.stdout.splitlines()].count(True) == is_worse
        assert ("worse than chance" in done.stderr) == is_worse
        told = json.loads(run(*arguments, "--json", cwd=tmp_path).stdout)
        assert (told["worse_than_chance"], told["vocabulary"]) == (is_worse, size)
        assert (told["base"]["perplexity"]["value"] > size) == is_worse


def test_the_same_as_data(model: Path, text: Path, outputs: list[str]) -> None:
    arguments = ("evaluate", str(model), *outputs, "--data", str(text), *OPTIONS, "--json")
    told = json.loads(run_here(*arguments).stdout)
    assert (told["model"], told["samples"], told["tokens"]) == (str(model), 30, 930)
    assert list(told["checkpoints"]) == list(SCHEMES)
    fine, coarse = (told["checkpoints"][scheme] for scheme in SCHEMES)
    assert 0 < fine["kl"]["value"] < coarse["kl"]["value"]
    assert coarse["agreement"]["low"] <= coarse["agreement"]["value"] <= 1
    assert [layer["layer"] for layer in fine["layers"]] == ["model.layers.0", "model.layers.1"]
    assert all(
        0 < a["own"] < b["own"] for a, b in zip(fine["layers"], coarse["layers"], strict=True)
    )
    quick = json.loads(run_here(*arguments, "--no-layers").stdout)
    assert "layers" not in quick["checkpoints"]["W4A16"]
    assert quick["checkpoints"]["W4A16"]["kl"] == coarse["kl"]


def test_packing_and_seed(model: Path, tmp_path: Path) -> None:
    data = tmp_path / "texts.jsonl"
    texts = [f"{number} is a number, and so is {number + 1}. " * 3 for number in range(60)]
    data.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    arguments = ("evaluate", str(model), "--data", str(data), *OPTIONS, "--json")
    one, packed, other = (
        json.loads(run_here(*arguments, *more).stdout)
        for more in ((), ("--packing",), ("--seed", "1"))
    )
    assert packed["tokens"] == 30 * 31
    figures = [each["base"]["perplexity"]["value"] for each in (one, packed, other)]
    assert len(set(figures)) == 3


@pytest.mark.slow
def test_the_demo_is_judged_on_what_nobody_has_seen() -> None:
    arguments = ("evaluate", "demo", "--data", "demo", "--samples", "24", "--json")
    told = json.loads(run_here(*arguments).stdout)["base"]["perplexity"]["value"]
    unseen, seen = (
        calipers.evaluate(MODEL, [], library_pieces(part), num_samples=24, packing=True)
        for part in ("evaluation", "calibration")
    )
    assert told == unseen.base.perplexity.value != seen.base.perplexity.value


@pytest.mark.parametrize(
    ("arguments", "text", "code"),
    [
        ((), "The command has no --data to evaluate on. Give the path of a text", 2),
        (("nowhere/at/all", "-d", "TEXT"), "Cannot load a model from 'nowhere/at/all'", 2),
        (("OUT", "OUT", "-d", "TEXT"), "is given twice. Give each once.", 2),
        (("-d", "gone.jsonl"), "--data 'gone.jsonl' does not exist.", 2),
        (("-d", "TEXT", "--device", "cuda:99"), "cuda:99", 2),
    ],
)
def test_what_is_refused(
    arguments: tuple[str, ...],
    text: str,
    code: int,
    model: Path,
    outputs: list[str],
    request: pytest.FixtureRequest,
) -> None:
    words = {"OUT": outputs[0], "TEXT": str(request.getfixturevalue("text"))}
    done = run_here("evaluate", str(model), *(words.get(word, word) for word in arguments))
    assert (done.exit_code, done.stdout) == (code, "")
    assert text in done.stderr
    assert "Traceback" not in done.stderr


def test_a_model_without_a_tokenizer(model: Path, text: Path, tmp_path: Path) -> None:
    bare = tmp_path / "bare"
    bare.mkdir()
    for name in ("config.json", "model.safetensors"):
        (bare / name).symlink_to(model / name)
    done = run_here("evaluate", str(bare), "--data", str(text), *OPTIONS)
    assert done.exit_code == 2
    assert "--tokenizer" in done.stderr
    done = run_here("evaluate", str(bare), "--data", str(text), "--tokenizer", str(model), *OPTIONS)
    assert done.exit_code == 0


@pytest.mark.slow
def test_a_person_sees_how_far_it_is_and_can_stop_it(
    model: Path, text: Path, outputs: list[str], tmp_path: Path
) -> None:
    arguments = (str(model), outputs[0], "--data", str(text), "--seq-len", "16")
    with Terminal("evaluate", *arguments, cwd=tmp_path) as terminal:
        terminal.read_until("tokens/s")
        terminal.process.send_signal(signal.SIGINT)
        shown = terminal.read_until(None)
    assert terminal.process.returncode == 130
    assert "evaluating the float model" in shown
    assert "Traceback" not in shown
