"""What is no model in safetensors, and names that are not on disk: mistyped paths, the hub."""

from __future__ import annotations

import http.server
import re
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from families import build, saved
from huggingface_hub import constants

import calipers
from calipers.checkpoint.location import check_location, refuse_mistyped
from calipers.checkpoint.reader import load_model, load_skeleton, load_tokenizer
from calipers.errors import ModelLoadError

NOBODY = "http://127.0.0.1:9"
"""Where nobody listens."""


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


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder to stand in, with a model, and a hub that nobody answers at."""
    saved(build("llama"), tmp_path / "stories15M")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", NOBODY)
    return tmp_path


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """What a hub is asked for that answers, and has nothing."""
    paths: list[str] = []

    class Nothing(http.server.BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            paths.append(self.path)
            self.send_response(404)
            self.send_header("X-Error-Code", "RepoNotFound")
            self.end_headers()

        def do_GET(self) -> None:
            self.do_HEAD()

        def log_message(self, *_: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Nothing) as server:
        address = f"http://127.0.0.1:{server.server_port}"
        monkeypatch.setattr(constants, "ENDPOINT", address)
        template = f"{address}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield paths
        server.shutdown()


@pytest.mark.parametrize("name", ["./gone", "../gone", "~/gone", "one/two/three", "gone/"])
def test_what_looks_like_a_path_is_never_asked_of_the_hub(
    name: str, place: Path, asked: list[str]
) -> None:
    with pytest.raises(ModelLoadError) as caught:
        load_model(name)
    assert str(caught.value) == (
        f"Cannot load a model from '{name}': there is no such folder. Give the folder or the name "
        "of a Hugging Face model."
    )
    assert (asked, place.name != name) == ([], True)


@pytest.mark.parametrize("name", ["stories15m", "./storys15M", "Stories-15M"])
def test_a_near_name_on_disk_is_proposed(name: str, place: Path, asked: list[str]) -> None:
    with pytest.raises(ModelLoadError) as caught:
        load_skeleton(name)
    assert str(caught.value).endswith(
        "Did you mean 'stories15M'? One on the hub is named in full: 'owner/name'."
    )
    assert (asked, (place / "stories15M").is_dir()) == ([], True)


@pytest.mark.usefixtures("place")
def test_without_an_answer_of_the_hub_it_is_said_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("time.sleep", lambda _: pytest.fail("somebody waits to try again"))
    text = (
        "^Cannot load a model from 'owner/name': there is no such folder, and on the hub: "
        "http://127.0.0.1:9 does not answer, and it is not in the cache. Give"
    )
    with pytest.raises(ModelLoadError, match=text):
        load_model("owner/name")
    model = build("llama")
    with pytest.raises(ModelLoadError, match="Cannot load a tokenizer from 'owner/name': "):
        load_tokenizer("owner/name", model)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ModelLoadError, match="hub: HF_HUB_OFFLINE is set, and it is not in the"):
        load_model("owner/name")


def cached(place: Path) -> Path:
    """Put the model that is on disk into the cache as well, and return the folder of its name."""
    folder = place / "cache" / "models--owner--name"
    (folder / "refs").mkdir(parents=True)
    (folder / "refs" / "main").write_text("0123abc")
    shutil.copytree(place / "stories15M", folder / "snapshots" / "0123abc")
    return folder


def test_what_is_cached_is_loaded_and_a_silent_hub_not_asked(
    place: Path, asked: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "ENDPOINT", NOBODY)  # files are asked for at another address
    cached(place)
    assert load_model("owner/name").config.hidden_size == 128
    assert (asked, constants.HF_HUB_OFFLINE) == ([], False)


def test_pickles_of_the_hub_are_not_opened(place: Path) -> None:
    folder = cached(place)
    (folder / ".no_exist" / "0123abc").mkdir(parents=True)
    for name in ("model.safetensors", "model.safetensors.index.json"):
        (folder / "snapshots" / "0123abc" / name).unlink(missing_ok=True)
        (folder / ".no_exist" / "0123abc" / name).touch()  # as the hub has told before
    with pytest.raises(ModelLoadError, match=r"^The weights of 'owner/name' are pickles \(it has"):
        load_model("owner/name")


@pytest.mark.usefixtures("place")
def test_a_hub_that_answers_is_asked(asked: list[str]) -> None:
    with pytest.raises(ModelLoadError, match="there is no such folder, and on the hub: "):
        load_model("owner/name")
    assert any("owner/name" in path for path in asked)


@pytest.mark.parametrize("name", ["./model", "~/model", "/nowhere/model", "model/", "a/b/c"])
def test_names_that_look_like_paths_are_not_for_the_hub(name: str) -> None:
    with pytest.raises(ModelLoadError, match="there is no such folder"):
        refuse_mistyped(name)
    refuse_mistyped("owner/name")
