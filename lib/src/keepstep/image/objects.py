"""Values of the standard library, and of the program's own enums and dataclasses, as plain data.

The extras name a class. It is looked up only in modules that the program has imported itself,
so a file can import nothing. For an enum, the member with the saved name is returned. A dataclass
is created without its `__init__` and gets the saved fields; none of its code runs.
"""

from __future__ import annotations

import dataclasses
import datetime
import enum
import functools
import sys
import types
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # a program with such a value has imported the module; others need not
    import decimal
    import fractions
    import zoneinfo

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
        return "!enum", [*_name_of(kind), _member(value)]
    if dataclasses.is_dataclass(kind):
        return "!dataclass", [*_name_of(kind), _fields(value)]
    return None


def _clock(value: Any) -> list[Any]:
    return [value.replace(tzinfo=None, fold=0).isoformat(), value.fold, value.tzinfo]


def _zone(value: zoneinfo.ZoneInfo) -> str:
    if value.key is None:
        raise NotData("a time zone without a key cannot be kept")
    return value.key


def _fraction(value: fractions.Fraction) -> list[int]:
    if max(abs(value.numerator), value.denominator) >= _MAX_FRACTION:
        raise NotData("a fraction of numbers so large cannot be kept; keep both of them")
    return [value.numerator, value.denominator]


_PARTS: dict[type, Callable[[Any], Any]] = {
    datetime.datetime: _clock,
    datetime.time: _clock,
    datetime.date: datetime.date.isoformat,
    datetime.timedelta: lambda value: [value.days, value.seconds, value.microseconds],
    datetime.timezone: lambda value: list(value.__getinitargs__()),
    range: lambda value: [value.start, value.stop, value.step],
}
_LATE: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "Decimal": ("decimal", str),
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


def _name_of(kind: type) -> tuple[str, str]:
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


def _slots(kind: type) -> dict[str, Any]:
    return {
        name: slot
        for one in kind.__mro__
        for name, slot in vars(one).items()
        if isinstance(slot, types.MemberDescriptorType)
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


def _fields(value: Any) -> dict[str, Any]:
    kind = type(value)
    if not _is_plain(kind):
        raise NotData(f"{kind.__module__}.{kind.__qualname__} is more than its fields")
    kept = dict(getattr(value, "__dict__", {}))
    kept |= {
        name: slot.__get__(value) for name, slot in _slots(kind).items() if _is_set(slot, value)
    }
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


def _to_dataclass(parts: Any) -> Any:
    module, name, kept = parts
    kind = _find(module, name)
    slots = _slots(kind)
    made: Any = object.__new__(kind) if _is_plain(kind) else None
    if not dataclasses.is_dataclass(made):
        raise ValueError(f"{module}.{name} is no plain dataclass")
    missing = {field.name for field in dataclasses.fields(made)} - kept.keys()
    if missing:
        raise ValueError(f"{module}.{name} has fields that were not saved: {sorted(missing)}")
    for key, value in kept.items():
        if key in slots:
            slots[key].__set__(made, value)
        else:
            vars(made)[key] = value
    return made


def _to_clock(kind: Any, parts: Any) -> Any:
    text, fold, zone = parts
    return kind.fromisoformat(text).replace(fold=fold, tzinfo=zone)


def _to_timedelta(parts: Any) -> datetime.timedelta:
    days, seconds, microseconds = parts
    if not all(type(one) is int for one in parts):
        raise TypeError("not whole numbers")
    return datetime.timedelta(days, seconds, microseconds)


def _to_decimal(text: Any) -> decimal.Decimal:
    if type(text) is not str:
        raise TypeError("not a text")
    import decimal

    return decimal.Decimal(text)


def _to_zone(key: Any) -> zoneinfo.ZoneInfo:
    import zoneinfo

    return zoneinfo.ZoneInfo(key)


def _to_fraction(parts: Any) -> fractions.Fraction:
    above, below = parts
    if type(above) is not int or type(below) is not int or max(abs(above), below) >= _MAX_FRACTION:
        raise ValueError("not two numbers of a fraction")
    import fractions

    return fractions.Fraction(above, below)


BUILDERS: dict[str, Callable[[Any], Any]] = {
    "!enum": _to_enum,
    "!dataclass": _to_dataclass,
    "!datetime": functools.partial(_to_clock, datetime.datetime),
    "!time": functools.partial(_to_clock, datetime.time),
    "!date": datetime.date.fromisoformat,
    "!timedelta": _to_timedelta,
    "!timezone": lambda parts: datetime.timezone(*_few(parts)),
    "!zoneinfo": _to_zone,
    "!range": lambda parts: range(*_few(parts)),
    "!decimal": _to_decimal,
    "!fraction": _to_fraction,
}
"""Inverse of `parts_of`, by tag. The builders raise whatever the constructors raise."""
