"""What a class of observers says of itself, before there is an observer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from compressed_tensors.quantization import QuantizationArgs

from calipers.errors import UnsuitableError
from calipers.numerics.formats import Format
from calipers.observers.definition import Definition
from calipers.observers.options import ObserverOptions, OptionAttributes, parse_options
from calipers.observers.registry import Registered
from calipers.solvers.importance import Importance, importance_named
from calipers.statistics.ranges import LastRange


class ObserverDeclaration(Registered, OptionAttributes):
    """Its name, its options, what it is made for and how errors count."""

    Options: ClassVar[type[ObserverOptions] | None] = None
    Range: ClassVar[type[LastRange]] = LastRange
    definition: ClassVar[Definition | None] = None
    """What the class is without objects; a subclass that has none of its own is shown tensors."""
    counts_values: ClassVar[bool] = False
    gathers_inputs: ClassVar[bool] = False
    chooses_global_scale: ClassVar[bool] = False
    """Whether it finds, by its ``solutions``, a better global scale than the usual one."""
    remembers: ClassVar[str] = ""
    when: ClassVar[str] = ""

    @classmethod
    def checked_options(
        cls, base_name: str, args: QuantizationArgs, given: Mapping[str, Any]
    ) -> ObserverOptions:
        """Return the options; refuse them, or a tensor that the observer is not made for."""
        fmt = Format.of(args)  # refuses what does not exist
        options = cls.parse_options(given)
        cls.check(base_name, args, options, fmt)
        return options

    @classmethod
    def parse_options(cls, given: Mapping[str, Any]) -> ObserverOptions:
        """Return the options that were given; a class that declares none takes any."""
        if cls.Options is not None:
            return parse_options(cls.Options, given, cls.registered_name())
        known = {key: value for key, value in given.items() if key in ObserverOptions.model_fields}
        return parse_options(ObserverOptions, known, cls.registered_name())

    @classmethod
    def check(
        cls, base_name: str, args: QuantizationArgs, options: ObserverOptions, fmt: Format
    ) -> None:
        """Refuse what the observer is not made for, by an ``UnsuitableError``."""

    @classmethod
    def suits(cls, base_name: str, args: QuantizationArgs) -> bool:
        """Whether the observer is made for such a tensor, with its options as they are at first."""
        if cls.gathers_inputs and base_name != "weight":
            return False
        try:
            cls.checked_options(base_name, args, {})
        except UnsuitableError:
            return False
        return True

    @classmethod
    def keeps_extrema(cls) -> bool:
        """Whether what it keeps of a tensor are its extrema, or the counts of its values as well.

        Where a subclass takes tensors in by a way of its own, nobody can tell.
        """
        return False

    @classmethod
    def importance_under(cls, base_name: str, options: ObserverOptions) -> Importance:
        """Return how errors count under some options."""
        name = cls.importance_name(options) if base_name == "weight" else "none"
        return importance_named(name, options.nonfinite)

    @classmethod
    def importance_name(cls, options: ObserverOptions) -> str:  # noqa: ARG003
        """Return the name of the importance by which the errors of a weight are counted."""
        return "none"

    @classmethod
    def label_of(cls, base_name: str, module_name: str = "") -> str:
        """Return how messages call an observer of this class."""
        of = f" of {module_name}" if module_name else ""
        return f"Observer '{cls.registered_name()}' ({base_name}{of})"
