"""``calipers advise``: from measurements to a recipe."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from shell import refused, run

FEW = ("--samples", "4", "--seq-len", "16")


@pytest.fixture(scope="module")
def seen(model: Path, text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("advise") / "seen.safetensors"
    done = run(
        *(
            "measure",
            str(model),
            "--data",
            str(text),
            *FEW,
            "--collect",
            "sensitivity",
            "-o",
            str(file),
        ),
        cwd=file.parent,
    )
    assert done.returncode == 0, done.stderr
    return file


SCHEMES = ("--schemes", "W4A16-g32,W8A16-g32")


def test_the_recipe_quantizes(model: Path, seen: Path, tmp_path: Path) -> None:
    told = run(
        *(
            "advise",
            str(model),
            "--measurements",
            str(seen),
            *SCHEMES,
            "--budget",
            "6bpw",
            "-o",
            "r.yaml",
        ),
        cwd=tmp_path,
    )
    assert told.returncode == 0, told.stderr
    assert "Chosen for 6 bpw: " in told.stdout
    assert "(of W4A16-g32, W8A16-g32 by rtn: no choice is better)" in told.stdout.replace("\n", " ")
    assert "--collect hessian' lets GPTQ be compared" in told.stdout
    assert f"calipers quantize {model} --recipe r.yaml" in told.stdout
    done = run(
        *("quantize", str(model), "--recipe", "r.yaml", "--measurements", str(seen), "-o", "out"),
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    groups = config["quantization_config"]["config_groups"]
    assert {group["weights"]["num_bits"] for group in groups.values()} == {4, 8}


def test_without_a_budget_the_front_is_shown(model: Path, seen: Path, tmp_path: Path) -> None:
    told = run("advise", str(model), "--measurements", str(seen), *SCHEMES, cwd=tmp_path)
    assert "What can be reached by mixing them:" in told.stdout
    found = run("advise", str(model), "--measurements", str(seen), *SCHEMES, "--json", cwd=tmp_path)
    data = json.loads(found.stdout)
    sizes = [point["size"] for point in data["front"]]
    assert sizes == sorted(sizes)
    assert data["recipe"] is None


def test_refused(model: Path, seen: Path, tmp_path: Path) -> None:
    (tmp_path / "there.yaml").write_text("mine")
    command = ("advise", model, "--measurements", seen, *SCHEMES, "--budget")
    refused([*command, "lots"], "is no budget", cwd=tmp_path)
    refused([*command, "1bpw"], "cannot be met", cwd=tmp_path)
    refused([*command, "6bpw", "--target", "vllm-gpu"], "vllm-cpu", cwd=tmp_path)
    refused([*command, "6bpw", "-o", "there.yaml"], "exists already", code=7, cwd=tmp_path)
    assert (tmp_path / "there.yaml").read_text() == "mine"
