"""``calipers schemes``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated

import typer

from calipers.cli.app import CommandOutput
from calipers.cli.rendering import facts_table, table

if TYPE_CHECKING:
    from rich.console import RenderableType

Name = Annotated[
    str | None,
    typer.Argument(metavar="NAME", help="The preset to tell all about."),
]


def schemes(name: Name = None) -> CommandOutput:
    """List the presets and when to use each, or show one.

    Example: calipers schemes NVFP4
    """
    from calipers.engine.presets import PresetInfo, preset_names, targets_text

    if name is not None:
        preset = PresetInfo.of(name)
        facts = {
            "name": preset.name,
            "weights": preset.weights,
            "activations": preset.activations,
            "bits": f"{preset.bits:.4g} per weight, scales included",
            "data": "needed, for activations" if preset.needs_data else "not needed",
            "runs on": targets_text(preset.runs_on),
            "when": preset.when,
        }
        note = "The same as a recipe, to be changed and given with --recipe:"
        return CommandOutput(
            preset.as_dict(), [facts_table(facts), "", f"{note}\n\n{preset.recipe}"]
        )
    presets = [PresetInfo.of(each) for each in preset_names()]
    columns = ("name", "weights", "activations", "bits", "data", "vLLM", "when to use it")
    rows = table(*columns, numbers=("bits",), wrapped=("activations", "when to use it"))
    for each in presets:
        data, bits = "yes" if each.needs_data else "no", f"{each.bits:.4g}"
        where = _in_vllm(each.runs_on)
        rows.add_row(each.name, each.weights, each.activations, bits, data, where, each.when)
    view: list[RenderableType] = [
        rows,
        "bits: per weight in the checkpoint, scales included (a layer of 4096 × 4096, bfloat16)",
        "data: whether activations must be measured; some observers of weights want data, too",
        "vLLM: whether its CPU backend runs it, and from which compute capability on its CUDA "
        "backend does; transformers runs all",
        "static or dynamic: dynamic activations are the safer choice, since each token finds its "
        "own scale while the model runs;\n  a static scale is measured once for all tokens, and "
        "one with large values, as most models have, costs the others their precision",
        "More about one: calipers schemes NAME",
    ]
    return CommandOutput([preset.as_dict() for preset in presets], view)


def _in_vllm(targets: Mapping[str, str]) -> str:
    """Say where vLLM runs a preset, in few letters.

    >>> _in_vllm({"transformers": "", "vllm-cpu": "", "vllm-cuda": "7.5"}), _in_vllm({})
    ('CPU, 7.5', '–')
    """
    cpu, cuda = targets.get("vllm-cpu"), targets.get("vllm-cuda")
    told = [] if cpu is None else [f"CPU {cpu}".strip()]
    told += [] if cuda is None else [cuda or "CUDA"]
    return ", ".join(told) or "–"
