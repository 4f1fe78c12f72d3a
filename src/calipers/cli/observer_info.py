"""What observers say of themselves: their docstrings, declarations and options."""

from __future__ import annotations

import inspect
from dataclasses import asdict, dataclass
from typing import Any, Literal, get_args, get_origin

from compressed_tensors.quantization import QuantizationArgs
from pydantic import AfterValidator
from pydantic.fields import FieldInfo

from calipers.observers import Observer
from calipers.observers.options import ObserverOptions
from calipers.registry import Registry

_TENSORS = {
    "weight": "weights",
    "input": "inputs",
    "output": "outputs",
    "q": "queries",
    "k": "keys",
    "v": "values",
}


@dataclass(frozen=True)
class ObserverInfo:
    """What there is to say about an observer.

    :param aliases: what else it is called in recipes
    :param does: the first line of its docstring
    :param merges: whether what two of them saw can be put together
    :param options: name, type, default and meaning of each
    """

    name: str
    aliases: tuple[str, ...]
    does: str
    remembers: str
    when: str
    watches: tuple[str, ...]
    merges: str
    options: tuple[dict[str, Any], ...]
    example: str

    @classmethod
    def of(cls, observer: type[Observer]) -> ObserverInfo:
        """Ask a class about itself."""
        name, options = observer.registered_name(), observer.Options or ObserverOptions
        args = QuantizationArgs(num_bits=8, strategy="tensor")
        return cls(
            name=name,
            aliases=tuple(alias for alias, of in observer.registry.aliases().items() if of == name),
            does=inspect.cleandoc(observer.__doc__ or "").partition("\n")[0].replace("``", "`"),
            remembers=observer.remembers,
            when=observer.when,
            watches=tuple(word for name, word in _TENSORS.items() if observer.suits(name, args)),
            merges=_merges(observer),
            options=tuple(
                {
                    "name": option,
                    "type": _type(field),
                    "default": field.default,
                    "meaning": _meaning(options, option),
                }
                for option, field in options.model_fields.items()
            ),
            example=_example(name, observer.when),
        )

    def as_dict(self) -> dict[str, Any]:
        """Return everything as plain data."""
        return asdict(self)


def _merges(observer: type[Observer]) -> str:
    kept = [each for each in observer.kept().values() if not each.is_mergeable]
    if not kept:
        return "yes: the order and the cutting of the data do not matter"
    if observer.gathers_inputs:
        return "the sums of inputs do, until a weight is observed"
    return f"no: it keeps the {kept[0].value.removesuffix(' only')}"


def _type(field: FieldInfo) -> str:
    """Return the type of an option in words, with what is allowed."""
    if get_origin(field.annotation) is Literal:
        return " or ".join(map(str, get_args(field.annotation)))
    words: list[str] = [getattr(field.annotation, "__name__", str(field.annotation))]
    for rule in field.metadata:
        if isinstance(rule, Registry):
            return " or ".join(rule.names())
        if isinstance(rule, AfterValidator):
            words.append(rule.func.__doc__ or "")
        elif hasattr(rule, "ge"):
            words.append(f">= {rule.ge}")
        elif hasattr(rule, "le"):
            words.append(f"<= {rule.le}")
    return ", ".join(words)


def _meaning(kind: type[ObserverOptions], name: str) -> str:
    """Return the description of an option, which a class may take from one of its bases."""
    fields = (base.model_fields.get(name) for base in kind.__mro__ if hasattr(base, "model_fields"))
    return next((field.description for field in fields if field and field.description), "")


def _example(name: str, when: str) -> str:
    weights = when.startswith("weights")
    scheme = "NVFP4A16" if "NVFP4" in when else "W4A16" if weights else "FP8"
    option = "--observer" if weights else "--activation-observer"
    return f"calipers quantize demo --scheme {scheme} {option} {name} --data demo -o demo-{name}"
