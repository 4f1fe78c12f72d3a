"""Every option that says how data is taken, or how a checkpoint is cut, has its effect."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from models import small_llama
from words import byte_tokenizer

import calipers
from calipers.calibration.data import limits_of
from calipers.errors import CalipersWarning
from calipers.statistics.tensor_statistics import TensorStatistics

pytestmark = pytest.mark.filterwarnings("ignore::calipers.errors.CalipersWarning")  # little data

SAMPLES = torch.randint(96, (60, 40), generator=torch.Generator().manual_seed(0))


class Run:
    """What a run with some options saw."""

    def __init__(self, dataset: Any = SAMPLES, **options: Any) -> None:
        torch.manual_seed(0)
        self.model = small_llama(vocab_size=300)
        self.shapes: list[tuple[int, ...]] = []
        layer = self.model.get_submodule("model.layers.0")
        handle = layer.register_forward_pre_hook(
            lambda _module, args: self.shapes.append(tuple(args[0].shape[:2]))
        )
        self.result = calipers.oneshot(self.model, "FP8", dataset, **options)
        handle.remove()

    @property
    def tokens(self) -> int:
        return self.result.coverage.tokens["model.layers.0.self_attn.q_proj"]

    @property
    def scales(self) -> torch.Tensor:
        found = [v for n, v in self.model.named_parameters() if n.endswith("input_scale")]
        return torch.cat(found)


def test_number_and_length_of_samples() -> None:
    assert Run(num_calibration_samples=7).tokens == 7 * 40
    run = Run(max_seq_length=16)
    assert run.tokens == 60 * 16
    assert run.shapes == [(1, 16)] * 60


def test_batch_size() -> None:
    assert Run(batch_size=25).shapes == [(25, 40), (25, 40), (10, 40)]


def test_packing() -> None:
    run = Run([[1, 2, 3]] * 40, packing=True, max_seq_length=30)
    assert run.shapes == [(1, 30)] * 4
    assert Run([[1, 2, 3]] * 40, packing=False, max_seq_length=30).shapes == [(1, 3)] * 40


def test_seed_and_shuffling() -> None:
    few: dict[str, Any] = {"num_calibration_samples": 5}
    first = Run(seed=1, **few).scales
    assert torch.equal(first, Run(seed=1, **few).scales)
    assert not torch.equal(first, Run(seed=2, **few).scales)
    assert torch.equal(Run(shuffle=False, **few).scales, Run(SAMPLES[:5]).scales)


def test_text_column() -> None:
    records = [{"text": "ab", "other": "abcdef"}] * 40
    options: dict[str, Any] = {"tokenizer": byte_tokenizer(), "shuffle": False}
    short, long = (Run(records, text_column=c, **options).tokens for c in ("text", "other"))
    assert long - short == 40 * 4


def test_sharing_is_left_out_where_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[None] = []
    update = TensorStatistics.update

    def counting(self: TensorStatistics, *args: Any, **kwargs: Any) -> None:
        calls.append(None)
        update(self, *args, **kwargs)

    monkeypatch.setattr(TensorStatistics, "update", counting)
    inputs = []
    for share in (True, False):
        calls.clear()
        Run(batch_size=60, num_calibration_samples=60, share_inputs=share)
        inputs.append(len(calls))
    # In one batch a group is found while it is read: q, o, gate and down of each layer, or all.
    assert inputs == [2 * 4, 2 * 7]


def test_size_of_shards(tmp_path: Path) -> None:
    Run(output_dir=tmp_path / "one")
    Run(output_dir=tmp_path / "many", max_shard_size="50KB")
    assert len(list((tmp_path / "one").glob("*.safetensors"))) == 1
    index = json.loads((tmp_path / "many" / "model.safetensors.index.json").read_text())
    files = {path.name for path in (tmp_path / "many").glob("*.safetensors")}
    assert len(files) > 1
    assert files == set(index["weight_map"].values())


@pytest.mark.filterwarnings("default::calipers.errors.CalipersWarning")
def test_a_sample_is_as_long_as_the_model_can_take() -> None:
    config = small_llama().config
    short, endless = small_llama(max_position_embeddings=30), small_llama()
    endless.config.max_position_embeddings = 10**6
    assert limits_of(short, None) == {"vocab_size": config.vocab_size, "max_seq_length": 30}
    assert limits_of(endless, None)["max_seq_length"] == 2048
    assert limits_of(short, 30)["max_seq_length"] == 30
    text = "max_seq_length=31 is longer than what LlamaForCausalLM takes: 30 tokens"
    with pytest.warns(CalipersWarning, match=text):
        assert limits_of(short, 31)["max_seq_length"] == 31
    with pytest.warns(CalipersWarning):  # little data
        run = calipers.oneshot(short, "FP8", SAMPLES[:, :35])
    assert set(run.coverage.tokens.values()) == {60 * 30}
