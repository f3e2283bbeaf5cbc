"""Turn pydantic's errors into sentences that tell the user which values a key accepts."""

import contextlib
import json
import reprlib
import types
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt, MaxLen, MinLen
from pydantic import BaseModel, Field, TypeAdapter, ValidationError
from pydantic_core import ErrorDetails

from fourfold.parsing import parse_toml

NAMES = {int: "integer", float: "number", str: "string", bool: "`true` or `false`"}
SIGNS = {Gt: (">", "gt"), Ge: ("≥", "ge"), Lt: ("<", "lt"), Le: ("≤", "le")}
SIMPLE: tuple[Any, ...] = (1, 0.5, 2.0, "name", ["name"], [1], [])
"""Values to suggest for keys that have neither an example nor a default."""
PATTERN = "string_pattern_mismatch"
"""pydantic's error type for a string that does not match its pattern. Only run names have a pattern."""


@dataclass(frozen=True)
class Key:
    """A key of a schema, such as the run file's schema, or an item of a list that is a key's value."""

    place: str
    """Dotted name of the key."""
    annotation: Any
    """Type of the key's value."""
    metadata: list[Any]
    """Bounds of the value, from pydantic's field."""
    samples: list[Any]
    """Example values, followed by the default. The default may be a placeholder for "unset" that the schema refuses.
    """

    def example(self, given: Any) -> Any:
        """Return a valid value for an error message to suggest. Prefer values similar to ``given``, the user's value.
        Return None if no valid value is known."""
        annotated: Any = Annotated[self.annotation, Field(), *self.metadata]
        schema: TypeAdapter[Any] = TypeAdapter(annotated)
        for candidate in (*_respelled(given, section_of(self.annotation)), *self.samples, *SIMPLE):
            if isinstance(candidate, dict) and candidate in self.samples:
                return candidate  # Keys may be missing here, because a preset adds them later.
            if isinstance(candidate, BaseModel):
                return {name: value for name, value in candidate if value is not None and type(value) in NAMES}
            if candidate is not None and (type(candidate), candidate) != (type(given), given):
                try:
                    schema.validate_python(candidate, strict=True)
                except ValidationError:
                    continue
                return candidate
        return None


def key_at(schema: type[BaseModel], location: tuple[int | str, ...]) -> Key:
    """Return the key at the location of a pydantic error.

    If the type of a key is a union, pydantic adds the name of one of its types to the location. This name is ignored.
    """
    annotation: Any = schema
    key = Key("", schema, [], [])
    for part in location:
        section = section_of(annotation)
        if isinstance(part, int):
            items = [
                get_args(kind)[0] for kind in (annotation, *get_args(annotation)) if get_origin(kind) in (list, tuple)
            ]
            default = next((sample for sample in key.samples if isinstance(sample, (list, tuple))), ())
            key = Key(f"{key.place}.{part}", items[0], [], list(default[part : part + 1]))
        elif section is not None and part in section.model_fields:
            field = section.model_fields[part]
            samples = [*(field.examples or []), None if field.is_required() else field.default]
            key = Key(f"{key.place}.{part}".lstrip("."), field.annotation, field.metadata, samples)
        else:
            break
        annotation = key.annotation
    return key


def mistake(error: ErrorDetails, schema: type[BaseModel]) -> str:
    """Return the message for a pydantic error. The message names the key, its value, and what the value must be. If a
    value that works is known, the message also suggests this value."""
    key = key_at(schema, error["loc"])
    reason = f"must be {_with_article(type_name(key.annotation, key.metadata))}".replace("`", "").replace('"', "'")
    if error["type"] == "value_error":
        reason = str(error["ctx"]["error"])
        if (section := section_of(key.annotation)) is not None:
            is_key = reason.partition(" ")[0] in section.model_fields
            return f"{key.place}.{reason}" if key.place and is_key else reason
    elif error["type"] == PATTERN:
        reason = "must consist of letters, digits, '.', '_', and '-', and must not begin with '.'"
    example = key.example(None if error["type"] == "missing" else error["input"])
    if example is not None and not reason.startswith("must be '") and "true or false" not in reason:
        reason += f", such as {shown(example)}"
    if error["type"] == "missing":
        return f"'{key.place}' is missing; it {reason}"
    return f"{key.place} = {shown(error['input'])}: {reason}"


def section_of(annotation: Any) -> type[BaseModel] | None:
    """Return the class of the section in a type annotation, such as ``Section`` in ``list[Section]`` or ``Section |
    None``. Return None if the annotation has no section."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next((model for arg in get_args(annotation) if (model := section_of(arg))), None)


def shown(value: Any) -> str:
    """Return a value as TOML text for a message. Long values are shortened."""
    return _TOML.repr(value.model_dump(exclude_unset=True) if isinstance(value, BaseModel) else value)


class _Toml(reprlib.Repr):
    def repr_bool(self, value: bool, level: int) -> str:
        return str(value).lower()

    def repr_tuple(self, value: tuple[Any, ...], level: int) -> str:
        return self.repr_list(list(value), level)

    def repr_dict(self, value: dict[Any, Any], level: int) -> str:
        pairs = [f"{key} = {self.repr1(item, level - 1)}" for key, item in islice(value.items(), self.maxdict)]
        return f"{{ {', '.join(pairs)} }}" if level and pairs else "{}"


_TOML = _Toml()
_TOML.maxstring = _TOML.maxother = 60


def _respelled(given: Any, section: type[BaseModel] | None) -> Iterator[Any]:
    """Yield values that the user may have meant.

    - For text such as "3": the value that the text is in TOML, such as 3.
    - For text instead of a section: a section that has the text as the value of its only required key.
    - For a whole float: an integer.
    - For a single value: a list with this value.
    """
    if isinstance(given, str):
        with contextlib.suppress(ValueError):
            yield parse_toml(f"value = {given}")["value"]
        required = [] if section is None else [k for k, field in section.model_fields.items() if field.is_required()]
        if len(required) == 1:
            yield from ({required[0]: given}, [{required[0]: given}])
    elif isinstance(given, float) and given.is_integer():
        yield int(given)
    if isinstance(given, (str, int)) and not isinstance(given, bool):
        yield [given]


def type_name(annotation: Any, metadata: Sequence[Any] = ()) -> str:
    """Return a description of a type and of the bounds in ``metadata``, such as "integer ≥ 1"."""
    limits, lengths = [], []
    for bound in (bound for given in metadata for bound in getattr(given, "metadata", [given])):
        if type(bound) in SIGNS:
            sign, name = SIGNS[type(bound)]
            limits.append(f"{sign} {_number(getattr(bound, name))}")
        elif isinstance(bound, (MinLen, MaxLen)):
            lengths.append("not empty" if isinstance(bound, MinLen) else f"at most {bound.max_length} long")
    return ", ".join([" ".join([_base_name(annotation), " and ".join(limits)]).strip(), *lengths])


def _base_name(annotation: Any) -> str:
    if annotation in NAMES:
        return NAMES[annotation]
    origin, args = get_origin(annotation), [arg for arg in get_args(annotation) if arg is not types.NoneType]
    if origin is Annotated:
        return type_name(args[0], args[1:])
    if origin is Literal:
        return _one_of([f"`{json.dumps(value)}`" for value in args])
    if origin in (Union, types.UnionType):
        return _one_of([type_name(arg) for arg in args])
    if origin is list:
        return f"list of {type_name(args[0])}{'s' * (args[0] in NAMES or section_of(args[0]) is not None)}"
    if origin is tuple and args[-1] is Ellipsis:
        return f"list of {type_name(args[0])}s"
    if origin is tuple:
        return f"list of {len(args)} {type_name(args[0])}s"
    return "table"


def _with_article(name: str) -> str:
    return name if name.startswith("`") else f"an {name}" if name.startswith("i") else f"a {name}"


def _one_of(names: list[str]) -> str:
    return " or ".join(filter(None, [", ".join(names[:-1]), names[-1]]))


def _number(value: float) -> str:
    return f"2^{value.bit_length() - 1}" if isinstance(value, int) and value >= 2**20 else f"{value:g}"


def round_to_multiple(number: int, of: int) -> int:
    """Return the multiple of ``of`` (at least one) that is nearest to ``number``."""
    return max(1, round(number / of)) * of
