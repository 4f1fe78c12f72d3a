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

from calipers.errors.base import CalipersError as CalipersError
from calipers.errors.base import CalipersWarning as CalipersWarning
from calipers.errors.base import CheckpointError as CheckpointError
from calipers.errors.base import CheckpointExistsError as CheckpointExistsError
from calipers.errors.base import CodeNotAllowedError as CodeNotAllowedError
from calipers.errors.base import ConfigurationError as ConfigurationError
from calipers.errors.base import Context as Context
from calipers.errors.base import DataError as DataError
from calipers.errors.base import Fields as Fields
from calipers.errors.base import FusedExpertsError as FusedExpertsError
from calipers.errors.base import ImportanceError as ImportanceError
from calipers.errors.base import ImportanceUnsupportedError as ImportanceUnsupportedError
from calipers.errors.base import LayoutError as LayoutError
from calipers.errors.base import MeasurementsError as MeasurementsError
from calipers.errors.base import MergeError as MergeError
from calipers.errors.base import Mistakes as Mistakes
from calipers.errors.base import ModelLoadError as ModelLoadError
from calipers.errors.base import ModelRunError as ModelRunError
from calipers.errors.base import NoStatisticsError as NoStatisticsError
from calipers.errors.base import RankError as RankError
from calipers.errors.base import RecipeError as RecipeError
from calipers.errors.base import SeveralMistakesError as SeveralMistakesError
from calipers.errors.base import TensorKindError as TensorKindError
from calipers.errors.base import TensorValueError as TensorValueError
from calipers.errors.base import UnknownObserverError as UnknownObserverError
from calipers.errors.base import UnseenModulesError as UnseenModulesError
from calipers.errors.base import UnsuitableError as UnsuitableError
from calipers.errors.base import library_errors as library_errors
from calipers.errors.base import text_of as text_of
from calipers.errors.messages import cannot_load as cannot_load
from calipers.errors.messages import cannot_unfuse as cannot_unfuse
from calipers.errors.messages import cannot_write as cannot_write
from calipers.errors.messages import cannot_write_file as cannot_write_file
from calipers.errors.messages import check_whole_number as check_whole_number
from calipers.errors.messages import code_not_allowed as code_not_allowed
from calipers.errors.messages import damaged_file as damaged_file
from calipers.errors.messages import damaged_measurements as damaged_measurements
from calipers.errors.messages import different_configurations as different_configurations
from calipers.errors.messages import empty_data as empty_data
from calipers.errors.messages import file_in_use as file_in_use
from calipers.errors.messages import inside_source as inside_source
from calipers.errors.messages import mask_of_scores as mask_of_scores
from calipers.errors.messages import no_effect as no_effect
from calipers.errors.messages import no_meaning as no_meaning
from calipers.errors.messages import no_statistics as no_statistics
from calipers.errors.messages import not_allowed as not_allowed
from calipers.errors.messages import not_finite as not_finite
from calipers.errors.messages import several_splits as several_splits
from calipers.errors.messages import tensor_of as tensor_of
from calipers.errors.messages import unfit as unfit
from calipers.errors.messages import unreadable_record as unreadable_record
from calipers.errors.messages import unsupported_format as unsupported_format
from calipers.errors.messages import weight_gone as weight_gone
from calipers.errors.messages import would_replace as would_replace
from calipers.errors.text import ANY as ANY
from calipers.errors.text import Call as Call
from calipers.errors.text import Option as Option
from calipers.errors.text import Text as Text
from calipers.errors.text import counted as counted
from calipers.errors.text import first_line as first_line
from calipers.errors.text import format_size as format_size
from calipers.errors.text import group_sizes_for as group_sizes_for
from calipers.errors.text import in_one_line as in_one_line
from calipers.errors.text import joined as joined
from calipers.errors.text import listing as listing
from calipers.errors.text import nearest as nearest
from calipers.errors.text import printable as printable
from calipers.errors.text import shortened as shortened
from calipers.errors.text import sizes_that_divide as sizes_that_divide
