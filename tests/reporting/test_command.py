"""``calipers report``: what it writes, and what it refuses."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from quantizing import model_folder
from report_content import IDS, Made
from shell import run

import calipers

EVALUATION: dict[str, Any] = {
    "model": "somewhere/model",
    "samples": 2,
    "tokens": 60,
    "base": {"perplexity": {"value": 6.5, "low": 6.25, "high": None}},
    "checkpoints": {
        "plain": {
            "perplexity": {"value": 7.125, "low": 7.0, "high": 7.25},
            "change": {"value": 0.625, "low": 0.5, "high": 0.75, "beyond_noise": False},
            "layers": [{"layer": "model.layers.0", "own": 0.25, "output": 0.5}],
        }
    },
}


def written(tmp_path: Path, content: Any) -> str:
    (tmp_path / "given.json").write_text(json.dumps(content))
    return str(tmp_path / "given.json")


def test_a_page_is_written(made: Made, tmp_path: Path) -> None:
    evaluation = written(tmp_path, EVALUATION)
    predicted = {"module": "model.layers.0.mlp.up_proj", "scheme": "W3A16", "error": 0.25}
    (tmp_path / "advice.json").write_text(json.dumps({"predictions": [predicted]}))
    done = run(
        *("report", str(made.plain), str(made.static), "-m", str(made.measurements)),
        *("--source", str(made.model), "--evaluation", evaluation),
        *("--advice", "advice.json", "-o", "out/r.html", "--json"),
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    file = tmp_path / "out" / "r.html"
    assert told["file_size"] == file.stat().st_size
    assert list(told["checkpoints"]) == ["plain", "static"]
    text = file.read_text()
    for words in ("7.125", "7.000 to 7.250", "may be noise", "+0.625", '"W3A16":{"model.lay'):
        assert words in text
    assert [path.name for path in file.parent.iterdir()] == ["r.html"]


def test_what_is_told_to_people(made: Made, tmp_path: Path) -> None:
    done = run("report", str(made.plain), "-o", "r.html", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "Written to r.html: " in done.stdout
    assert "hurts most" in done.stdout
    told = "Not shown: distributions of inputs, since there are no measurements."
    assert told in done.stdout.splitlines()


def refused(tmp_path: Path, *arguments: object, code: int = 2) -> str:
    given = [str(each) for each in arguments]
    done = run("report", *given, *([] if "-o" in given else ["-o", "r.html"]), cwd=tmp_path)
    assert done.returncode == code, done.stdout + done.stderr
    return done.stderr


def test_what_is_no_checkpoint_is_refused(made: Made, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    assert "there is no such folder" in refused(tmp_path, "nowhere")
    assert "there is no config.json in it" in refused(tmp_path, "empty")
    assert "is not quantized" in refused(tmp_path, made.model)
    broken = shutil.copytree(made.plain, tmp_path / "broken")
    config = json.loads((broken / "config.json").read_text())
    config["quantization_config"]["config_groups"]["group_0"]["targets"] = ["re:("]
    (broken / "config.json").write_text(json.dumps(config))
    assert "targets or ignore" in refused(tmp_path, broken)


def test_outputs_that_are_refused(made: Made, tmp_path: Path) -> None:
    (tmp_path / "r.html").mkdir()
    assert "it is a folder" in refused(tmp_path, made.plain, code=7)
    (tmp_path / "r.html").rmdir()
    (tmp_path / "r.html").write_text("mine")
    assert "--overwrite" in refused(tmp_path, made.plain, code=7)
    assert (tmp_path / "r.html").read_text() == "mine"
    config = made.plain / "config.json"
    told = refused(tmp_path, made.plain, "-o", config, "--overwrite", code=7)
    assert "would replace the checkpoint" in told
    done = run("report", str(made.plain), "-o", "r.html", "--overwrite", cwd=tmp_path)
    assert done.returncode == 0
    assert (tmp_path / "r.html").read_text().startswith("<!doctype html>")


def test_measurements_of_another_model_are_refused(made: Made, tmp_path: Path) -> None:
    other = model_folder(tmp_path / "other", intermediate_size=192)
    file = tmp_path / "other.safetensors"
    calipers.measure(other, IDS, output_file=file, num_samples=len(IDS), progress=False)
    told = refused(tmp_path, made.plain, "-m", file)
    assert "are of another model than the checkpoint 'plain': inputs are of other widths" in told
    told = refused(tmp_path, made.plain, "-m", file, "--source", made.model)
    assert "LlamaForCausalLM with the fingerprint" in told
    assert "is not quantized" not in told
    assert "is a file" in refused(tmp_path, made.plain, "--source", file)


@pytest.mark.parametrize(
    ("option", "content", "problem"),
    [
        ("--evaluation", {"base": 1}, "it has no 'base' and 'checkpoints'"),
        ("--evaluation", {"base": {}, "checkpoints": {}}, "'float model' has no perplexity"),
        ("--advice", {"predictions": []}, "it has no list of 'predictions'"),
        ("--advice", {"predictions": [{"module": "a"}]}, "prediction 0 lacks"),
        ("--advice", [], "not a JSON object"),
    ],
)
def test_files_of_others_that_are_refused(
    made: Made, tmp_path: Path, option: str, content: Any, problem: str
) -> None:
    file = written(tmp_path, content)
    assert problem in refused(tmp_path, made.plain, option, file)
    assert "does not exist" in refused(tmp_path, made.plain, option, "nothing.json")


def test_without_jinja(made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "jinja2", None)
    found = calipers.report(made.plain)
    with pytest.raises(calipers.CalipersError, match=r"pip install 'calipers\[report\]'"):
        found.html()
