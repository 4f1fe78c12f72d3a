"""What roundings alone do to figures, and that it is not taken for a difference."""

from __future__ import annotations

import math
import shutil
from pathlib import Path

import pytest
import torch
from families import build, same_bits, token_ids
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

import calipers
from calipers.cli.app import console
from calipers.cli.evaluate import _view
from calipers.demo import MODEL
from calipers.demo.text import library_pieces
from calipers.evaluation import Evaluation, evaluate
from calipers.evaluation.noise import batches_to_repeat, noise_in_nats, rounded_otherwise
from calipers.steps import QuantizationModifier

# What goes in, moved


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@torch.no_grad()
def test_inputs_move_by_one_rounding(dtype: torch.dtype) -> None:
    """To a neighbour in half precision; in float32 by what a sum of many products may lose."""
    values = torch.rand(64, 128).to(dtype) + 0.125
    layer = torch.nn.Linear(128, 128, bias=False, dtype=dtype)
    layer.weight.copy_(torch.eye(128))
    with rounded_otherwise(layer, seed=1):
        moved = layer(values)
    change = (moved.double() - values.double()) / values.double()
    expected = {torch.float32: 2**-18, torch.bfloat16: 2**-7, torch.float16: 2**-10}[dtype]
    lowest = expected * (0.95 if dtype == torch.float32 else 0.5)
    assert 0.45 < float((change > 0).double().mean()) < 0.55
    assert float(change.abs().max()) <= expected * 1.05
    at_powers = (values.double().log2() % 1 == 0) & (change == 0)  # a tie, which stays
    assert bool(((change.abs() >= lowest * 0.99) | at_powers).all())


@torch.no_grad()
def test_movements_are_those_of_the_seed_and_end() -> None:
    model, ids = build(), token_ids(2, 8)
    plain = model(ids).logits
    found = []
    for seed in (1, 1, 2):
        with rounded_otherwise(model, seed):
            found.append(model(ids).logits)
    assert same_bits(found[0], found[1])
    assert not same_bits(found[0], found[2])
    assert not same_bits(found[0], plain)
    assert same_bits(model(ids).logits, plain)


# What is made of it


def test_noise_of_single_samples_averages_out() -> None:
    """Against the spread of means that are drawn again and again."""
    tokens = torch.randint(50, 200, (64,)).double()
    found = [
        noise_in_nats(torch.randn(64, dtype=torch.float64) * tokens.sqrt(), tokens, samples=1024)
        for _ in range(200)
    ]
    every = torch.randint(50, 200, (2000, 1024)).double()
    means = (torch.randn(2000, 1024, dtype=torch.float64) * every.sqrt()).sum(1) / every.sum(1)
    squares = torch.tensor(found, dtype=torch.float64).square()
    assert float(squares.median()) == pytest.approx(float(means.var()), rel=0.2)


def test_a_shift_of_all_samples_does_not() -> None:
    tokens = torch.randint(50, 200, (64,)).double()
    assert noise_in_nats(-0.25 * tokens, tokens, samples=10_000) == pytest.approx(0.25)
    assert noise_in_nats(torch.tensor([3.0]), torch.tensor([6.0]), samples=1) == 0.5
    broken = torch.tensor([0.0, math.nan])
    assert noise_in_nats(broken, torch.ones(2), samples=2) == math.inf


def test_few_batches_from_everywhere() -> None:
    assert batches_to_repeat([1] * 512) == list(range(0, 512, 8))
    assert batches_to_repeat([8] * 3) == [0, 1]
    assert batches_to_repeat([2, 1]) == [0, 1]


# Checkpoints


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Evaluation:
    """The model that ships, damaged by 2-bit weights and 4-bit activations, and what is like it."""
    folder = tmp_path_factory.mktemp("noise")
    AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32).save_pretrained(
        folder / "float"
    )
    inputs = {"num_bits": 4, "symmetric": True, "strategy": "token", "dynamic": True}
    for bits in (2, 4, 8):
        how = QuantizationModifier(
            weights={"num_bits": bits, "symmetric": True, "strategy": "channel"},
            input_activations=inputs if bits == 2 else None,
            ignore=("lm_head",),
        )
        calipers.oneshot(folder / "float", how, output_dir=folder / f"W{bits}", progress=False)
    names = ["W2", *(nearly_equal(folder / "W2", seed) for seed in (0, 2, 4, 5)), "W4", "W8"]
    return evaluate(
        folder / "float",
        {name: folder / name for name in names},
        library_pieces("evaluation"),
        tokenizer=MODEL,
        num_samples=32,
        max_seq_length=64,
        batch_size=8,
        packing=True,
        layers=False,
        progress=False,
    )


def nearly_equal(checkpoint: Path, seed: int) -> str:
    """Write the checkpoint again with scales that differ by 1e-6, and return its name."""
    folder = checkpoint.with_name(f"{checkpoint.name} {seed}")
    shutil.copytree(checkpoint, folder)
    tensors, random = load_file(folder / "model.safetensors"), torch.Generator().manual_seed(seed)
    for name in [name for name in tensors if name.endswith("weight_scale")]:
        signs = 2 * torch.randint(2, tensors[name].shape, generator=random) - 1
        tensors[name] *= 1 + 1e-6 * signs
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder.name


def test_checkpoints_that_are_equal_up_to_roundings_are_not_told_apart(found: Evaluation) -> None:
    """Intervals do: samples share the luck of the checkpoint they are compared with."""
    assert found.checkpoints["W2"].perplexity.value > 2 * found.base.perplexity.value
    alike = [name for name in found.checkpoints if name.startswith("W2 ")]
    differences = [found.difference(name, "W2") for name in alike]
    assert all(each.value for each in differences)
    assert not any(each.beyond_noise for each in differences)
    assert all(each.noise >= found.checkpoints["W2"].noise > 0.01 for each in differences)


def test_true_differences_are_told(found: Evaluation) -> None:
    assert found.difference("W4", "W8").beyond_noise
    assert found.difference("W2", "W4").beyond_noise
    assert found.checkpoints["W4"].change.beyond_noise
    assert found.checkpoints["W8"].noise < 1e-4  # float32, and not damaged


def test_a_broken_checkpoint_sets_no_floor_for_others(found: Evaluation) -> None:
    """Neither in the figures nor in what people are told: each pair has a floor of its own."""
    broken = found.checkpoints["W2"].noise
    assert found.difference("W4", "W8").noise < broken / 100
    assert found.difference("W2", "W8").noise == broken
    made = console()
    with made.capture() as captured:
        made.print(*_view("float", found), sep="\n")
    rows = {line.split()[0]: line for line in captured.get().splitlines() if line.strip()}
    for name in ("W4", "W8"):
        floor = found.checkpoints[name].change.noise
        assert f" {floor:.1g} " in rows[name]
    sentence = rows["32"].split()  # below the table
    assert not {f"{broken:.1g}", f"{broken:.2g}", f"{broken:.3g}"} & set(sentence)


def test_noise_is_in_the_data(found: Evaluation) -> None:
    told = found.as_dict()
    assert told["base"]["noise"] == found.base.noise
    scores = told["checkpoints"]["W4"]
    assert scores["noise"] == found.checkpoints["W4"].noise
    assert scores["change"]["beyond_noise"] is True
    assert scores["change"]["noise"] == max(scores["noise"], told["base"]["noise"])
