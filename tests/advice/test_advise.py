"""Advice on small models: what it predicts, what it chooses, and what quantize makes of it."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from compressed_tensors.utils import is_match
from families import saved
from massive import MASSIVE, massive_llama, samples
from quantizing import IDS, model_folder
from transformers import AutoModelForCausalLM, CompressedTensorsConfig

import calipers
from calipers import Measurements
from calipers.advice.advise import _recipe_of
from calipers.advice.candidates import read_candidates
from calipers.advice.predicting import Trial
from calipers.checkpoint.headers import stored_tensors
from calipers.errors import ConfigurationError, MeasurementsError
from calipers.solvers.gptq import curvature
from calipers.topology.names import groups_of_one_scheme, patterns_for

pytestmark = pytest.mark.filterwarnings("ignore::calipers.errors.CalipersWarning")
SCHEMES = "W4A16-g32,W8A16-g32,UNQUANTIZED"


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model_folder(tmp_path_factory.mktemp("advice") / "model")


@pytest.fixture(scope="module")
def seen(llama: Path) -> Measurements:
    return calipers.measure(
        llama, IDS, num_samples=6, collect="sensitivity,outputs", progress=False
    )


@pytest.fixture(scope="module")
def hessians(llama: Path) -> Measurements:
    return calipers.measure(
        llama, IDS, num_samples=6, collect="hessian,sensitivity", progress=False
    )


@pytest.fixture(scope="module")
def plain(llama: Path) -> Measurements:
    return calipers.measure(llama, IDS, num_samples=6, progress=False)


def advise(model: Path, seen: Any, schemes: Any = SCHEMES, budget: Any = None, **more: Any) -> Any:
    return calipers.advise(model, seen, schemes, budget, progress=False, **more)


class TestChoice:
    def test_the_checkpoint_has_the_predicted_size(
        self, llama: Path, seen: Measurements, tmp_path: Path
    ) -> None:
        found = advise(llama, seen, budget="6.5bpw")
        assert found.total.bits <= 6.5
        assert len(found.counts()) > 1
        done = calipers.quantize(llama, found.recipe, seen, tmp_path / "out", progress=False)
        stored = stored_tensors(tmp_path / "out")
        size = sum(
            each.size for name, each in stored.items() if name.rpartition(".")[0] in found.chosen
        )
        assert size == found.total.size
        for name, each in found.chosen.items():
            assert (f"{name}.weight" in stored) == (each.scheme == "UNQUANTIZED")
        predicted = sum(each.loss for each in found.chosen.values())
        assert predicted == pytest.approx(found.total.harm)
        assert sum(each.loss for each in done.costs.values()) == pytest.approx(predicted)

    def test_fused_modules_have_one_scheme(self, llama: Path, seen: Measurements) -> None:
        for budget in ("5bpw", "7bpw", "10bpw"):
            found = advise(llama, seen, budget=budget)
            for layer in ("model.layers.0", "model.layers.1"):
                for fused in (("self_attn", "qkv"), ("mlp", ("gate", "up"))):
                    names = [f"{layer}.{fused[0]}.{each}_proj" for each in fused[1]]
                    assert len({found.chosen[name].scheme for name in names}) == 1

    def test_a_larger_budget_never_loses_more(self, llama: Path, seen: Measurements) -> None:
        harms = [advise(llama, seen, budget=f"{bits}bpw").total.harm for bits in (4.6, 6, 9, 16)]
        assert harms == sorted(harms, reverse=True)
        assert harms[-1] == 0

    def test_budgets_of_size_and_of_harm_agree(self, llama: Path, seen: Measurements) -> None:
        by_size = advise(llama, seen, budget="7bpw")
        by_harm = advise(llama, seen, budget=f"{by_size.total.harm * (1 + 1e-9)}nats")
        assert by_harm.total.size <= by_size.total.size
        by_bytes = advise(llama, seen, budget=f"{by_size.total.size}B")
        assert by_bytes.total == by_size.total

    def test_several_solvers(self, llama: Path, seen: Measurements) -> None:
        found = advise(
            llama, seen, "W4A16-g32", "5bpw", solvers=["memoryless_minmax", "memoryless_mse"]
        )
        weighed = [{"name": "optimal", "importance": kind} for kind in ("none", "imatrix")]
        assert len(advise(llama, seen, "W4A16-g32", solvers=weighed).uniform) == 2
        assert {each.solver for each in found.predictions} == {
            "memoryless_minmax",
            "memoryless_mse",
        }
        assert list(found.uniform) == ["W4A16-g32 memoryless_minmax", "W4A16-g32 memoryless_mse"]
        assert found.recipe is not None

    def test_without_sensitivity_errors_count(self, llama: Path, plain: Measurements) -> None:
        found = advise(llama, plain, budget="6.5bpw")
        assert found.harm == "error"
        mean = sum(each.error**2 for each in found.chosen.values()) / len(found.chosen)
        assert found.total.harm == pytest.approx(mean)
        in_decibels = advise(llama, plain, budget="-30dB")
        assert in_decibels.total.harm <= 1e-3

    def test_what_is_shown(self, llama: Path, seen: Measurements) -> None:
        found = advise(llama, seen, budget="6.5bpw")
        assert "bits per weight: 6." in repr(found)
        assert "Modules that lose most" in found._repr_html_()
        data = found.as_dict()
        assert data["chosen"].keys() == found.chosen.keys()
        assert len(data["predictions"]) == 3 * len(found.chosen)


class TestMethods:
    def test_what_hessians_allow_is_compared_and_chosen(
        self, llama: Path, hessians: Measurements, tmp_path: Path
    ) -> None:
        found = advise(llama, hessians, budget="5bpw")
        assert found.methods == ("rtn", "gptq")
        by_name = {name: point.harm for name, point in found.uniform.items()}
        assert by_name["W4A16-g32 gptq"] < 0.8 * by_name["W4A16-g32 rtn"]
        assert "W4A16-g32 gptq" in found.counts()
        recipe = calipers.load_recipe(found.recipe.to_yaml())  # as a file has it
        done = calipers.quantize(llama, recipe, hessians, tmp_path / "out", progress=False)
        predicted = sum(each.loss for each in found.chosen.values())
        assert sum(each.loss for each in done.costs.values()) == pytest.approx(predicted)
        stored = stored_tensors(tmp_path / "out").items()
        sizes = [each.size for name, each in stored if name.rpartition(".")[0] in found.chosen]
        assert sum(sizes) == found.total.size

    def test_loss_counts_that_errors_make_up_for_each_other(
        self, llama: Path, hessians: Measurements, tmp_path: Path
    ) -> None:
        """Against ½ Σ Δᵀ F Δ in float64, F_ij = √(s_i s_j)·corr(x_i, x_j), of the checkpoint."""
        found = advise(llama, hessians, "W4A16-g32", methods="gptq")
        recipe = calipers.GPTQModifier(scheme="W4A16", ignore=["lm_head"])
        options: dict[str, Any] = {"progress": False, "group_size": 32}
        calipers.quantize(llama, recipe, hessians, tmp_path / "out", **options)
        model, other = _loaded(llama), _weights(tmp_path / "out")
        for each in found.predictions[:7]:
            assert (each.method, each.choice) == ("gptq", "W4A16-g32 gptq")
            module = model.get_submodule(each.module)
            x = _input_of(model, module).double().flatten(0, -2)
            products = x.T @ x
            energies = products.diagonal().sqrt()
            known = hessians.get(each.module, "weight", "sensitivity").fields()
            per_token = known["_sensitivity_sum"] / int(known["_sensitivity_count"])
            gains = per_token.sqrt() / energies
            lost = (other[each.module].double() - module.weight.detach().double()) * gains
            truth = float(torch.einsum("ri,ij,rj->", lost, products, lost)) / 2
            assert each.loss == pytest.approx(truth, rel=0.03)

    def test_without_hessians_weights_are_rounded_to_nearest(
        self, llama: Path, seen: Measurements
    ) -> None:
        assert advise(llama, seen).methods == ("rtn",)
        with pytest.raises(ConfigurationError, match="--collect hessian"):
            advise(llama, seen, methods="gptq")
        with pytest.raises(ConfigurationError, match="Did you mean 'gptq'"):
            advise(llama, seen, methods="gptg")

    def test_each_hessian_is_factorised_once_for_all_schemes(
        self, llama: Path, hessians: Measurements, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        done: list[torch.Tensor] = []

        def counted(hessian: torch.Tensor, *rest: Any) -> Any:
            done.append(hessian)
            return curvature(hessian, *rest)

        monkeypatch.setattr("calipers.solvers.gptq.curvature", counted)
        # By folds, each scheme would choose its own damping.
        whole = Measurements.of_tensors(hessians.info, hessians.tensors())
        advise(llama, whole, "W3A16-g32,W4A16-g32,W8A16-g32", methods="gptq")
        assert len(done) == 2 * 4  # layers, and the inputs of qkv, o, gate and up, and down

    def test_a_recipe_may_mix_methods(
        self, llama: Path, hessians: Measurements, tmp_path: Path
    ) -> None:
        names = [f"model.layers.{n}.mlp.{part}_proj" for n in (0, 1) for part in ("up", "down")]
        candidates = read_candidates(["W4A16-g32"], ("rtn", "gptq"), None, ["lm_head"])
        recipe = _recipe_of(candidates, dict(zip(names, (0, 1, 1, 0), strict=True)))
        assert recipe is not None
        done = calipers.quantize(llama, recipe, hessians, tmp_path / "out", progress=False)
        by_feedback = {m.name for m, tensor in done.plan if tensor.gathered is not None}
        assert by_feedback == {names[1], names[2]}
        assert set(done.plan.names) == set(names)


class TestGroupSizes:
    def test_groups_are_made_to_fit_each_weight(self, tmp_path: Path) -> None:
        """128 divides 256 columns, and not 192."""
        model = model_folder(tmp_path / "model", hidden_size=192)
        seen = calipers.measure(model, IDS, num_samples=2, progress=False)
        found = advise(model, seen, None, "6bpw")
        columns = {True: "W4A16", False: "W4A16-g64"}
        of_four_bits = [each for each in found.predictions if each.scheme.startswith("W4")]
        assert all(each.scheme == columns["down" in each.module] for each in of_four_bits)
        done = calipers.quantize(model, found.recipe, seen, tmp_path / "out", progress=False)
        sizes = {m.name: m.scheme.weights.group_size for m in done.plan.modules}
        assert {sizes[name] for name in sizes if "down" in name} == {128}
        assert {sizes[name] for name in sizes if "down" not in name} == {64}
        given = advise(model, seen, "W4A16,W8A8", group_size=32)
        assert {each.scheme for each in given.predictions} == {"W4A16-g32", "W8A8"}
        with pytest.raises(ConfigurationError, match=r"group_size.* has no meaning for W8A8"):
            advise(model, seen, "W8A8", group_size=32)

    def test_experts_have_one_size(self) -> None:
        (candidate,) = read_candidates(["W4A16"], ("rtn",), None, [])
        parts = {"gate": 192, "up": 192, "down": 256}
        columns = {f"0.experts.{n}.{part}_proj": parts[part] for n in (0, 1) for part in parts}
        fitted = candidate.fitted({**columns, "0.o_proj": 256})
        assert {fitted.scheme_of(name) for name in columns} == {"W4A16-g64"}
        assert fitted.scheme_of("0.o_proj") == "W4A16"

    def test_powers_of_two_come_first(self) -> None:
        (candidate,) = read_candidates(["W4A16"], ("rtn",), None, [])
        columns = {"576": 576, "1536": 1536, "96": 96, "7": 7}
        schemes = map(candidate.fitted(columns).scheme_of, columns)
        assert list(schemes) == ["W4A16-g64", "W4A16", "W4A16-g32", "W4A16"]


class TestTargets:
    def test_schemes_that_do_not_run_there_are_left_out(
        self, llama: Path, plain: Measurements
    ) -> None:
        found = advise(llama, plain, None, target="vllm-cpu")
        assert list(found.uniform) == ["W4A16", "W8A8", "UNQUANTIZED"]
        found = advise(llama, plain, "W4A16-g32,W8A16", target="vllm-cpu")
        assert (list(found.uniform), found.left_out) == (["W4A16-g32"], ("W8A16",))
        with pytest.raises(ConfigurationError, match=r"runs none of .*NVFP4A16.*W4A16"):
            advise(llama, plain, "NVFP4A16,UNQUANTIZED", target="vllm-cpu")
        with pytest.raises(ConfigurationError, match="vllm-cpu"):
            advise(llama, plain, target="vllm")


class TestPredictions:
    def test_output_errors_are_real(self, llama: Path, seen: Measurements, tmp_path: Path) -> None:
        """Predicted from E[x²]; measured by running the inputs through both weights."""
        found = advise(llama, seen, "W4A16-g32")
        calipers.quantize(llama, *_uniform(), seen, tmp_path / "out", progress=False, group_size=32)
        model, other = _loaded(llama), _weights(tmp_path / "out")
        for each in found.predictions[:7]:
            module = model.get_submodule(each.module)
            x, weight = _input_of(model, module).double(), module.weight.detach().double()
            lost = other[each.module].double() - weight
            real = float((x @ lost.T).norm() / (x @ weight.T).norm())
            assert each.error == pytest.approx(real, rel=0.35)

    def test_loss_is_half_of_what_sensitivity_weighs(
        self, llama: Path, seen: Measurements, tmp_path: Path
    ) -> None:
        found = advise(llama, seen, "W4A16-g32")
        calipers.quantize(llama, *_uniform(), seen, tmp_path / "out", progress=False, group_size=32)
        model, other = _loaded(llama), _weights(tmp_path / "out")
        for each in found.predictions[:3]:
            statistic = seen.get(each.module, "weight", "sensitivity")
            assert statistic is not None
            known = statistic.fields()
            per_token = known["_sensitivity_sum"] / int(known["_sensitivity_count"])
            weight = model.get_submodule(each.module).weight.detach().double()
            columns = (other[each.module].double() - weight).square().sum(0)
            assert each.loss == pytest.approx(float((columns * per_token).sum() / 2), rel=0.02)

    def test_static_int8_stays_away_from_massive_activations(self, tmp_path: Path) -> None:
        model = saved(massive_llama(torch.bfloat16), tmp_path / "model")
        seen = calipers.measure(model, samples(), num_samples=8, progress=False)
        found = advise(model, seen, "W8A8_STATIC,W8A16", budget="-25dB")
        static = {each.module: each.error for each in found.predictions if "A8" in each.scheme}
        assert max(static, key=lambda name: static[name]) == MASSIVE
        assert found.chosen[MASSIVE].scheme == "W8A16"

    def test_dynamic_inputs_lose_something(self, llama: Path, seen: Measurements) -> None:
        found = advise(llama, seen, "W8A16-g32,W8A8,FP8_DYNAMIC")
        errors = {scheme: [] for scheme in ("W8A16-g32", "W8A8", "FP8_DYNAMIC")}
        for each in found.predictions:
            errors[each.scheme].append(each.error)
        assert sum(errors["W8A16-g32"]) < sum(errors["W8A8"]) < sum(errors["FP8_DYNAMIC"])
        assert 0.02 < sum(errors["FP8_DYNAMIC"]) / len(errors["FP8_DYNAMIC"]) < 0.06


def _input_of(model: Any, module: torch.nn.Module) -> torch.Tensor:
    kept: list[torch.Tensor] = []
    hook = module.register_forward_pre_hook(lambda _, args: kept.append(args[0]))
    with torch.no_grad():
        model(input_ids=IDS)
    hook.remove()
    return kept[0]


def _uniform() -> tuple[Any]:
    solver = {"name": "optimal", "importance": "imatrix"}
    given: dict[str, Any] = {"ignore": ["lm_head"], "weight_observer": solver}
    return (calipers.QuantizationModifier(scheme="W4A16", **given),)


def _loaded(folder: Path) -> Any:
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    return model.eval()


def _weights(folder: Path) -> dict[str, torch.Tensor]:
    """What transformers makes of a checkpoint, decompressed."""
    config = CompressedTensorsConfig(run_compressed=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # that a config was passed
        model: Any = AutoModelForCausalLM.from_pretrained(folder, quantization_config=config)
    linear = {n: m for n, m in model.named_modules() if isinstance(m, torch.nn.Linear)}
    return {name: module.weight.detach() for name, module in linear.items()}


class TestPatterns:
    NAMES = (
        *(f"model.layers.{n}.self_attn.{p}_proj" for n in (0, 1, 12) for p in "qkvo"),
        *(f"model.layers.{n}.mlp.experts.{e}.up_proj" for n in (1, 2) for e in (0, 1)),
        "lm_head",
    )

    def test_they_match_these_and_no_others(self) -> None:
        chosen = [name for name in self.NAMES if ".1." in name or name == "lm_head"]
        chosen = [name for name in chosen if "experts" not in name or ".layers.1." in name]
        patterns = patterns_for(chosen)
        linear = torch.nn.Linear(1, 1)
        found = [n for n in self.NAMES if any(is_match(n, linear, p) for p in patterns)]
        assert found == chosen

    def test_experts_of_a_layer_go_together(self) -> None:
        groups = groups_of_one_scheme(self.NAMES)
        assert tuple(n for n in self.NAMES if ".layers.2.mlp." in n) in groups
        assert ("model.layers.12.self_attn.o_proj",) in groups


class TestBadInput:
    @pytest.mark.parametrize(
        ("schemes", "budget", "words"),
        [
            (SCHEMES, "2bpw", r"cannot be met: the nearest that can is 4\.\d+bpw"),
            (SCHEMES, "10B", "cannot be met: the nearest that can is .* bytes"),
            ("W4A16-g32", "1e-9nats", "cannot be met: the nearest that can is .*nats"),
            (SCHEMES, "much", "is no budget"),
            (SCHEMES, "-4bpw", "is no budget"),
            ("W4A17", None, "W4A1"),
            ("UNQUANTIZED", None, "no scheme to choose"),
            ("W4A16-g48", None, "48"),
        ],
    )
    def test_refused(
        self, schemes: str, budget: str, words: str, llama: Path, seen: Measurements
    ) -> None:
        with pytest.raises(calipers.CalipersError, match=words):
            advise(llama, seen, schemes, budget)

    def test_a_size_is_refused_before_anything_is_solved(
        self, llama: Path, seen: Measurements, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(Trial, "take", lambda *_: pytest.fail("solved"))
        for schemes in ("W4A16-g32,W8A8", "W8A8,UNQUANTIZED"):
            with pytest.raises(ConfigurationError, match="cannot be met: the nearest"):
                advise(llama, seen, schemes, "4bpw")

    def test_measurements_that_do_not_do(
        self, llama: Path, plain: Measurements, tmp_path: Path
    ) -> None:
        with pytest.raises(ConfigurationError, match="--collect sensitivity"):
            advise(llama, plain, budget="0.1nats")
        other = model_folder(tmp_path / "other", num_hidden_layers=1)
        with pytest.raises(MeasurementsError, match="of another model"):
            advise(other, plain)
        with pytest.raises(calipers.CalipersError):
            advise(llama, tmp_path)
