"""The tree as a flat table of leaves, from which flags, environment variables and the reference page are made."""

from __future__ import annotations

import functools
import types
import typing
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import msgspec
from msgspec import Meta

from tidegate.config.tree import Config


@dataclass(frozen=True, slots=True)
class Leaf:
    """One settable value. Its environment variable and its flag follow from its path."""

    path: str  # dotted: http.max_body_bytes
    type: Any  # the annotation, constraints included
    default: Any
    description: str

    @property
    def variable(self) -> str:
        return "TIDEGATE_" + self.path.replace(".", "_").upper()

    @property
    def flag(self) -> str:
        return "--" + self.path.replace(".", "-").replace("_", "-")

    @property
    def section(self) -> str:
        return self.path.rpartition(".")[0]

    @property
    def bare_type(self) -> Any:
        """Without Annotated."""
        return bare(self.type)

    @property
    def optional(self) -> bool:
        return type(None) in union_members(self.bare_type)


def bare(annotation: Any) -> Any:
    while get_origin(annotation) is Annotated:
        annotation = get_args(annotation)[0]
    return annotation


def union_members(annotation: Any) -> tuple[Any, ...]:
    annotation = bare(annotation)
    if get_origin(annotation) in (Union, types.UnionType):
        return tuple(bare(member) for member in get_args(annotation))
    return (annotation,)


def choices(annotation: Any) -> tuple[str, ...]:
    """The values of a Literal, else nothing."""
    literals = [member for member in union_members(annotation) if get_origin(member) is Literal]
    return tuple(str(value) for literal in literals for value in get_args(literal))


def type_name(annotation: Any) -> str:
    """A type as a reader of the reference page wants it."""
    names = []
    for member in union_members(annotation):
        origin = get_origin(member)
        if member is type(None):
            names.append("none")
        elif origin is Literal:
            names.extend(str(value) for value in get_args(member))
        elif origin in (tuple, list):
            names.append(f"list of {type_name(get_args(member)[0])}")
        elif origin is dict:
            key, value = get_args(member)
            names.append(f"table of {type_name(key)} to {type_name(value)}")
        else:
            names.append(
                {"str": "text", "int": "integer", "float": "number", "bool": "true or false"}.get(
                    member.__name__, member.__name__
                )
            )
    return " or ".join(names)


def constraints(annotation: Any) -> str:
    """The limits of a number, wherever in the annotation they stand."""
    signs = {"ge": ">=", "gt": ">", "le": "<=", "lt": "<"}
    parts: list[str] = []
    if get_origin(annotation) is Annotated:
        inner, *metas = get_args(annotation)
        for meta in metas:
            if isinstance(meta, Meta):
                parts += [f"{sign} {getattr(meta, n)}" for n, sign in signs.items() if getattr(meta, n) is not None]
        parts += filter(None, [constraints(inner)])
    elif get_origin(annotation) in (Union, types.UnionType):
        parts += filter(None, map(constraints, get_args(annotation)))
    return ", ".join(parts)


def _description(annotation: Any) -> str:
    while get_origin(annotation) is Annotated:
        annotation, *metas = get_args(annotation)
        for meta in metas:
            if isinstance(meta, Meta) and meta.description:
                return meta.description
    return ""


def is_struct(annotation: Any) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, msgspec.Struct)


def walk(struct: type[msgspec.Struct], prefix: str = "") -> typing.Iterator[Leaf]:
    hints = typing.get_type_hints(struct, include_extras=True)
    for field in msgspec.structs.fields(struct):
        annotation = hints[field.name]
        path = prefix + field.name
        if is_struct(bare(annotation)):
            yield from walk(bare(annotation), path + ".")
        else:
            default = field.default if field.default is not msgspec.NODEFAULT else field.default_factory
            yield Leaf(path, annotation, default() if callable(default) else default, _description(annotation))


@functools.cache
def leaves() -> dict[str, Leaf]:
    return {leaf.path: leaf for leaf in walk(Config)}


@functools.cache
def variables() -> dict[str, Leaf]:
    return {leaf.variable: leaf for leaf in leaves().values()}


def sections() -> dict[str, str]:
    """Each section's path and the first paragraph of its docstring."""
    found: dict[str, str] = {}

    def visit(struct: type[msgspec.Struct], path: str) -> None:
        doc = (struct.__doc__ or "").strip() if "__doc__" in struct.__dict__ else ""
        found[path] = " ".join(doc.split("\n\n")[0].split())
        hints = typing.get_type_hints(struct, include_extras=True)
        for field in msgspec.structs.fields(struct):
            if is_struct(bare(hints[field.name])):
                visit(bare(hints[field.name]), f"{path}.{field.name}".lstrip("."))

    visit(Config, "")
    return found
