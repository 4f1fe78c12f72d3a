"""Data sets by name: folders, the cache of the hub, and names that nobody knows."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import datasets
import huggingface_hub.constants
import pytest
from shell import run_here
from words import byte_tokenizer, ids_of

from calipers.calibration.data import calibration_batches
from calipers.calibration.named_datasets import DatasetName
from calipers.errors import CalipersWarning, DataError

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*(samples):calipers.errors.CalipersWarning"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
]
CARD = """---
configs:
- config_name: cats
  data_files: [{split: train, path: cats.jsonl}]
- config_name: dogs
  data_files: [{split: train, path: dogs.jsonl}, {split: held_out, path: more.jsonl}]
---
"""


def read(dataset: Any, **options: Any) -> list[list[int]]:
    found = calibration_batches(dataset, byte_tokenizer(), **{"shuffle": False, **options})
    return [batch["input_ids"][0].tolist() for batch in found]


def write(path: Path, *texts: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(json.dumps({"text": text}) for text in texts))
    return path


@pytest.fixture
def pets(tmp_path: Path) -> Path:
    """A folder of data files with two configurations."""
    for name in ("cats", "dogs", "more"):
        write(tmp_path / "pets" / f"{name}.jsonl", *(f"{name} {number}" for number in range(3)))
    (tmp_path / "pets" / "README.md").write_text(CARD)
    return tmp_path / "pets"


@pytest.fixture
def no_network(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Nobody listens where the hub should be, and waiting for it is a failure."""
    for place in (huggingface_hub.constants, datasets.config):
        monkeypatch.setattr(place, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr(datasets.config, "HF_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr(time, "sleep", lambda seconds: pytest.fail(f"slept {seconds} s"))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("allenai/c4", DatasetName("allenai/c4")),
        ("allenai/c4@en", DatasetName("allenai/c4", "en")),
        ("allenai/c4@en:validation", DatasetName("allenai/c4", "en", "validation")),
        ("imdb:test", DatasetName("imdb", None, "test")),
        ("org/data-v1.5:train_sft", DatasetName("org/data-v1.5", None, "train_sft")),
        ("data/my.jsonl", None),
        ("my.TXT", None),
        ("./my", None),
        ("/home/my", None),
        ("a/b/c", None),
        ("a b", None),
        ("a\nb", None),
        ("imdb:train[:10%]", None),
        ("a" * 97, None),
        ("", None),
    ],
)
def test_names(text: str, expected: DatasetName | None) -> None:
    assert DatasetName.parse(text) == expected
    assert expected is None or str(expected) == text


@pytest.mark.parametrize(
    ("suffix", "name"), [("@cats", "cats"), ("@dogs:train", "dogs"), ("@dogs:held_out", "more")]
)
def test_a_folder_of_data_files(pets: Path, suffix: str, name: str) -> None:
    assert read(f"{pets}{suffix}") == [ids_of(f"{name} {number}") for number in range(3)]
    mixed = read(f"{pets}{suffix}", shuffle=True, seed=3)
    assert sorted(mixed) == read(f"{pets}{suffix}")


def test_the_split_is_train_unless_another_is_named(tmp_path: Path) -> None:
    write(tmp_path / "set" / "train.jsonl", "ab")
    write(tmp_path / "set" / "test.jsonl", "cd")
    assert read(tmp_path / "set") == read(str(tmp_path / "set")) == [ids_of("ab")]
    assert read(f"{tmp_path / 'set'}:test") == [ids_of("cd")]


def test_the_splits_of_save_to_disk(tmp_path: Path) -> None:
    rows = {name: datasets.Dataset.from_list([{"text": name}]) for name in ("train", "test")}
    datasets.DatasetDict(rows).save_to_disk(tmp_path / "saved")
    assert read(f"{tmp_path / 'saved'}:test") == [ids_of("test")]
    with pytest.raises(DataError, match=r"cannot be read: its splits are train, test\. All"):
        read(f"{tmp_path / 'saved'}:tset")
    rows["train"].save_to_disk(tmp_path / "one")
    assert read(tmp_path / "one") == [ids_of("train")]
    with pytest.raises(DataError, match=r"cannot be read: '.*one' has no splits\. Allowed"):
        read(f"{tmp_path / 'one'}:test")


@pytest.mark.usefixtures("no_network")
def test_what_is_on_disk_wins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "org").mkdir()
    (tmp_path / "org" / "name:test").write_text("abc")
    assert read("org/name:test") == [ids_of("abc")]
    write(tmp_path / "org" / "name" / "train.jsonl", "cd")
    assert read("org/name") == read("org/name:train") == [ids_of("cd")]


@pytest.mark.usefixtures("no_network")
def test_without_a_network_the_cache_is_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "pets" / "train.jsonl", "ab", "cd")
    datasets.load_dataset("pets", cache_dir=str(tmp_path / "cache"))
    (tmp_path / "pets").rename(tmp_path / "gone")
    with pytest.warns(CalipersWarning, match=r"^The hub cannot be reached: 'pets' is read as the"):
        assert read("pets") == [ids_of("ab"), ids_of("cd")]
    assert datasets.config.HF_HUB_OFFLINE is False
    with pytest.raises(DataError, match=r"The data set 'pets:valid' cannot be read: .*valid"):
        read("pets:valid")


@pytest.mark.usefixtures("no_network")
def test_a_name_that_nobody_knows_is_refused_at_once() -> None:
    with pytest.raises(DataError) as caught:
        read("nobody/nothing:train")
    assert str(caught.value) == (
        "'nobody/nothing:train' is no file or folder here and not in the cache of datasets, and "
        "the hub, which may have a data set of that name, cannot be reached. Correct the path, or "
        "try again with a network. A text itself is given in a list: [text]."
    )
    for command in (("quantize", "demo", "--scheme", "FP8", "-o", "out"), ("evaluate", "demo")):
        done = run_here(*command, "--data", "nobody/nothing")
        assert done.exit_code == 2
        assert "'nobody/nothing' is no file or folder here" in done.stderr


def test_files_that_break_on_the_way(tmp_path: Path) -> None:
    path = write(tmp_path / "set" / "train.jsonl", *(["ab"] * 3))
    path.write_text(path.read_text() + "\n{broken")
    with pytest.raises(DataError, match=r"^The data set '.*set' cannot be read: "):
        read(tmp_path / "set")


@pytest.mark.parametrize(
    ("suffix", "problem"),
    [("", "Config name is missing"), ("@mice", "mice"), ("@cats:test", "split")],
)
def test_what_a_data_set_does_not_have(pets: Path, suffix: str, problem: str) -> None:
    with pytest.raises(DataError, match=rf"^The data set '.*pets{suffix}' .*{problem}"):
        read(f"{pets}{suffix}")
