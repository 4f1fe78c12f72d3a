"""What ``measure`` finds is what brute force finds in the inputs that modules really had."""

from __future__ import annotations

from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import pytest
import torch
from families import FAMILIES, Untouched, build, saved
from measuring import assert_same
from safetensors.torch import load_file
from torch import Tensor

import calipers
from calipers import Measurements
from calipers.checkpoint.stored_weights import fingerprint_of, model_fingerprint
from calipers.errors import CalipersWarning, ConfigurationError
from calipers.measurements.info import sample_digest
from calipers.statistics.value_counts import ValueCounts

pytestmark = pytest.mark.filterwarnings("ignore::calipers.errors.CalipersWarning")

LENGTHS = (17, 5, 24, 1, 9, 17)
DATA = [
    torch.randint(260, (n,), generator=torch.Generator().manual_seed(n + i)).tolist()
    for i, n in enumerate(LENGTHS)
]
DOWN = "model.layers.1.mlp.down_proj"
Q, K, V = (f"model.layers.0.self_attn.{name}_proj" for name in "qkv")


def measured(model: Any, data: Any = None, **options: Any) -> Measurements:
    options = {"batch_size": 4, "progress": False, **options}
    return calipers.measure(model, DATA if data is None else data, **options)


def statistic(found: Measurements, module: str, base_name: str, key: str) -> Any:
    held = found.get(module, base_name, key)
    assert held is not None
    return held


@torch.no_grad()
def captured(model: Any, module: str, base_name: str) -> Tensor:
    """All tokens that a module gets or gives, sample by sample: there is no padding."""
    seen: list[Tensor] = []
    handle = model.get_submodule(module).register_forward_hook(
        lambda _, args, output: seen.append((args[0] if base_name == "input" else output)[0])
    )
    for ids in DATA:
        model(torch.tensor([ids]), use_cache=False)
    handle.remove()
    return torch.cat(seen)


def counts_of(counts: ValueCounts, piece: int = 0) -> dict[float, int]:
    values, numbers = list(counts.distributions())[piece]
    return dict(zip(values.tolist(), numbers.tolist(), strict=True))


def counted(values: Tensor) -> dict[float, int]:
    return dict(Counter((values.to(torch.bfloat16).float() + 0.0).flatten().tolist()))


def test_inputs_outputs_and_hessians_are_those_of_brute_force() -> None:
    model = build("llama")
    before = Untouched(model)
    found = measured(model, collect=("hessian", "outputs"), batch_size=1)
    before.check()
    for module in (Q, DOWN, "lm_head"):
        x = captured(model, module, "input")
        counts = statistic(found, module, "input", "counts")
        assert counts_of(counts) == counted(x)
        assert counts.num_tokens == len(x) == sum(LENGTHS)
        extrema = statistic(found, module, "input", "extrema")
        assert (float(extrema.min_vals), float(extrema.max_vals)) == (
            float(x.min()),
            float(x.max()),
        )
        channels = statistic(found, module, "input", "channel_extrema")
        assert torch.equal(channels.min_vals, x.amin(0))
        assert torch.equal(channels.max_vals, x.amax(0))
        squares = statistic(found, module, "input", "squares")
        torch.testing.assert_close(squares._imatrix_sum, x.double().square().sum(0))
        hessian = statistic(found, module, "input", "hessian")
        expected = (x.double().T @ x.double())[None]
        torch.testing.assert_close(hessian._hessian_sum, expected, rtol=1e-5, atol=1e-5)
        y = captured(model, module, "output")
        assert counts_of(statistic(found, module, "output", "counts")) == counted(y)
        assert float(statistic(found, module, "output", "extrema").max_vals) == float(y.max())


def test_padding_and_the_pipeline_change_nothing() -> None:
    model = build("llama")
    whole = measured(model, batch_size=1, collect="outputs,attention")
    for options in ({"batch_size": 3}, {"pipeline": "sequential"}, {"share_inputs": False}):
        other = measured(model, collect=("attention", "outputs"), **{"batch_size": 1, **options})
        for place, statistics in whole.tensors().items():
            tokens = {key: each.num_tokens for key, each in statistics.items()}
            assert set(tokens.values()) == {sum(LENGTHS)}
            assert tokens == {k: s.num_tokens for k, s in other.tensors()[place].items()}
        if "batch_size" not in options:
            assert_same(whole, other)


def test_attention_states_of_each_head() -> None:
    model = build("llama")
    found = measured(model, collect="attention", batch_size=1)
    values = captured(model, V, "output")
    name = V.removesuffix(".v_proj")
    heads = statistic(found, name, "v", "head_counts")
    size = values.shape[-1] // 2
    for head in range(2):
        part = values[:, head * size : (head + 1) * size]
        assert counts_of(heads, head) == counted(part)
    for base_name in "qkv":
        table = statistic(found, name, base_name, "head_counts").counts_bfloat16
        whole = statistic(found, name, base_name, "counts").counts_bfloat16
        assert torch.equal(table.reshape(-1, 65536).sum(0), whole.reshape(-1))


def test_a_tensor_that_several_modules_read_is_kept_and_stored_once(tmp_path: Path) -> None:
    found = measured(build("llama"), share_inputs=False)
    assert found.get(Q, "input", "counts") is found.get(V, "input", "counts")
    assert found.get(Q, "input", "counts") is not found.get(DOWN, "input", "counts")
    file = found.save(tmp_path / "m.safetensors")
    readers = defaultdict(set)
    for name in load_file(file):
        readers[name.partition("/")[0]].add(name)
    assert f"{Q}.input" in readers
    assert not {f"{K}.input", f"{V}.input"} & readers.keys()
    back = Measurements.load(file)
    assert back.get(Q, "input", "counts") is back.get(V, "input", "counts")
    assert_same(found, back)
    assert len(readers) == 2 * 4 + 1 == len(back.summary()["tensors"])


def test_samples_are_known_by_their_tokens() -> None:
    twice = measured(build("llama"), [*DATA, DATA[0]])
    assert twice.info is not None
    expected = sorted(sample_digest(torch.tensor(ids)) for ids in [*DATA, DATA[0]])
    assert list(twice.info.samples) == expected
    assert twice.info.tokens == sum(LENGTHS) + LENGTHS[0]
    assert repr(twice) == f"Measurements(LlamaForCausalLM, 9 tensors, 7 samples, {90} tokens)"
    assert "<table>" in twice._repr_html_()


def test_experts_that_saw_nothing_are_filled_by_merging() -> None:
    model = build("mixtral")
    before = Untouched(model)
    one = [DATA[3]]  # a single token: two of four experts
    with pytest.warns(CalipersWarning, match="saw no token"):
        few = measured(model, one)
    before.check()
    rest = measured(model, [*DATA[:3], *DATA[4:]], batch_size=1)
    both = measured(model, batch_size=1)
    experts = [place for place in few.tensors() if "experts" in place[0]]
    assert len(experts) == 2 * 4 * 3
    seen = sum(
        statistic(both, f"model.layers.0.mlp.experts.{i}.up_proj", "input", "counts").num_tokens
        for i in range(4)
    )
    assert seen == 2 * sum(LENGTHS)
    assert_same(few.merge(rest), both)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_fingerprint_is_that_of_the_files(family: str, tmp_path: Path) -> None:
    model = build(family, torch.bfloat16)
    files = load_file(saved(model, tmp_path / "model") / "model.safetensors")
    assert model_fingerprint(model) == fingerprint_of(files.items())
    both = {**files, "lm_head.weight": model.get_output_embeddings().weight}  # as some store it
    assert model_fingerprint(model) == fingerprint_of(both.items())
    with torch.no_grad():
        next(model.parameters()).view(-1)[0] += 1
    assert model_fingerprint(model) != fingerprint_of(files.items())


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"collect": "hesian"}, "collect='hesian' is not allowed. Did you mean 'hessian'?"),
        ({"pipeline": "datafree"}, "pipeline='datafree' has no meaning for measurements"),
        ({"pipeline": "quick"}, "pipeline='quick' is not allowed"),
        ({"sed": 3}, "Unknown option 'sed'. Did you mean 'seed'?"),
    ],
)
def test_options_that_cannot_be_meant(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigurationError) as error:
        measured("nowhere", **options)
    assert text in str(error.value)
