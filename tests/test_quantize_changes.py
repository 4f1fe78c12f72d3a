"""Steps that change tensors, in memory and from disk to disk."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from quantizing import (
    IDS,
    both,
    model_folder,
    modifier,
    quantize,
)

import calipers
from calipers.checkpoint.headers import stored_tensors
from calipers.checkpoint.reader import load_model
from calipers.engine.quantize import CheckpointSink, prepare_model
from calipers.errors import ConfigurationError
from calipers.planning.plan import StepPlan
from calipers.planning.specs import SQUARES, Requirement
from calipers.recipes import load_recipe
from calipers.runtime.progress import Progress
from calipers.statistics.sums import SquareSums
from calipers.steps import Modifier
from calipers.steps.base import Changes

pytestmark = pytest.mark.filterwarnings("ignore::calipers.errors.CalipersWarning")


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model_folder(tmp_path_factory.mktemp("llama") / "model")


NORM, HEAD = "model.layers.1.input_layernorm", "lm_head"
UP = "model.layers.1.mlp.up_proj"


class Changing(Modifier):
    """A step that answers what it is told to, as soon as it is given the module."""

    module: str
    changes: Any
    claims: str = "changed"

    def plan(self, model: torch.nn.Module, step: str) -> StepPlan:  # noqa: ARG002
        if self.claims == "measured":
            wanted = Requirement("input", SQUARES, lambda _: SquareSums(), is_optional=True)
            return StepPlan(measured={self.module: (wanted,)})
        return StepPlan(changed=(self.module,) if self.claims == "changed" else ())

    def solve(self, layer: Any) -> Changes:
        if self.claims != "nothing" and self.module not in layer.names:
            return Changes()
        return Changes(**self.changes(layer))


def scaled(module: str, tensor: str, factor: float) -> Any:
    return lambda layer: {
        "tensors": {(module, tensor): factor * layer.tensor(module, tensor).detach()}
    }


class TestStepsThatChangeTensors:
    @pytest.mark.parametrize(
        ("family", "module", "tensor", "claims"),
        [
            ("llama", NORM, "weight", "changed"),
            ("llama", NORM, "weight", "measured"),
            ("llama", UP, "weight", "changed"),  # which is quantized, too
            ("llama", "model.norm", "weight", "changed"),
            ("llama", "model.embed_tokens", "weight", "changed"),
            ("llama tied", "model.embed_tokens", "weight", "changed"),
            ("llama tied", HEAD, "weight", "changed"),  # stored as the embedding, far before it
            ("qwen2", "model.layers.0.self_attn.q_proj", "bias", "changed"),
        ],
    )
    def test_both_ways_store_the_same(
        self, tmp_path: Path, family: str, module: str, tensor: str, claims: str
    ) -> None:
        model = model_folder(tmp_path / "model", family)
        step = Changing(module=module, changes=scaled(module, tensor, 2), claims=claims)
        data = {"measurements": calipers.measure(model, IDS, progress=False)}
        options: dict[str, Any] = data if claims == "measured" else {}
        recipe = [step, modifier("W4A16")]
        both(model, recipe, tmp_path, IDS if options else None, **options)
        if module == UP:
            return
        place = f"{module}.{tensor}".replace(HEAD, "model.embed_tokens" if "tied" in family else "")
        before, after = (stored_tensors(tmp_path / n)[place].read() for n in ("model", "disk"))
        assert torch.equal(after, 2 * before)

    def test_later_steps_and_errors_see_the_new_weight(self, llama: Path, tmp_path: Path) -> None:
        recipe = [Changing(module=UP, changes=scaled(UP, "weight", 0)), modifier("W4A16")]
        here = quantize(llama, recipe, tmp_path / "out")
        assert here.errors[UP] == 0 < here.errors[UP.replace("up", "gate")]

    def test_attributes_are_published_and_stored_nowhere(self, llama: Path, tmp_path: Path) -> None:
        step = Changing(module=UP, changes=lambda _: {"published": {UP: {"_mark": torch.ones(3)}}})
        recipe = [step, modifier("W4A16")]
        both(llama, recipe, tmp_path)
        prepared = prepare_model(llama, load_recipe(recipe), None)
        for _ in CheckpointSink(prepared, Progress(False)).tensors({}):
            pass
        assert torch.equal(prepared.model.get_submodule(UP)._mark, torch.ones(3))

    @pytest.mark.parametrize("way", ["memory", "disk"])
    @pytest.mark.parametrize(
        ("changes", "claims", "told"),
        [
            (
                scaled(NORM, "weight", 2),
                "nothing",
                f"changes '{NORM}.weight', but it was not given",
            ),
            (
                lambda _: {"tensors": {("model.nowhere", "weight"): torch.ones(1)}},
                "changed",
                "changes 'model.nowhere.weight', but LlamaForCausalLM has no such module",
            ),
            (
                lambda _: {"tensors": {(NORM, "bias"): torch.ones(1)}},
                "changed",
                f"changes '{NORM}.bias', but LlamaRMSNorm has no such tensor. Allowed: weight",
            ),
            (
                lambda _: {"tensors": {(NORM, "weight"): torch.ones(3)}},
                "changed",
                f"'{NORM}.weight' to a value of another form: torch.float32 of shape (3). It must "
                "be torch.bfloat16 of shape (128)",
            ),
            (
                lambda _: {"qparams": {(NORM, "weight"): {"scale": torch.ones(1)}}},
                "changed",
                f"finds parameters of '{NORM}.weight', which it did not plan to quantize",
            ),
            (
                lambda _: {"published": {NORM: {"weight": torch.ones(1)}}},
                "changed",
                f"publishes '{NORM}.weight', which is a tensor of the module",
            ),
        ],
    )
    def test_what_does_not_fit_names_step_and_tensor(
        self, llama: Path, tmp_path: Path, way: str, changes: Any, claims: str, told: str
    ) -> None:
        recipe = [Changing(module=NORM, changes=changes, claims=claims), modifier("W4A16")]
        model = load_model(llama) if way == "memory" else llama
        run = calipers.oneshot if way == "memory" else calipers.quantize
        with pytest.raises(ConfigurationError, match=re.escape(told)) as error:
            run(model, recipe, output_dir=tmp_path / "out", progress=False)
        assert "Changing (number 1 of stage 'default')" in str(error.value)
        assert not (tmp_path / "out").exists()
