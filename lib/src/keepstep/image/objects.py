"""Values of the standard library, and of the program's own enums, named tuples and dataclasses, as
plain data.

The extras name a class. It is looked up only in modules that the program has imported itself,
so a file can import nothing. For an enum, the member with the saved name is returned. A dataclass
is created without its `__init__` and gets the saved fields; a named tuple gets its items. None of
their code runs.
"""

from __future__ import annotations

import dataclasses
import datetime
import enum
import functools
import sys
import types
from collections.abc import Callable
from typing import Any

_MAX_FRACTION = 1 << 4096
"""Reducing a hostile fraction of larger numbers to its lowest terms would take long."""


class NotData(Exception):
    """Values of this type can be plain data, but this value cannot."""


def parts_of(value: Any) -> tuple[str, Any] | None:
    """A tag, and simpler values from which `value` can be rebuilt; None for any other type. Raises
    NotData."""
    kind = type(value)
    if kind in _PARTS:
        return f"!{kind.__name__.lower()}", _PARTS[kind](value)
    late = _LATE.get(kind.__name__)
    if late is not None and kind is getattr(sys.modules.get(late[0]), kind.__name__, None):
        return f"!{kind.__name__.lower()}", late[1](value)
    if isinstance(value, enum.Enum):
        if isinstance(value, enum.Flag) and value.name not in vars(kind)["_member_map_"]:
            return "!flag", [*name_of(kind), _bits(value)]
        return "!enum", [*name_of(kind), _member(value)]
    if is_named_tuple(kind):
        if getattr(value, "__dict__", None):
            raise NotData(f"{kind.__module__}.{kind.__qualname__} is more than its items")
        return "!namedtuple", [*name_of(kind), list(value)]
    if dataclasses.is_dataclass(kind):
        return "!dataclass", [*name_of(kind), fields_of(value)]
    return None


def _clock(value: Any) -> list[Any]:
    return [value.replace(tzinfo=None, fold=0).isoformat(), value.fold, value.tzinfo]


def _zone(value: Any) -> Any:
    if value.key is None:
        raise NotData("a time zone without a key cannot be kept")
    return value.key


def _fraction(value: Any) -> list[int]:
    if max(abs(value.numerator), value.denominator) >= _MAX_FRACTION:
        raise NotData("a fraction of numbers so large cannot be kept; keep both of them")
    return [value.numerator, value.denominator]


def _attributes(value: Any) -> list[Any]:
    return [vars(value)]


_PARTS: dict[type, Callable[[Any], Any]] = {
    datetime.datetime: _clock,
    datetime.time: _clock,
    datetime.date: datetime.date.isoformat,
    datetime.timedelta: lambda value: [value.days, value.seconds, value.microseconds],
    datetime.timezone: lambda value: list(value.__getinitargs__()),
    range: lambda value: [value.start, value.stop, value.step],
    slice: lambda value: [value.start, value.stop, value.step],
    types.EllipsisType: lambda _: True,
    types.SimpleNamespace: _attributes,
}
_LATE: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "Decimal": ("decimal", str),
    "Namespace": ("argparse", _attributes),
    "UUID": ("uuid", lambda value: value.hex),
    "Fraction": ("fractions", _fraction),
    "ZoneInfo": ("zoneinfo", _zone),
}
"""By the name of a class: its module, and the function that takes its parts. These modules are not
imported for it."""


# --- classes ------------------------------------------------------------------------------------


def _find(module: str, name: str) -> type:
    """The class of that name, if the program has imported it; else raises ValueError. It does not
    use `getattr`, which may run code."""
    found: Any = sys.modules.get(module)
    for part in name.split("."):
        found = vars(found).get(part) if isinstance(found, types.ModuleType | type) else None
    if not isinstance(found, type):
        raise ValueError(f"this program has no class {module}.{name}; import it before restore()")
    return found


def name_of(kind: type) -> tuple[str, str]:
    """Module and name by which a reader finds this class. Raises NotData."""
    module, name = kind.__module__, kind.__qualname__
    try:
        same = _find(module, name) is kind
    except ValueError:
        same = False
    if not same:
        raise NotData(f"{module}.{name} is not found by its name; define it at the top of a module")
    return module, name


def _member(value: enum.Enum) -> Any:
    if vars(type(value))["_member_map_"].get(value.name) is not value:
        raise NotData(f"{value!r} is no single member of its enum, so it cannot be kept")
    return value.name


def _bits(value: enum.Flag) -> int:
    if not _has_plain_bits(type(value)):
        raise NotData(f"{value!r} is no single member of its enum, so it cannot be kept")
    return int(value.value)


def _has_plain_bits(kind: Any) -> bool:
    """Whether `enum` itself, and no code of the program, makes this class's combined members."""
    own = getattr(kind._missing_, "__func__", None)
    return issubclass(kind, enum.Flag) and own is enum.Flag._missing_.__func__  # type: ignore[attr-defined]


def is_namespace(kind: type) -> bool:
    """Whether instances are attributes without a meaning of their own."""
    late = sys.modules.get("argparse")
    return kind is types.SimpleNamespace or (late is not None and kind is late.Namespace)


def is_named_tuple(kind: type) -> bool:
    """Whether instances are tuples whose items have names, and nothing else."""
    names = getattr(kind, "_fields", None)
    return (
        issubclass(kind, tuple)
        and type(names) is tuple
        and all(type(name) is str for name in names)
        and kind.__hash__ is tuple.__hash__
        and kind.__eq__ is tuple.__eq__
    )


def _slots(kind: type) -> dict[str, Any]:
    return {
        name: slot
        for one in kind.__mro__
        for name, slot in vars(one).items()
        if isinstance(slot, types.MemberDescriptorType) and name != "__dict__"
    }


def _is_set(slot: Any, value: Any) -> bool:
    try:
        slot.__get__(value)
    except AttributeError:
        return False
    return True


def _is_plain(kind: type) -> bool:
    """Whether an instance consists only of its fields: no base class has memory of its own
    (`__new__`), and the class has no pickling of its own and no `__del__`."""
    methods = "__new__", "__reduce__", "__reduce_ex__"
    same = all(getattr(kind, name) is getattr(object, name) for name in methods)
    return same and not any("__del__" in vars(one) for one in kind.__mro__)


def attributes_of(value: Any) -> dict[str, Any]:
    """What an object has in its `__dict__` and its slots."""
    slots = _slots(type(value)).items()
    kept = dict(getattr(value, "__dict__", {}))
    return kept | {name: slot.__get__(value) for name, slot in slots if _is_set(slot, value)}


def fields_of(value: Any) -> dict[str, Any]:
    """All fields and attributes of a dataclass. Raises NotData if it is more than these."""
    kind = type(value)
    if not _is_plain(kind):
        raise NotData(f"{kind.__module__}.{kind.__qualname__} is more than its fields")
    kept = attributes_of(value)
    for field in dataclasses.fields(kind):
        if field.name not in kept:
            raise NotData(f"the field {field.name!r} of a {kind.__qualname__} has no value")
    return kept


def _few(parts: Any) -> list[Any]:
    """`parts`, which must be a list. A constructor would iterate over a decoded range of any
    length."""
    if type(parts) is not list:
        raise TypeError("not a list")
    return parts


def _to_enum(parts: Any) -> Any:
    module, name, member = parts
    kind = _find(module, name)
    if not isinstance(kind, enum.EnumMeta):
        raise ValueError(f"{module}.{name} is no enum")
    members = vars(kind)["_member_map_"]
    if member not in members:
        raise ValueError(f"{module}.{name} has no member {member!r} here")
    return members[member]


def _to_flag(parts: Any) -> Any:
    module, name, bits = parts
    kind: Any = _find(module, name)
    if not isinstance(kind, enum.EnumMeta) or not _has_plain_bits(kind) or type(bits) is not int:
        raise ValueError(f"{module}.{name} has no such flags")
    return kind(bits)


def _to_namespace(kind: Any, parts: Any) -> Any:
    (attributes,) = _few(parts)
    if type(attributes) is not dict or not all(type(key) is str for key in attributes):
        raise TypeError("not attributes")
    made = kind()
    vars(made).update(attributes)
    return made


def _to_arguments(parts: Any) -> Any:
    import argparse

    return _to_namespace(argparse.Namespace, parts)


def _to_uuid(text: Any) -> Any:
    import uuid

    if type(text) is not str or len(text) != 32:
        raise TypeError("not 32 hex digits")
    return uuid.UUID(hex=text)


def _to_ellipsis(mark: Any) -> Any:
    if mark is not True:
        raise TypeError("not true")
    return ...


def class_of_fields(module: str, name: str) -> type:
    """The class of that name that `of_fields` can make an object of. Raises ValueError."""
    kind = _find(module, name)
    plain = is_namespace(kind) or (dataclasses.is_dataclass(kind) and _is_plain(kind))
    if not plain and not is_named_tuple(kind):
        raise ValueError(f"{module}.{name} is no plain dataclass")
    return kind


def of_fields(kind: Any, kept: Any) -> Any:
    """An object of this class with these fields (a dict), or these items (a tuple). Raises
    ValueError."""
    if is_named_tuple(kind) and type(kept) is tuple and len(kept) == len(kind._fields):
        return tuple.__new__(kind, kept)
    if type(kept) is not dict or is_named_tuple(kind):
        raise ValueError(f"no fields of a {kind.__qualname__}")
    if is_namespace(kind):
        return _to_namespace(kind, [kept])
    return with_fields(kind, kept)


def _to_object(parts: Any) -> Any:
    module, name, kept = parts
    return of_fields(class_of_fields(module, name), tuple(kept) if type(kept) is list else kept)


def with_fields(kind: Any, kept: dict[str, Any]) -> Any:
    """A new dataclass with these fields. Raises ValueError if some are missing."""
    missing = {field.name for field in dataclasses.fields(kind)} - kept.keys()
    if missing:
        name = f"{kind.__module__}.{kind.__qualname__}"
        raise ValueError(f"{name} has fields that were not saved: {sorted(missing)}")
    made = object.__new__(kind)
    set_fields(made, kept)
    return made


def set_fields(live: Any, kept: dict[str, Any]) -> None:
    """Give a dataclass, also a frozen one, these fields and no others."""
    slots = _slots(type(live))
    if hasattr(live, "__dict__"):
        vars(live).clear()
    for key, value in kept.items():
        if key in slots:
            slots[key].__set__(live, value)
        else:
            vars(live)[key] = value


def _to_clock(kind: Any, parts: Any) -> Any:
    text, fold, zone = parts
    return kind.fromisoformat(text).replace(fold=fold, tzinfo=zone)


def _to_timedelta(parts: Any) -> datetime.timedelta:
    days, seconds, microseconds = parts
    if not all(type(one) is int for one in parts):
        raise TypeError("not whole numbers")
    return datetime.timedelta(days, seconds, microseconds)


def _to_decimal(text: Any) -> Any:
    if type(text) is not str:
        raise TypeError("not a text")
    import decimal

    return decimal.Decimal(text)


def _to_zone(key: Any) -> Any:
    import zoneinfo

    return zoneinfo.ZoneInfo(key)


def _to_fraction(parts: Any) -> Any:
    above, below = parts
    if type(above) is not int or type(below) is not int or max(abs(above), below) >= _MAX_FRACTION:
        raise ValueError("not two numbers of a fraction")
    import fractions

    return fractions.Fraction(above, below)


BUILDERS: dict[str, Callable[[Any], Any]] = {
    "!enum": _to_enum,
    "!dataclass": _to_object,
    "!datetime": functools.partial(_to_clock, datetime.datetime),
    "!time": functools.partial(_to_clock, datetime.time),
    "!date": datetime.date.fromisoformat,
    "!timedelta": _to_timedelta,
    "!timezone": lambda parts: datetime.timezone(*_few(parts)),
    "!zoneinfo": _to_zone,
    "!range": lambda parts: range(*_few(parts)),
    "!slice": lambda parts: slice(*_few(parts)),
    "!ellipsis": _to_ellipsis,
    "!simplenamespace": functools.partial(_to_namespace, types.SimpleNamespace),
    "!namespace": _to_arguments,
    "!uuid": _to_uuid,
    "!flag": _to_flag,
    "!namedtuple": _to_object,
    "!decimal": _to_decimal,
    "!fraction": _to_fraction,
}
"""Inverse of `parts_of`, by tag. The builders raise whatever the constructors raise."""
