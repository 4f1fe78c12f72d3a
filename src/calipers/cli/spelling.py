"""How the command line spells what messages name: options of functions, and calls."""

from __future__ import annotations

from calipers.errors import Call, Option

FLAGS = {
    "dataset": "--data",
    "num_calibration_samples": "--samples",
    "num_samples": "--samples",
    "max_seq_length": "--seq-len",
    "output_dir": "--output",
    "output_file": "--output",
    "solvers": "--solver",
    "weight_observer": "--observer",
    **{
        name: f"--{name.replace('_', '-')}"
        for name in (
            *("activation_observer", "allow_code", "batch_size", "calibrate_all_experts"),
            *("advice", "budget", "collect", "evaluation", "measurements", "save_every"),
            *("schemes", "target"),
            *("source",),
            *("device", "dtype", "group_size", "layers", "max_shard_size", "method"),
            *("on_unseen", "overwrite", "packing", "pipeline", "seed", "share_inputs", "skip"),
            *("mask", "text_column", "tokenizer", "trust_remote_code"),
        )
    },
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
