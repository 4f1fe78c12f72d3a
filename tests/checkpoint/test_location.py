"""What is no model in safetensors is refused from Python, too, with advice."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from families import build, saved

import calipers
from calipers.checkpoint.location import check_location
from calipers.errors import ModelLoadError


def refused(error: type[ModelLoadError], text: str, folder: Path) -> None:
    with pytest.raises(error, match=re.escape(text)) as caught:
        calipers.oneshot(folder, "W8A16")
    assert caught.value.exit_code == 2


def test_pickles_are_not_opened(tmp_path: Path) -> None:
    folder = saved(build(), tmp_path / "model")
    (folder / "model.safetensors").rename(folder / "pytorch_model-00001-of-00001.bin")
    text = (
        f"The weights of '{folder}' are pickles (pytorch_model-00001-of-00001.bin), which can run "
        "any code when they are opened; Calipers opens safetensors only. If you trust where they "
        "come from, convert the model once"
    )
    refused(ModelLoadError, text, folder)


@pytest.mark.parametrize("name", ["model.pt", "model.PTH", "last.ckpt", "model.pkl"])
def test_pickles_by_any_name(name: str, tmp_path: Path) -> None:
    (tmp_path / name).touch()
    for place in (tmp_path, tmp_path / name):
        with pytest.raises(ModelLoadError, match=rf"are pickles \({re.escape(name)}\)"):
            check_location(str(place))


def test_other_pickles_beside_safetensors_do_not_matter(tmp_path: Path) -> None:
    folder = saved(build(), tmp_path / "model")
    (folder / "training_args.bin").touch()
    assert calipers.oneshot(folder, "W8A16", progress=False).errors


def test_a_file_is_no_folder(tmp_path: Path) -> None:
    folder = saved(build(), tmp_path / "model")
    refused(ModelLoadError, "it is a file. Give the folder", folder / "model.safetensors")
