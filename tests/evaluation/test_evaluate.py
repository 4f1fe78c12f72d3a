"""Checkpoints loaded from disk beside their model, against a second way to the same figures."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from families import build, saved, token_ids
from transformers import AutoModelForCausalLM, PreTrainedModel
from words import byte_tokenizer

import calipers
from calipers import errors
from calipers.evaluation import Difference, Evaluation, evaluate

pytestmark = pytest.mark.filterwarnings("ignore:.*samples were evaluated.*")

SCHEMES = ("W4A16", "W8A8")
LENGTH = 30


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    saved(build(), folder / "float")
    for scheme in SCHEMES:
        calipers.oneshot(folder / "float", scheme, output_dir=folder / scheme, progress=False)
    return folder


@pytest.fixture(scope="module")
def found(places: Path) -> Evaluation:
    return evaluate(
        places / "float",
        [places / scheme for scheme in SCHEMES],
        token_ids(24, LENGTH),
        batch_size=5,
    )


def load(path: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(path, dtype="auto").eval()


@torch.no_grad()
def log_probabilities(model: Any) -> torch.Tensor:
    return torch.log_softmax(model(token_ids(24, LENGTH)).logits[:, :-1].double(), -1)


def perplexity(log_q: torch.Tensor) -> float:
    targets = token_ids(24, LENGTH)[:, 1:, None]
    return math.exp(-float(log_q.gather(-1, targets).mean()))


def test_figures_are_those_of_the_definition(places: Path, found: Evaluation) -> None:
    log_p = log_probabilities(load(places / "float"))
    assert found.tokens == 24 * (LENGTH - 1)
    assert found.samples == 24
    assert found.base.perplexity.value == pytest.approx(perplexity(log_p), rel=1e-5)
    for scheme in SCHEMES:
        log_q, scores = log_probabilities(load(places / scheme)), found.checkpoints[scheme]
        kl = float((log_p.exp() * (log_p - log_q)).sum(-1).mean())
        agreed = float((log_p.argmax(-1) == log_q.argmax(-1)).double().mean())
        assert scores.perplexity.value == pytest.approx(perplexity(log_q), rel=1e-5)
        assert scores.kl.value == pytest.approx(kl, rel=1e-3, abs=1e-7)
        assert scores.agreement.value == pytest.approx(agreed)
        change = scores.perplexity.value - found.base.perplexity.value
        assert scores.change.value == pytest.approx(change, rel=1e-9)
        assert scores.change.low < scores.change.value < scores.change.high


def test_differences_of_checkpoints(found: Evaluation) -> None:
    one, other = (found.checkpoints[scheme].perplexity.value for scheme in SCHEMES)
    difference = found.difference(*SCHEMES)
    assert difference.value == pytest.approx(one - other, rel=1e-9)
    reverse = found.difference(*reversed(SCHEMES))
    assert (reverse.low, reverse.high) == pytest.approx((-difference.high, -difference.low))


def test_distances_from_the_best(found: Evaluation) -> None:
    values = {name: scores.perplexity.value for name, scores in found.checkpoints.items()}
    best, other = sorted(values, key=values.__getitem__)
    above = found.above_best()
    assert above[best] == Difference(0, 0, 0, noise=0)
    assert above[other] == found.difference(other, best)
    assert above[other].value > 0
    told = found.as_dict()["checkpoints"][other]["above_best"]
    assert told == above[other].as_dict()


@torch.no_grad()
def test_errors_of_layers(places: Path, found: Evaluation) -> None:
    """Hidden states of both models, and each layer called by hand."""
    base, other = load(places / "float"), load(places / "W4A16")
    ids = token_ids(24, LENGTH)
    states, theirs = (m(ids, output_hidden_states=True).hidden_states for m in (base, other))
    layers = found.checkpoints["W4A16"].layers
    assert [layer.layer for layer in layers] == ["model.layers.0", "model.layers.1"]
    # The last of the hidden states has been through the norm, so only the first is a layer's.
    assert layers[0].output == pytest.approx(relative(theirs[1], states[1]), rel=1e-4)
    assert layers[0].own == pytest.approx(layers[0].output, rel=1e-4)  # same inputs: embeddings
    positions = torch.arange(LENGTH)[None]
    rotary = base.model.rotary_emb(states[1], positions)
    again = [m.model.layers[1](states[1], position_embeddings=rotary) for m in (other, base)]
    assert layers[1].own == pytest.approx(relative(*again), rel=1e-4)
    assert layers[1].own < layers[1].output


def relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    errors = (found - expected).double().norm(dim=-1) / expected.double().norm(dim=-1)
    return float(errors.mean())


def test_padding_and_batches_change_nothing(places: Path) -> None:
    samples = [row[: 5 + 2 * index].tolist() for index, row in enumerate(token_ids(9, LENGTH))]
    one, many = (
        evaluate(places / "float", [places / "W4A16"], samples, batch_size=size).as_dict()
        for size in (1, 4)
    )
    flat_one, flat_many = flat(one), flat(many)
    assert flat_one == pytest.approx(flat_many, rel=1e-3, abs=1e-6)


def flat(data: Any) -> list[float]:
    if isinstance(data, dict):
        told = (value for name, value in data.items() if name != "noise")  # it is measured by batch
        return [number for value in told for number in flat(value)]
    if isinstance(data, list):
        return [number for value in data for number in flat(value)]
    return [] if isinstance(data, str) else [float(data)]


def test_without_layers_the_rest_is_the_same(places: Path, found: Evaluation) -> None:
    paths = [places / scheme for scheme in SCHEMES]
    quick = evaluate(places / "float", paths, token_ids(24, LENGTH), batch_size=5, layers=False)
    for scheme in SCHEMES:
        mine, theirs = quick.checkpoints[scheme], found.checkpoints[scheme]
        assert mine.layers == ()
        assert (mine.perplexity, mine.kl, mine.change) == (
            theirs.perplexity,
            theirs.kl,
            theirs.change,
        )


def test_logits_that_are_too_many_are_computed_again(
    places: Path, found: Evaluation, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.modules["calipers.evaluation.evaluate"], "_KEPT_LOGITS", 1)
    again = evaluate(
        places / "float", [places / "W8A8"], token_ids(24, LENGTH), batch_size=5, layers=False
    )
    assert again.checkpoints["W8A8"].kl == found.checkpoints["W8A8"].kl


def test_a_model_in_memory_beside_itself() -> None:
    model = build()
    hooks = sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())
    result = evaluate(model, {"itself": model}, token_ids(24, 16))
    scores = result.checkpoints["itself"]
    assert result.base.size is None
    assert (scores.change.value, scores.kl.value, scores.agreement.value) == (0, 0, 1)
    assert scores.change.holds(0)
    assert all(layer.own == layer.output == 0 for layer in scores.layers)
    assert hooks == sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())


def test_a_frozen_model_is_like_its_checkpoint(places: Path) -> None:
    frozen = calipers.oneshot(places / "float", "W8A8", progress=False).model
    pair = {"memory": frozen, "disk": places / "W8A8"}
    result = evaluate(places / "float", pair, token_ids(24, 16), layers=False)
    assert result.difference("memory", "disk").value == 0


def test_the_model_alone(places: Path) -> None:
    result = evaluate(places / "float", [], token_ids(24, 16))
    assert not result.checkpoints
    assert result.base.perplexity.value > 1
    assert result.base.size == sum(p.nbytes for p in build().parameters())


def test_text_and_a_text_column(places: Path, tmp_path: Path) -> None:
    byte_tokenizer().save_pretrained(tmp_path)
    records = [{"body": f"a text of letters, number {i}", "text": "x"} for i in range(30)]
    options: dict[str, Any] = {"tokenizer": tmp_path, "num_samples": 25, "max_seq_length": 20}
    result = evaluate(places / "float", [], records, text_column="body", packing=True, **options)
    assert result.tokens == 25 * 19


# What is refused


@pytest.mark.parametrize("layers", [True, False])
@pytest.mark.parametrize(
    ("what", "found", "expected"),
    [("vocab_size", 300, 260), ("hidden_size", 64, 128), ("num_hidden_layers", 3, 2)],
)
def test_another_model(places: Path, what: str, found: int, expected: int, layers: bool) -> None:
    text = f"'other' has {what} {found}, and the float model {expected}. Only checkpoints of the"
    with pytest.raises(errors.ConfigurationError, match=text):
        evaluate(places / "float", {"other": build(**{what: found})}, token_ids(), layers=layers)


def test_a_model_that_computes_nan(places: Path) -> None:
    broken = build()
    with torch.no_grad():
        broken.model.embed_tokens.weight[7] = torch.nan
    fine, bad = torch.tensor([[1, 2, 3]] * 2), torch.tensor([[1, 2, 3], [1, 7, 3]])
    batches = [{"input_ids": ids} for ids in (fine, fine, bad, bad)]
    text = r"^'broken' computes logits that are NaN or Inf, first in sample 5\."
    with pytest.raises(errors.TensorValueError, match=text) as caught:
        evaluate(places / "float", {"broken": broken}, batches)
    assert caught.value.exit_code == 3


def test_samples_without_predictions(places: Path) -> None:
    some = evaluate(places / "float", [], [[1], [1, 2, 3], [2], [4, 5]])
    assert (some.samples, some.tokens) == (2, 3)
    with pytest.raises(errors.DataError, match="has only samples of one token"):
        evaluate(places / "float", [], [[1], [2]])


def test_a_checkpoint_twice(places: Path) -> None:
    with pytest.raises(errors.ConfigurationError, match="is given twice"):
        evaluate(places / "float", [places / "W4A16", places / "W4A16"], token_ids())


def test_checkpoints_of_one_name_go_by_their_paths(places: Path, tmp_path: Path) -> None:
    (tmp_path / "W4A16").symlink_to(places / "W4A16")
    paths = [places / "W4A16", tmp_path / "W4A16", places / "W8A8"]
    result = evaluate(places / "float", paths, token_ids(8, 8), layers=False)
    assert list(result.checkpoints) == [str(paths[0]), str(paths[1]), "W8A8"]


@pytest.mark.filterwarnings("default:.*samples were evaluated.*")
def test_few_samples_are_told_of(places: Path) -> None:
    with pytest.warns(errors.CalipersWarning, match="Only 3 samples were evaluated"):
        evaluate(places / "float", [], token_ids(3, 8))
