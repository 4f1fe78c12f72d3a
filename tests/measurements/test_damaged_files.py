"""A file that is not what was written is refused as a whole, in words; it is never read wrong."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from families import build, token_ids
from fuzzing.mutations import changed_tree, joined_tensors, json_text, some_tensors
from measuring import assert_same
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

import calipers
from calipers import Measurements
from calipers.errors import MeasurementsError
from calipers.measurements.file_format import checksum

CASES = 150
TENSOR = "model.layers.0.self_attn.q_proj.input"
COUNTS = f"{TENSOR}/counts.counts_bfloat16"
FIRST = f"{TENSOR}/first/counts.counts_bfloat16"


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = build("llama", num_hidden_layers=1)
    with pytest.warns(calipers.CalipersWarning):
        found = calipers.measure(model, token_ids(3, 8), collect="hessian", progress=False)
    return found.save(tmp_path_factory.mktemp("sound") / "m.safetensors")


def refusal(file: Path) -> str:
    with pytest.raises(MeasurementsError) as error:
        Measurements.load(file)
    assert error.value.exit_code == 2
    assert str(file) in str(error.value)
    assert "\n" not in str(error.value)
    return str(error.value)


def taken_apart(file: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    with safe_open(file, "pt") as opened:
        header = json.loads(opened.metadata()["calipers"])
        return header, {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118


def signed(file: Path, header: Any, tensors: dict[str, Tensor]) -> Path:
    """Write a file whose checksum is right, whatever it says."""
    text = header if isinstance(header, str) else json.dumps(header)
    save_file(tensors, file, {"calipers": text, "sha256": checksum(text, sorted(tensors.items()))})
    return file


def read_or_refused(file: Path, sound: Measurements) -> bool:
    """Whether a file is read, as it was written; otherwise it is refused."""
    try:
        assert_same(Measurements.load(file), sound)
    except MeasurementsError:
        return False
    return True


def test_any_damage_is_noticed(sound: Path, tmp_path: Path) -> None:
    content, expected, file = sound.read_bytes(), Measurements.load(sound), tmp_path / "m"
    read = 0
    for number in range(CASES):
        random = Random(number)
        file.write_bytes(some_tensors(content, random))
        read += read_or_refused(file, expected)
    assert read <= CASES / 10, "only those that no byte of was changed, or just blanks"


def test_any_flipped_bit_is_noticed(sound: Path, tmp_path: Path) -> None:
    content, expected, file = sound.read_bytes(), Measurements.load(sound), tmp_path / "m"
    length = int.from_bytes(content[:8], "little")
    for number in range(CASES):
        random, damaged = Random(number), bytearray(content)
        end = 8 + length if number % 2 else len(content)  # the header is small
        damaged[random.randrange(end)] ^= 1 << random.randrange(8)
        file.write_bytes(damaged)
        assert not read_or_refused(file, expected)


def test_any_header_with_the_right_checksum_is_read_or_refused(sound: Path, tmp_path: Path) -> None:
    header, tensors = taken_apart(sound)
    refused = 0
    for number in range(CASES):
        random = Random(number)
        text = json_text(changed_tree(json.loads(json.dumps(header)), random), random)
        file = tmp_path / str(number)
        signed(file, text.decode("utf-8", "replace"), tensors)
        try:
            Measurements.load(file).summary()
        except MeasurementsError:
            refused += 1
    assert refused > CASES / 2


def without(name: str) -> Callable[[dict[str, Any], dict[str, Tensor]], None]:
    return lambda _, tensors: tensors.__delitem__(name)


def replaced(name: str, change: Callable[[Tensor], Tensor]) -> Any:
    return lambda _, tensors: tensors.update({name: change(tensors[name]).contiguous()})


def says(*keys: str, value: Any) -> Any:
    def change(header: dict[str, Any], _: Any) -> None:
        for key in keys[:-1]:
            header = header[key]
        header[keys[-1]] = value

    return change


def negative(packed: Tensor) -> Tensor:
    return packed * torch.tensor([[1], [-1]], dtype=packed.dtype)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (without(COUNTS), f"it has no '{COUNTS}'"),
        (replaced(COUNTS, negative), "its counts must be positive"),
        (
            replaced(COUNTS, lambda packed: packed + 65_000),
            "its bins must ascend within [0, 65536)",
        ),
        (replaced(COUNTS, lambda packed: packed.flip(1)), "its bins must ascend"),
        (replaced(COUNTS, lambda packed: packed.float()), "bins and counts must be int64"),
        (replaced(COUNTS, lambda packed: packed[0]), "it must be of shape (2, n)"),
        (replaced(f"{TENSOR}/squares._imatrix_sum", lambda x: -x), "not below zero"),
        (replaced(f"{TENSOR}/squares._imatrix_sum", lambda x: x / 0), "must be finite float64"),
        (replaced(f"{TENSOR}/squares._imatrix_sum", lambda x: x.float()), "must be finite float64"),
        (replaced(f"{TENSOR}/squares._imatrix_count", lambda x: -x), "must be one int64"),
        (replaced(f"{TENSOR}/extrema.min_vals", lambda x: x + 99), "none above its maximum"),
        (replaced(f"{TENSOR}/channel_extrema.max_vals", lambda x: x[1:]), "its shape is (127,)"),
        (replaced(f"{TENSOR}/hessian._hessian_sum", lambda x: x[:, 1:]), "its shape is (1, 127,"),
        (replaced(f"{TENSOR}/second/extrema.max_vals", lambda x: x + 9), "not that of a part of"),
        (
            replaced(f"{TENSOR}/first/squares._imatrix_count", lambda x: x + 99),
            "not that of a part",
        ),
        (replaced(f"{TENSOR}/first/hessian._hessian_sum", lambda x: x + 99), "not that of a part"),
        (replaced(FIRST, lambda counts: counts + 99), "is not that of a part of the whole"),
        (replaced(FIRST, lambda counts: counts[1:]), "it must be one count for each of"),
        (replaced(FIRST, lambda counts: -counts - 1), "its counts must not be below zero"),
        (lambda _, t: t.update(more=torch.ones(1)), "its header does not speak of 'more'"),
        (says("tokens", value=-1), "its header, tokens: Input should be greater than or equal"),
        (says("tokens", value="3"), "its header, tokens: Input should be a valid integer"),
        (says("samples", value=["x"]), "its header, samples → 0: String should match pattern"),
        (says("model", value=None), "its header, model: Input should be a valid dictionary"),
        (says("more", value=1), "its header, more: Extra inputs are not permitted"),
        (says("format", value="other"), "its format is 'other', not 'calipers.measurements'"),
        (says("tensors", TENSOR, "readers", value=["x"]), "is not among its own readers"),
        (says("tensors", TENSOR, "readers", value=[TENSOR, TENSOR]), f"it has '{TENSOR}' twice"),
        (
            says("tensors", TENSOR, "statistics", "counts", "configuration", value={"class": "os"}),
            f"{TENSOR}/counts: ValueError: there is no statistic 'os'",
        ),
        (
            says("tensors", TENSOR, "statistics", "channel_extrema", "fields", value={}),
            f"its header does not speak of '{TENSOR}/channel_extrema.max_vals'",
        ),
        (
            says("tensors", TENSOR, "statistics", "counts", "fields", value={}),
            f"{FIRST}: its table is of shape [1, 65536], that of all is not",
        ),
    ],
)
def test_unsupported_modules_is_named(change: Any, text: str, sound: Path, tmp_path: Path) -> None:
    header, tensors = taken_apart(sound)
    change(header, tensors)
    said = refusal(signed(tmp_path / "m.safetensors", header, tensors))
    assert text in said
    assert said.endswith("Copy it again from where it was made, or measure again.")


def test_another_version_is_not_damaged(sound: Path, tmp_path: Path) -> None:
    header, tensors = taken_apart(sound)
    said = refusal(signed(tmp_path / "m", {**header, "version": 3}, tensors))
    assert "is of version 3 of the format, and this Calipers reads versions 1 and 2. Read" in said


def test_tensors_in_other_places_or_of_other_dtypes_are_noticed(
    sound: Path, tmp_path: Path
) -> None:
    _, tensors = taken_apart(sound)
    with safe_open(sound, "pt") as opened:
        metadata = opened.metadata()
    one, other = (f"{name}/squares._imatrix_sum" for name in (TENSOR, "lm_head.input"))
    swapped = {**tensors, one: tensors[other], other: tensors[one]}
    empty = {**tensors, f"{TENSOR}/extrema.observed_like": torch.empty(0, dtype=torch.float16)}
    for changed in (swapped, empty):
        save_file(changed, tmp_path / "m", metadata)
        assert "its checksum is not that of its content" in refusal(tmp_path / "m")


def test_files_of_other_kinds(sound: Path, tmp_path: Path) -> None:
    content = sound.read_bytes()
    file = tmp_path / "m"
    save_file({"weight": torch.ones(2)}, file)
    assert "its header has no 'calipers'" in refusal(file)
    for text, damaged in {
        "which end before its header does": b"",
        "end before its header": content[:100],
        "its header speaks of": content[:-9],
        "no valid JSON": joined_tensors(b"{not json", b""),
        "bytes, which end before its header does": (10**9).to_bytes(8, "little") + content[8:],
        "its checksum is not that of its content": content[:-1] + bytes([content[-1] ^ 1]),
    }.items():
        file.write_bytes(damaged)
        assert text in refusal(file)
    assert "cannot be read (No such file or directory)" in refusal(tmp_path / "gone")
    assert "cannot be read (it is a folder" in refusal(tmp_path)
