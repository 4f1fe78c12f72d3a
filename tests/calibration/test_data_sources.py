"""Every kind of dataset gives the samples that are in it."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, TensorDataset
from transformers import BatchEncoding
from words import byte_tokenizer, ids_of

from calipers.calibration.data import Batches, calibration_batches, sources
from calipers.errors import CalipersWarning

pytestmark = pytest.mark.filterwarnings("ignore::calipers.errors.CalipersWarning")

TEXTS = ["first", "second one", "3rd"]
RECORDS = [{"id": number, "text": text} for number, text in enumerate(TEXTS)]


def rows(batches: Batches) -> list[list[int]]:
    return [
        ids[mask.bool()].tolist()
        for batch in batches
        for ids, mask in zip(batch["input_ids"], batch["attention_mask"], strict=True)
    ]


def read(dataset: Any, **options: Any) -> list[list[int]]:
    options = {"shuffle": False, **options}
    return rows(calibration_batches(dataset, byte_tokenizer(chat=True), **options))


def write(path: Path, content: str) -> Path:
    path.write_bytes(content.encode())
    return path


def json_lines(folder: Path) -> Path:
    lines = [json.dumps(record) for record in RECORDS]
    return write(folder / "a.jsonl", "\ufeff" + "\n\n".join(lines))


def json_list(folder: Path) -> Path:
    return write(folder / "a.json", json.dumps(RECORDS, indent=1))


def json_of_lines(folder: Path) -> Path:
    return write(folder / "b.json", "\n".join(map(json.dumps, TEXTS)))


def parquet(folder: Path) -> Path:
    table = pyarrow.Table.from_pylist(RECORDS)
    pyarrow.parquet.write_table(table, folder / "a.parquet", row_group_size=2)
    return folder / "a.parquet"


def saved(folder: Path) -> Path:
    datasets.Dataset.from_list(RECORDS).save_to_disk(folder / "saved")
    return folder / "saved"


class Indexed(Dataset[str]):
    """A map-style dataset of torch, which is not a Sequence."""

    def __len__(self) -> int:
        return len(TEXTS)

    def __getitem__(self, index: int) -> str:
        return TEXTS[index]


@pytest.mark.parametrize("make", [json_lines, json_list, json_of_lines, parquet, saved])
def test_files(make: Callable[[Path], Path], tmp_path: Path) -> None:
    expected = [ids_of(text) for text in TEXTS]
    path = make(tmp_path)
    assert read(path) == read(str(path)) == expected
    assert sorted(read(path, shuffle=True)) == sorted(expected)


def text_file(folder: Path) -> Path:
    return write(folder / "a.txt", "[Chapter 1]\n" + "\n".join(TEXTS))


@pytest.mark.parametrize("make", [json_lines, json_list, json_of_lines, text_file])
def test_streams_are_what_a_file_of_their_content_is(
    make: Callable[[Path], Path], tmp_path: Path
) -> None:
    path = make(tmp_path)
    if make is json_of_lines:  # of texts alone, which nothing tells from a text
        path.write_text("\n".join(json.dumps({"text": text}) for text in TEXTS))
    expected = read(path, max_seq_length=4)
    with path.open("rb") as opened:
        assert read(opened, max_seq_length=4) == expected
    assert expected


def test_of_a_long_stream_the_beginning_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "LARGEST_TEXT", 40)
    lines = b'{"text": "ab"}\n{"text": "cd"}\n{"text": "ef"}\n'
    with pytest.warns(CalipersWarning, match=r"only the first 0 MiB are read"):
        assert read(io.BytesIO(lines)) == [ids_of("ab"), ids_of("cd")]


@pytest.mark.parametrize(
    "dataset",
    [
        TEXTS,
        tuple(TEXTS),
        RECORDS,
        (text for text in TEXTS),
        Indexed(),
        datasets.Dataset.from_list(RECORDS),
        datasets.Dataset.from_list(RECORDS)["text"],
        datasets.Dataset.from_list(RECORDS).to_iterable_dataset(),
        [RECORDS[0], *TEXTS[1:]],
        [TEXTS[0], *RECORDS[1:]],
        [ids_of(text) for text in TEXTS],
        [torch.tensor(ids_of(text), dtype=torch.int32) for text in TEXTS],
        [np.array(ids_of(text)) for text in TEXTS],
        [{"input_ids": ids_of(text), "text": "not this"} for text in TEXTS],
    ],
    ids=lambda dataset: type(dataset).__name__,
)
def test_objects(dataset: Any) -> None:
    assert read(dataset) == [ids_of(text) for text in TEXTS]


@pytest.mark.parametrize(
    ("record", "text"),
    [
        ({"messages": [{"role": "user", "content": "a"}], "prompt": "no"}, "user:a;"),
        ({"conversations": [{"from": "gpt", "value": "a"}]}, "assistant:a;"),
        ({"conversations": [{"from": "human", "value": "a"}]}, "user:a;"),
        ({"prompt": "ab", "completion": "cd", "id": "x"}, "user:ab;assistant:cd;"),
        (
            {
                "prompt": [{"role": "user", "content": "a"}],
                "completion": [{"role": "assistant", "content": "b"}],
            },
            "user:a;assistant:b;",
        ),
        ({"story": "ab", "length": 2}, "ab"),
        ({"title": "no", "text": "ab"}, "ab"),
        ({"title": "no", "content": "ab"}, "ab"),
        ({"title": "no", "prompt": "ab"}, "ab"),
        (
            [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}],
            "user:a;assistant:b;",
        ),
    ],
)
def test_where_the_text_of_a_record_is(record: Any, text: str, tmp_path: Path) -> None:
    assert read([record]) == [ids_of(text)]
    assert read(write(tmp_path / "a.jsonl", json.dumps(record))) == [ids_of(text)]


def test_the_column_can_be_named(tmp_path: Path) -> None:
    record = {"text": "no", "story": "ab", "talk": [{"role": "user", "content": "a"}], "n": [1, 2]}
    assert read([record], text_column="story") == [ids_of("ab")]
    assert read([record], text_column="talk") == [ids_of("user:a;")]
    assert read([record], text_column="n") == [[1, 2]]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([record]), tmp_path / "a.parquet")
    assert read(tmp_path / "a.parquet", text_column="story") == [ids_of("ab")]


def test_padding_of_tokenized_records_is_taken_off() -> None:
    record = {"input_ids": [0, 0, 5, 6], "attention_mask": [0, 0, 1, 1]}
    assert read([record]) == [[5, 6]]
    assert read(datasets.Dataset.from_list([record])) == [[5, 6]]


def test_a_chat_of_a_dataset_and_of_parquet(tmp_path: Path) -> None:
    records = [{"messages": [{"role": "user", "content": text}]} for text in TEXTS]
    expected = [ids_of(f"user:{text};") for text in TEXTS]
    assert read(datasets.Dataset.from_list(records)) == expected
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(records), tmp_path / "a.parquet")
    assert read(tmp_path / "a.parquet") == expected


def test_arrays_of_token_ids() -> None:
    ids = torch.arange(12).view(3, 4)
    assert read(ids) == read(ids.numpy()) == ids.tolist()
    assert read(ids, max_seq_length=2) == ids[:, :2].tolist()


def test_only_the_lines_that_are_used_are_read(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", '{"text": "ab"}\n{"text": broken\n')
    assert read(path, num_samples=1) == [ids_of("ab")]


def test_a_stream_is_read_no_further_than_needed() -> None:
    def endless() -> Iterator[str]:
        while True:
            yield "ab"

    assert read(endless(), num_samples=3) == [ids_of("ab")] * 3
    packed = read(endless(), num_samples=3, packing=True, max_seq_length=5)
    assert packed == [ids_of("ababa"), ids_of("babab"), ids_of("ababa")]


def test_a_stream_of_datasets_is_shuffled() -> None:
    records = [{"text": text} for text in "abcdefghijklmnop"]
    stream = datasets.Dataset.from_list(records).to_iterable_dataset()
    in_order = [ids_of(record["text"]) for record in records]
    found = read(stream, shuffle=True)
    assert found == read(stream, shuffle=True) != in_order == sorted(found, key=in_order.index)
    assert found != read(stream, shuffle=True, seed=1)
    assert len(records) <= sources.SHUFFLE_BUFFER


def test_a_text_file_is_cut_into_pieces(tmp_path: Path) -> None:
    path = write(tmp_path / "a.md", "\ufeffone two\nthree")
    assert read(path, max_seq_length=6) == [ids_of("one tw"), ids_of("o\nthre")]


def test_of_a_huge_text_file_the_beginning_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sources, "LARGEST_TEXT", 2**20 + 1)
    path = write(tmp_path / "a.txt", "a" * 2**20 + "ä" + "b" * 2**20)
    batches = calibration_batches(path, byte_tokenizer(), max_seq_length=2**20)
    assert rows(batches) == [ids_of("a") * 2**20]
    assert batches.warnings[0] == (
        f"Only the first 1 MiB of '{path}' (2 MiB) are read; of a .jsonl file, samples are taken "
        "from everywhere."
    )


def ready_batches() -> list[dict[str, Any]]:
    return [
        {
            "input_ids": torch.full((2, 3), number),
            "attention_mask": torch.tensor([[1, 1, 0], [1, 1, 1]]),
            "extra": torch.full((2, 5), 0.5 + number),
            "names": ["x", "y"],
        }
        for number in range(5)
    ]


@pytest.mark.parametrize("wrap", [list, iter, lambda given: DataLoader(given, batch_size=None)])
def test_ready_batches_are_kept_as_they_are(wrap: Callable[[Any], Any]) -> None:
    batches = calibration_batches(wrap(ready_batches()), batch_size=7, max_seq_length=1)
    assert (len(batches), batches.num_samples, batches.num_tokens) == (5, 10, 25)
    for found, given in zip(batches, ready_batches(), strict=True):
        assert set(found) == {"input_ids", "attention_mask", "extra"}
        for name, tensor in found.items():
            torch.testing.assert_close(tensor, given[name])


def test_ready_batches_are_dealt_in_turn() -> None:
    parts = [
        calibration_batches(ready_batches(), rank=rank, world_size=3, num_samples=9)
        for rank in range(3)
    ]
    firsts = [[int(batch["input_ids"][0, 0]) for batch in part] for part in parts]
    assert firsts == [[0, 3], [1, 4], [2]]
    assert [part.num_samples for part in parts] == [4, 3, 2]


def test_rows_of_ready_batches_are_counted() -> None:
    batches = calibration_batches(ready_batches(), num_samples=3)
    assert [len(batch["extra"]) for batch in batches] == [2, 1]
    whole = [{**batch, "patches": torch.zeros(7, 2)} for batch in ready_batches()]
    assert [len(batch["input_ids"]) for batch in calibration_batches(whole, num_samples=3)] == [
        2,
        2,
    ]


def test_a_ready_batch_is_not_cut_down_to_padding() -> None:
    batch = {"input_ids": torch.ones(2, 2).long(), "attention_mask": torch.tensor([[0, 0], [1, 1]])}
    (found,) = calibration_batches([batch], num_samples=1)
    assert found["attention_mask"].tolist() == [[0, 0], [1, 1]]


def test_a_loader_without_end_is_read_no_further_than_needed() -> None:
    def endless() -> Iterator[dict[str, torch.Tensor]]:
        while True:
            yield {"input_ids": torch.ones(2, 4, dtype=torch.int32)}

    batches = calibration_batches(endless(), num_samples=6)
    assert (len(batches), batches.num_tokens) == (3, 24)
    assert {tensor.dtype for batch in batches for tensor in batch.values()} == {torch.int64}


def test_other_forms_of_ready_batches() -> None:
    ids = torch.arange(6).view(2, 3)
    encoded = BatchEncoding({"input_ids": ids, "attention_mask": torch.ones(2, 3).bool()})
    loader = DataLoader(ids, batch_size=2)  # type: ignore[arg-type]
    for dataset in (encoded, [encoded], loader, iter([ids]), [{"input_ids": ids.numpy()}]):
        (batch,) = calibration_batches(dataset)
        assert batch["input_ids"].tolist() == ids.tolist()
        assert batch["attention_mask"].tolist() == [[1, 1, 1]] * 2
        assert {tensor.dtype for tensor in batch.values()} == {torch.int64}


def test_a_loader_of_tuples_is_refused() -> None:
    loader = DataLoader(TensorDataset(torch.arange(6).view(2, 3)), batch_size=2)
    with pytest.raises(ValueError, match=r"item 0 is a list of torch.int64, not of whole numbers"):
        calibration_batches(loader)


@pytest.mark.slow
def test_datasets_and_pyarrow_are_loaded_only_for_their_data() -> None:
    script = (
        "import sys, warnings; warnings.simplefilter('ignore'); "
        "from calipers.calibration.data import calibration_batches; "
        "calibration_batches([[1, 2]]); "
        "print([name in sys.modules for name in ('datasets', 'pyarrow', 'transformers')])"
    )
    command = [sys.executable, "-c", script]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[False, False, False]"
