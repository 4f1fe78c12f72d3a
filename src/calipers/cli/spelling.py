"""How the command line spells what messages name: options of functions, and calls."""

from __future__ import annotations

from calipers.errors import Call, Option
from calipers.options import (
    KEYWORDS,
    CalibrationOptions,
    ComputeOptions,
    DataOptions,
    OutputOptions,
    RecipeOptions,
)

FLAGS = {
    option: flags[0].partition("/")[0]
    for group in (DataOptions, ComputeOptions, CalibrationOptions, RecipeOptions, OutputOptions)
    for option, flags in group.flags().items()
}
FLAGS |= {keyword: FLAGS[option] for keyword, option in KEYWORDS.items()}
FLAGS |= {"dataset": "--data", "output_file": "--output", "solvers": "--solver"}
FLAGS |= {
    name: f"--{name.replace('_', '-')}"
    for name in (
        *("advice", "budget", "collect", "evaluation", "layers", "measurements", "save_every"),
        *("schemes", "source", "target"),
    )
}
"""Options of functions → options of commands; others have no meaning there."""

_COMMANDS = {"plan.table": "calipers plan"}


def as_typed(term: Option | Call) -> str:
    """Spell an option or a call as it is typed at a command line; in Python, if it cannot be.

    >>> as_typed(Option("overwrite", True)), as_typed(Option("max_seq_length", 128))
    ('--overwrite', '--seq-len 128')
    >>> as_typed(Option("share_inputs", False)), as_typed(Option("padding_side", "up"))
    ('--no-share-inputs', "padding_side='up'")
    """
    if isinstance(term, Call):
        return _COMMANDS.get(term.name, str(term))
    flag = FLAGS.get(term.name)
    if flag is None:
        return str(term)
    if not term.has_value or term.value is True:
        return flag
    if term.value is False:
        return f"--no-{flag.removeprefix('--')}"
    return f"{flag} {term.value}"
