"""After ``calipers quantize``: what was lost, and what to type against it."""

from __future__ import annotations

import json
import re
from pathlib import Path

import massive
import pytest
import torch
from families import saved
from shell import run_here
from words import byte_tokenizer

from calipers.cli.quantize import activation_lines, advice_on
from calipers.judging.activations import ActivationCost
from calipers.judging.costs import ModuleCosts
from calipers.planning.plan import Plan


@pytest.fixture(scope="module")
def ruined(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ruined") / "model"
    saved(massive.massive_llama(torch.bfloat16), folder)
    byte_tokenizer(bos=True).save_pretrained(folder)
    return folder


def options(model: Path, text: Path, output: Path, *more: str) -> tuple[str, ...]:
    size = ("--samples", "8", "--seq-len", "48", "--no-packing")
    return ("quantize", str(model), "--data", str(text), *size, "-o", str(output), *more)


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    lines = [json.dumps({"text": f"{n} quick brown foxes jump over the dog"}) for n in range(8)]
    (tmp_path / "text.jsonl").write_text("\n".join(lines))
    return tmp_path / "text.jsonl"


def test_what_is_lost_is_listed_with_what_to_do(ruined: Path, texts: Path, tmp_path: Path) -> None:
    scheme = ("--scheme", "FP8", "--activation-observer", "percentile,percentile=99.9")
    done = run_here(*options(ruined, texts, tmp_path / "out", *scheme))
    assert done.exit_code == 0
    lines = [line.rstrip() for line in done.stdout.splitlines()]
    first = lines.index("Modules whose output loses most, and through what:")
    assert re.fullmatch(
        rf" +−[\d.]+ dB +[\d.]+%  {massive.MASSIVE} +static input up to \d+: clipped at [\d.]+",
        lines[first + 1],
    )
    second = lines.index("    error  typical  clipped  largest, range")
    assert lines[second - 1].startswith("1 static activation of 14 lost more than 20% (typical: ")
    row = re.fullmatch(
        rf" +([\d.]+)% +([\d.]+)% +([\d.]+)%  ([\d.]+), ([\d.]+) +{massive.MASSIVE} input",
        lines[second + 1],
    )
    assert row is not None
    error, typical, clipped, largest, limit = map(float, row.groups())
    assert error > 90 > 10 > typical
    assert clipped < 0.1
    assert largest > 2500 > 20 > limit
    assert lines[second + 2] == (
        f"{massive.MASSIVE} input: values reach {row[4]}, the range ends at {row[5]}, and 100% is "
        "lost."
    )
    assert lines[second + 3 : second + 8] == [
        "What to do, any of:",
        "  --scheme FP8_DYNAMIC: a scale for each token, found while the model runs",
        "  --activation-observer histogram_mse: the range with the least error",
        f"  --ignore lm_head --ignore {massive.MASSIVE}: it stays as it is",
        "",
    ]
    assert "1 static activation loses more than 20%" in done.stderr


STATIC = {
    "W8A8_STATIC": ("--scheme", "W8A8_STATIC"),
    "FP8": ("--scheme", "FP8", "--activation-observer", "percentile,percentile=99.9"),
}


@pytest.mark.parametrize("name", STATIC)
def test_what_it_says_helps(name: str, ruined: Path, texts: Path, tmp_path: Path) -> None:
    """All of it can be typed as it stands there, and there is nothing to say any more."""
    given = STATIC[name]
    told = json.loads(run_here(*options(ruined, texts, tmp_path / "out", *given, "--json")).stdout)
    worst = told["worst"][0]
    assert worst["module"] == massive.MASSIVE
    assert worst["cause"] == ("coarse input" if name == "W8A8_STATIC" else "clipped input")
    assert len(told["worst"]) == 5
    assert len(told["advice"]) == 3
    for number, line in enumerate(told["advice"]):
        typed = line.partition(": ")[0].split()
        kept = () if "--scheme" in typed else given
        again = run_here(*options(ruined, texts, tmp_path / str(number), *kept, *typed, "--json"))
        assert again.exit_code == 0
        found = json.loads(again.stdout)
        assert found["advice"] == []
        left = {loss["module"]: loss["error"] for loss in found["worst"]}
        assert left.get(massive.MASSIVE, 0.0) < 0.05
        assert "static activation loses" not in again.stderr


def test_a_few_huge_values_are_put_in_words(ruined: Path, texts: Path, tmp_path: Path) -> None:
    done = run_here(*options(ruined, texts, tmp_path / "out", *STATIC["W8A8_STATIC"]))
    said = (
        rf"^{massive.MASSIVE} input: a few values of up to (\d+) take the whole range, and the oth"
    )
    found = re.search(said, done.stdout, re.MULTILINE)
    assert found is not None
    assert float(found[1]) > 2500
    assert "histogram_mse" not in done.stdout  # no range of integers holds both


def test_a_recipe_is_told_what_to_write(ruined: Path, texts: Path, tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(
        "modifiers:\n  QuantizationModifier:\n    ignore: [lm_head]\n"
        "    weights: {num_bits: 8, strategy: channel}\n"
        "    input_activations: {num_bits: 8, strategy: tensor}\n"
    )
    done = run_here(*options(ruined, texts, tmp_path / "out", "--recipe", str(recipe)))
    lines = done.stdout.splitlines()
    first = lines.index("What to do, any of:") + 1
    assert lines[first : first + 3] == [
        "  dynamic: true in input_activations of the recipe: a scale for each token",
        f"  ignore: [{massive.MASSIVE}] in the recipe: it stays as it is",
        "",
    ]


def test_many_are_counted() -> None:
    cost = ActivationCost(0.0, 0.5, 0.3, 0.0, 4.0, 4.0, exact=True)
    costs = {f"m{n}": ModuleCosts(0.01, 0.5, 0.3, {"input": cost}) for n in range(7)}
    assert "  and 2 more" in activation_lines(costs, ["--do this"])
    assert advice_on({}, Plan(), None) == ()


def test_without_data_the_plain_error_is_called_so(ruined: Path, tmp_path: Path) -> None:
    done = run_here("quantize", str(ruined), "--scheme", "W8A16", "-o", str(tmp_path / "out"))
    assert "Weights that lose most (without data, what outputs lose is not known):" in done.stdout
    assert "static" not in done.stdout
