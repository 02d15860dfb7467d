"""What a tree of tensors cannot say itself: which nodes are one object, and how a tensor lies in
the memory of another one.

A form is a value of the image, beside the node that it belongs to. So a view that moves along a
ring buffer needs no new layout.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from keepstep.image import arrays, objects, strictjson


@dataclass(frozen=True, slots=True)
class ViewForm:
    """A tensor over the memory of another one, the base. `offset_bytes`: from the first element of
    the base; `stride`: in elements of `dtype`, torch's name."""

    dtype: str
    offset_bytes: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class SharedForm:
    """The node is an object that stands in other places, too: there as `SharedAgain`."""

    number: int


@dataclass(frozen=True, slots=True)
class SharedAgain:
    """The object of the node whose `SharedForm` has this number."""

    number: int


@dataclass(frozen=True, slots=True)
class ClassForm:
    """The node holds the fields of a dataclass, or the items of a named tuple, of this class."""

    kind: type


@dataclass(frozen=True, slots=True)
class GradForm:
    """A tensor that requires a gradient; `parameter`: an nn.Parameter."""

    parameter: bool


FORMS = arrays.ArrayForm, ViewForm, GradForm, SharedForm, SharedAgain, ClassForm


def parts_of(value: Any) -> tuple[str, Any] | None:
    """A tag, and simpler values from which the form can be made again; None for any other type.
    Raises NotData for a class that is not found by its name."""
    kind = type(value)
    if kind is arrays.ArrayForm:
        return "!array", [value.dtype, list(value.shape), "F" if value.fortran else "C"]
    if kind is ViewForm:
        parts = [value.dtype, value.offset_bytes, list(value.shape), list(value.stride)]
        return "!view", parts
    if kind is GradForm:
        return "!grad", value.parameter
    if kind is SharedForm:
        return "!shared", value.number
    if kind is SharedAgain:
        return "!again", value.number
    if kind is ClassForm:
        return "!class", list(objects.name_of(value.kind))
    return None


def _to_view(parts: Any) -> ViewForm:
    dtype, offset, shape, stride = parts
    arrays.dtype_of(dtype)
    sizes, steps = strictjson.sizes(shape, "shape"), strictjson.sizes(stride, "stride")
    if type(offset) is not int or offset < 0 or len(sizes) != len(steps):
        raise ValueError("no view")
    return ViewForm(dtype, offset, sizes, steps)


def _to_grad(parameter: Any) -> GradForm:
    if type(parameter) is not bool:
        raise TypeError("not true or false")
    return GradForm(parameter)


def _to_class(parts: Any) -> ClassForm:
    module, name = parts
    return ClassForm(objects.class_of_fields(module, name))


def _number(value: Any) -> int:
    if type(value) is not int:
        raise TypeError("not a number")
    return value


BUILDERS: dict[str, Callable[[Any], Any]] = {
    "!view": _to_view,
    "!grad": _to_grad,
    "!shared": lambda number: SharedForm(_number(number)),
    "!again": lambda number: SharedAgain(_number(number)),
    "!class": _to_class,
}
"""Inverse of `parts_of`, by tag. The builders raise whatever the constructors raise."""
