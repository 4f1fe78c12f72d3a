"""Files of tensors hold what was given; tensors are made in the background, not too far ahead."""

from __future__ import annotations

import json
import struct
import threading
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from calipers.checkpoint.writer import ShardWriter, header_room, in_background

TENSORS = {
    "byte": torch.tensor([3], dtype=torch.uint8),
    "matrix": torch.randn(4, 6),
    "odd": torch.randn(3, 5).to(torch.bfloat16),
    "scalar": torch.tensor(2.5),
    "nothing": torch.empty(0, 4),
    "fp8": torch.randn(3, 3).to(torch.float8_e4m3fn),
    "packed": torch.arange(15, dtype=torch.int32).view(3, 5),
    "shape": torch.tensor([3, 5]),
    "flags": torch.tensor([True, False, True]),
    "turned": torch.randn(4, 6).T,
    "Gewicht.ß": torch.randn(2, dtype=torch.float64),
}


def read_back(folder: Path) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        found |= load_file(file)
    return found


def check_equal(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert found[name].dtype == tensor.dtype
        assert found[name].shape == tensor.shape
        assert torch.equal(found[name].float(), tensor.float()), name


@pytest.mark.parametrize("size", [1, 40, 100, 10**9])
def test_safetensors_reads_what_was_written(size: int, tmp_path: Path) -> None:
    ShardWriter(tmp_path, size).write(TENSORS.items())
    check_equal(read_back(tmp_path), TENSORS)
    files = list(tmp_path.glob("*.safetensors"))
    if size == 10**9:
        assert [file.name for file in files] == ["model.safetensors"]
        return
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in TENSORS.values())
    assert set(index["weight_map"].values()) == {file.name for file in files}
    for name, file in index["weight_map"].items():
        with safe_open(tmp_path / file, framework="pt") as opened:
            assert name in opened.keys()  # noqa: SIM118
            assert opened.metadata() == {"format": "pt"}


def test_files_are_as_large_as_asked_for_and_no_larger(tmp_path: Path) -> None:
    sizes = {"a": 40, "b": 60, "c": 1, "d": 250, "e": 50, "f": 50}
    tensors = {name: torch.zeros(size, dtype=torch.uint8) for name, size in sizes.items()}
    ShardWriter(tmp_path, 100).write(tensors.items())
    files = [sorted(load_file(file)) for file in sorted(tmp_path.glob("*.safetensors"))]
    assert files == [["a", "b"], ["c"], ["d"], ["e", "f"]]


def test_every_tensor_is_where_its_numbers_want_it(tmp_path: Path) -> None:
    ShardWriter(tmp_path, 10**9).write(TENSORS.items())
    content = (tmp_path / "model.safetensors").read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    assert length % 8 == 0
    header = json.loads(content[8 : 8 + length])
    places = [header[name]["data_offsets"] for name in TENSORS]
    for name, (begin, _) in zip(TENSORS, places, strict=True):
        assert begin % TENSORS[name].element_size() == 0, name
    assert sorted(places)[0][0] == 0
    assert max(places)[1] == len(content) - 8 - length


def test_a_full_header_ends_a_file(tmp_path: Path) -> None:
    tensors = {f"{'x' * 300}.{i}": torch.full((2,), float(i)) for i in range(20)}
    ShardWriter(tmp_path, 10**9, room=2048).write(tensors.items())
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    check_equal(read_back(tmp_path), tensors)


def test_a_name_longer_than_the_room_has_room(tmp_path: Path) -> None:
    tensors = {"x" * 5000: torch.ones(2), "y" * 5000: torch.zeros(2)}
    ShardWriter(tmp_path, 10**9, room=64).write(tensors.items())
    check_equal(read_back(tmp_path), tensors)


def test_the_room_is_enough_for_a_whole_model(tmp_path: Path) -> None:
    tensors = {f"model.layers.{i}.weight": torch.zeros(1, 1, 1, 1, 2) for i in range(100)}
    ShardWriter(tmp_path, 10**9, header_room(tensors)).write(tensors.items())
    assert [file.name for file in tmp_path.glob("*")] == ["model.safetensors"]
    assert header_room(tensors) < 1 << 17
    assert header_room(["x" * 1000] * 10000) == 1 << 20


def test_no_tensor_is_kept(tmp_path: Path) -> None:
    alive: list[int] = []

    def tensors() -> Iterator[tuple[str, torch.Tensor]]:
        for i in range(10):
            tensor = torch.zeros(100)
            storage = tensor.untyped_storage()
            alive.append(storage._weak_ref())  # type: ignore[no-untyped-call]
            del storage
            yield str(i), tensor
            del tensor
            still = [ref for ref in alive if not torch.UntypedStorage._expired(ref)]  # type: ignore[attr-defined]
            assert len(still) <= 1

    ShardWriter(tmp_path, 10**9).write(tensors())
    assert len(alive) == 10


def test_it_is_at_most_so_many_ahead() -> None:
    begun: list[int] = []

    def work() -> Generator[int, None, None]:
        for number in range(100):
            begun.append(number)
            yield number

    for number in in_background(work(), ahead=2):
        # Two are ready, one waits for room, and one is just being taken.
        assert begun[-1] <= number + 4
    assert begun == list(range(100))


def test_what_is_raised_comes_behind_what_was_made() -> None:
    def work() -> Generator[int, None, None]:
        yield 1
        raise KeyError("gone")

    found = in_background(work())
    assert next(found) == 1
    with pytest.raises(KeyError, match="gone"):
        next(found)


def test_whoever_stops_asking_ends_it() -> None:
    before = threading.active_count()
    found = in_background(number for number in range(10**9))
    assert next(found) == 0
    found.close()
    assert threading.active_count() == before
