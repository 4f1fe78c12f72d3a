"""The arguments and options that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer


def _whole_number(text: str) -> Any:
    """Read a number; what is none is passed on, and refused with everything else that is wrong."""
    try:
        return int(text)
    except ValueError:
        return text


Model = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="The folder or the name of a Hugging Face model, or a .gguf file; 'demo' is the one "
        "that ships.",
    ),
]
Scheme = Annotated[
    str | None,
    typer.Option("--scheme", "-s", metavar="NAME", help="A preset; see 'calipers schemes'."),
]
RecipeFile = Annotated[
    Path | None,
    typer.Option("--recipe", "-r", metavar="FILE", help="A recipe in YAML, instead of --scheme."),
]
WeightObserver = Annotated[
    str | None,
    typer.Option(
        "--observer",
        "--weight-observer",
        metavar="NAME[,OPTION=VALUE…]",
        help="Who watches the weights, such as optimal,importance=hessian; "
        "see 'calipers observers'.",
    ),
]
ActivationObserver = Annotated[
    str | None,
    typer.Option(
        "--activation-observer",
        metavar="NAME[,OPTION=VALUE…]",
        help="Who watches static activations.",
    ),
]
Method = Annotated[
    str | None,
    typer.Option(
        "--method",
        metavar="NAME",
        help="How weights are rounded: rtn, each to nearest; gptq, with error feedback, which "
        "needs data.  [default: rtn, or as the recipe says]",
        show_default=False,
    ),
]
GroupSize = Annotated[
    int | None,
    typer.Option(
        "--group-size",
        metavar="N",
        parser=_whole_number,
        help="How many weights share a scale, where the scheme or recipe has groups.",
    ),
]
Dtype = Annotated[
    str,
    typer.Option(
        "--dtype",
        metavar="NAME",
        help="In which the model computes while data runs: float32, bfloat16, float16; auto: its "
        "own, or float32 on a CPU without instructions for that. Nothing is stored in it.",
    ),
]
Ignored = Annotated[
    list[str] | None,
    typer.Option(
        "--ignore",
        metavar="NAME",
        help="A module, a class or a re: pattern that stays as it is; again for more.  "
        "[default: lm_head]",
    ),
]
Data = Annotated[
    str | None,
    typer.Option(
        "--data",
        "-d",
        metavar="FILE|NAME",
        help="Text, .jsonl, .json, .parquet, a folder of data, or a data set on the hub: "
        "ORG/NAME[@CONFIG][:SPLIT]; '-' is standard input, 'demo' the standard library of this "
        "Python.",
    ),
]
TextColumn = Annotated[
    str | None,
    typer.Option("--text-column", metavar="NAME", help="The column of the text, of several."),
]
Mask = Annotated[
    str | None,
    typer.Option(
        "--mask",
        metavar="NAME",
        help="Which tokens count, of data that marks them: assistant, by assistant_masks, "
        "loss_mask, labels of -100, or the chat template.  [default: all]",
        show_default=False,
    ),
]
Tokenizer = Annotated[
    str | None,
    typer.Option("--tokenizer", metavar="PATH", help="The tokenizer, if not beside the model."),
]
BatchSize = Annotated[
    int | None,
    typer.Option(
        "--batch-size",
        metavar="N",
        parser=_whole_number,
        help="Samples per batch. Default: 1; for --method gptq, samples of like length together.",
    ),
]
Samples = Annotated[
    int,
    typer.Option("--samples", metavar="N", parser=_whole_number, help="How many samples to take."),
]
SeqLen = Annotated[
    int | None,
    typer.Option(
        "--seq-len",
        metavar="N",
        parser=_whole_number,
        help="The longest sample, in tokens.  [default: 2048, or the context of the model]",
        show_default=False,
    ),
]
Skip = Annotated[
    int,
    typer.Option(
        "--skip",
        metavar="N",
        parser=_whole_number,
        help="Pass over the first N samples: those that another run took from the same data.",
    ),
]
Packing = Annotated[
    bool | None,
    typer.Option(
        "--packing/--no-packing",
        help="Join texts and cut the whole into samples of equal length.  "
        "[default: for text files and demo]",
        show_default=False,
    ),
]
Seed = Annotated[
    int,
    typer.Option("--seed", metavar="N", parser=_whole_number, help="Of the choice of samples."),
]
Device = Annotated[
    str | None, typer.Option("--device", metavar="NAME", help="Where to compute, such as cuda:0.")
]
TrustRemoteCode = Annotated[
    bool, typer.Option("--trust-remote-code", help="Let code that comes with the model run.")
]

AllowCode = Annotated[
    bool,
    typer.Option("--allow-code", help="Let observers in files, FILE.py:CLASS, run their code."),
]


def observer_choice(text: str | None) -> dict[str, Any] | None:
    """Read an observer with its options.

    >>> observer_choice("optimal,importance=hessian,shortlist=8")
    {'name': 'optimal', 'importance': 'hessian', 'shortlist': 8}
    """
    if text is None:
        return None
    import yaml

    from calipers.errors import ConfigurationError

    name, *rest = (part.strip() for part in text.split(","))
    options = {}
    for part in rest:
        key, equals, value = part.partition("=")
        if not (key and equals):
            problem = f"'{part}' in '{text}' is no option of an observer"
            raise ConfigurationError(problem, hint="Give NAME=VALUE.")
        options[key.strip()] = yaml.safe_load(value)
    return {"name": name, **options}


AllExperts = Annotated[
    bool,
    typer.Option(
        "--calibrate-all-experts", help="Let experts see all tokens, not only those sent to them."
    ),
]
ShareInputs = Annotated[
    bool,
    typer.Option(
        "--share-inputs/--no-share-inputs",
        help="Measure a tensor that several modules read once for all.",
    ),
]
