"""Only a quantized checkpoint, and nothing but it, is ever replaced."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from frozen import freeze, llama, scheme
from shell import run_here

from calipers.checkpoint.output import check_output, output_folder
from calipers.checkpoint.writer import write_checkpoint
from calipers.errors import CheckpointError, CheckpointExistsError

QUANTIZED = {"quantization_config": {"quant_method": "compressed-tensors"}}


def checkpoint(folder: Path, config: object = QUANTIZED) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "model.safetensors").write_bytes(b"precious")
    return folder


def everything(folder: Path) -> dict[str, object]:
    return {
        str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None
        for path in sorted(folder.rglob("*"))
    }


def refused(error: type[Exception], text: str, path: Path, **options: Any) -> None:
    before = everything(path.parent)
    with pytest.raises(error, match=text):
        check_output(path, overwrite=True, **options)
    assert everything(path.parent) == before


def file(name: str, text: str = "mine") -> Callable[[Path], object]:
    def make(folder: Path) -> None:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)

    return make


@pytest.mark.parametrize(
    ("add", "named"),
    [
        (file(".ssh/id_ed25519"), r"\.ssh"),
        (file(".git/HEAD"), r"\.git"),
        (file("README.md"), r"README\.md"),
        (file("model.safetensors.bak"), r"model\.safetensors\.bak"),
        (file("evaluate.py"), r"evaluate\.py"),
        (file("chat_templates/notes.txt"), r"chat_templates/notes\.txt"),
        (lambda folder: (folder / "vocab.json").symlink_to("/etc/hostname"), r"vocab\.json"),
        (lambda folder: (folder / "tokenizer.json").mkdir(), r"tokenizer\.json"),
        (lambda folder: (folder / "empty").mkdir(), r"empty"),
    ],
)
def test_what_is_not_of_a_checkpoint_is_named(
    tmp_path: Path, add: Callable[[Path], object], named: str
) -> None:
    out = checkpoint(tmp_path / "out")
    assert check_output(out, overwrite=True) == out
    add(out)
    text = (
        rf"The output folder '.*out' is not replaced: what is in it does not all belong to a "
        rf"checkpoint: {named}\. overwrite=True replaces quantized checkpoints and empty folders "
        r"only\. Choose another folder, or move these away\."
    )
    refused(CheckpointExistsError, text, out)


@pytest.mark.parametrize("config", [{"model_type": "llama"}, {"quantization_config": None}, [1]])
def test_an_original_model_is_not_replaced(tmp_path: Path, config: object) -> None:
    text = r"neither calipers\.json nor a quantization_config .* or remove it yourself"
    refused(CheckpointExistsError, text, checkpoint(tmp_path / "out", config))


def test_what_calipers_wrote_is_replaced_with_code_and_templates(tmp_path: Path) -> None:
    source = tmp_path / "source"
    (source / "additional_chat_templates").mkdir(parents=True)
    model = freeze(llama(), scheme("W4A16"))
    model.config.auto_map = {"AutoModelForCausalLM": "modeling_own.Own"}
    model.config._name_or_path = str(source)
    model.config.save_pretrained(source)
    for name in (
        "modeling_own.py",
        "helper.py",
        "old.tiktoken",
        "additional_chat_templates/a.jinja",
    ):
        (source / name).write_text("")
    out = write_checkpoint(model, tmp_path / "out", recipe="")
    assert (out / "helper.py").exists()
    assert (out / "additional_chat_templates" / "a.jinja").exists()
    write_checkpoint(model, out, recipe="", overwrite=True)
    (out / "mine.py").touch()
    with pytest.raises(CheckpointExistsError, match=r"checkpoint: mine\.py\."):
        write_checkpoint(model, out, recipe="", overwrite=True)


def test_notes_cannot_claim_hidden_files(tmp_path: Path) -> None:
    out = checkpoint(tmp_path / "out")
    (out / "calipers.json").write_text(json.dumps({"calipers": "0", "files": [".ssh/id", ".env"]}))
    (out / ".env").write_text("secret")
    refused(CheckpointExistsError, r"\.env", out)


# Links


def test_a_link_is_not_overwritten(tmp_path: Path) -> None:
    target = checkpoint(tmp_path / "run-7")
    (tmp_path / "latest").symlink_to(target)
    refused(CheckpointError, "latest': it is a link, and what it leads to, '.*run-7', would be",
            tmp_path / "latest")  # fmt: skip


def test_a_link_to_what_is_not_there_yet_is_written_through(tmp_path: Path) -> None:
    (tmp_path / "out").symlink_to(tmp_path / "disk" / "real")
    with output_folder(tmp_path / "out") as journal:
        folder = journal.folder
        (folder / "config.json").write_text("new")
    assert (tmp_path / "out").is_symlink()
    assert everything(tmp_path / "disk") == {"real": None, "real/config.json": b"new"}


def test_a_link_to_itself_is_refused(tmp_path: Path) -> None:
    (tmp_path / "out").symlink_to("out")
    with pytest.raises(CheckpointError, match="it is a link that leads to itself"):
        check_output(tmp_path / "out", overwrite=True)


# What is in use


@pytest.mark.parametrize("what", ["model", "data", "recipe", "tokenizer"])
@pytest.mark.parametrize("below", [".", "recipe.yaml"])
def test_what_the_checkpoint_is_made_from_is_not_replaced(
    tmp_path: Path, what: str, below: str
) -> None:
    out = checkpoint(tmp_path / "out")
    (out / "recipe.yaml").write_text("x")
    (tmp_path / "link").symlink_to(out / below)
    for source in (out / below, str(out / below), tmp_path / "link"):
        text = f"'.*out' would replace the {what} in use, '.*out.*'. Nothing was written."
        refused(CheckpointExistsError, text, out, inputs={what: source})
    if what == "model":
        refused(
            CheckpointExistsError, "is inside that of the model in", out, inputs={what: tmp_path}
        )
    else:
        assert check_output(out, overwrite=True, inputs={what: tmp_path}) == out
    assert check_output(out, overwrite=True, inputs={what: ["text"] * 2, "recipe": "a:\n b"}) == out


def test_the_current_folder_is_not_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = checkpoint(tmp_path / "out")
    (out / "chat_templates").mkdir()
    for inside in (out, out / "chat_templates"):
        monkeypatch.chdir(inside)
        refused(CheckpointError, "out': it is the current folder, or holds it, and would", out)
    monkeypatch.chdir(out)
    ended = run_here("quantize", "demo", "--scheme", "W8A16", "-o", ".", "--overwrite")
    assert ended.exit_code == 7
    assert "it is the current folder" in " ".join(ended.stderr.split())
    assert sorted(os.listdir(out)) == ["chat_templates", "config.json", "model.safetensors"]


def test_the_command_keeps_its_data(tmp_path: Path) -> None:
    out = checkpoint(tmp_path / "out")
    data = out / "vocab.txt"
    data.write_text("text to calibrate with\n")
    arguments = ("--scheme", "W4A16", "--data", str(data), "-o", str(out), "--overwrite")
    ended = run_here("quantize", "demo", *arguments)
    assert ended.exit_code == 7
    assert "would replace the data in use" in " ".join(ended.stderr.split())
    assert data.exists()
