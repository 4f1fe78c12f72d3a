"""Errors and warnings: a few classes, by what a caller would catch and by exit code.

Each holds what it says in parts (:class:`Context`), of which the message is made in one place. An
error that one file raises is made there; what several files say is a function here. An option is
named as an :class:`Option`, which Python and the command line each spell in their own way:

>>> hint = "Choose another one, or pass " + Option("overwrite", True) + " to replace it."
>>> raise CheckpointExistsError("exists already", subject="The output folder 'out'", hint=hint)
Traceback (most recent call last):
calipers.errors.base.CheckpointExistsError: The output folder 'out' exists already. Choose another
one, or pass overwrite=True to replace it.
"""

from calipers.errors.base import (
    CalipersError,
    CalipersWarning,
    CheckpointError,
    CheckpointExistsError,
    ConfigurationError,
    Context,
    DataError,
    Fields,
    MeasurementsError,
    ModelLoadError,
    ModelRunError,
    TensorValueError,
    text_of,
)
from calipers.errors.calibration import (
    FusedExpertsError,
    RankError,
    UnseenModulesError,
    cannot_unfuse,
)
from calipers.errors.checkpoint import (
    cannot_load,
    cannot_write,
    cannot_write_file,
    damaged_file,
    damaged_measurements,
    file_in_use,
    inside_source,
    pickled_weights,
    would_replace,
)
from calipers.errors.data import (
    check_whole_number,
    empty_data,
    no_meaning,
    not_allowed,
    several_splits,
    unreadable_record,
)
from calipers.errors.formatting import (
    counted,
    first_line,
    format_size,
    group_sizes_for,
    in_one_line,
    listing,
    nearest,
    printable,
    shortened,
    sizes_that_divide,
)
from calipers.errors.libraries import (
    library_errors,
)
from calipers.errors.mistakes import Mistakes, SeveralMistakesError
from calipers.errors.observing import (
    ImportanceError,
    ImportanceUnsupportedError,
    LayoutError,
    MergeError,
    NoStatisticsError,
    TensorKindError,
    UnknownObserverError,
    UnsuitableError,
    different_configurations,
    mask_of_scores,
    no_statistics,
    not_finite,
    unsupported_format,
    weight_gone,
)
from calipers.errors.recipes import (
    CodeNotAllowedError,
    RecipeError,
    code_not_allowed,
    tensor_of,
    unfit,
)
from calipers.errors.text import (
    ANY,
    Call,
    Option,
    Spelling,
    Text,
    Words,
    joined,
)

__all__ = [
    "ANY",
    "CalipersError",
    "CalipersWarning",
    "Call",
    "CheckpointError",
    "CheckpointExistsError",
    "CodeNotAllowedError",
    "ConfigurationError",
    "Context",
    "DataError",
    "Fields",
    "FusedExpertsError",
    "ImportanceError",
    "ImportanceUnsupportedError",
    "LayoutError",
    "MeasurementsError",
    "MergeError",
    "Mistakes",
    "ModelLoadError",
    "ModelRunError",
    "NoStatisticsError",
    "Option",
    "RankError",
    "RecipeError",
    "SeveralMistakesError",
    "Spelling",
    "TensorKindError",
    "TensorValueError",
    "Text",
    "UnknownObserverError",
    "UnseenModulesError",
    "UnsuitableError",
    "Words",
    "cannot_load",
    "cannot_unfuse",
    "cannot_write",
    "cannot_write_file",
    "check_whole_number",
    "code_not_allowed",
    "counted",
    "damaged_file",
    "damaged_measurements",
    "different_configurations",
    "empty_data",
    "file_in_use",
    "first_line",
    "format_size",
    "group_sizes_for",
    "in_one_line",
    "inside_source",
    "joined",
    "library_errors",
    "listing",
    "mask_of_scores",
    "nearest",
    "no_meaning",
    "no_statistics",
    "not_allowed",
    "not_finite",
    "pickled_weights",
    "printable",
    "several_splits",
    "shortened",
    "sizes_that_divide",
    "tensor_of",
    "text_of",
    "unfit",
    "unreadable_record",
    "unsupported_format",
    "weight_gone",
    "would_replace",
]
