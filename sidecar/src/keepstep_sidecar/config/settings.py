"""How a setting is declared, and how click reads it.

A setting has one name: `memory_limit` in a file (TOML), `KEEPSTEP_MEMORY_LIMIT` in the environment,
`--memory-limit` as a flag. The flag of a list is repeated, so it is singular (`volumes`,
`--volume`). click gives a flag priority over the environment, the environment over the file, and
the file over the default. Each value is checked where it is read, and an error names that place.

Sizes follow Kubernetes: `Ki Mi Gi Ti` are powers of 1024, `K M G T` powers of 1000. Durations are
`90s`, `15m`, `2h`, `1d` or a sequence of them (`1h30m`).
"""

from __future__ import annotations

import dataclasses
import difflib
import enum
import json
import math
import os
import re
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeVar

import click
import tomllib
from click.core import ParameterSource

from keepstep.errors import UsageError

# --- sizes and durations ---------------------------------------------------------------------


_SIZE = re.compile(r"^(\d+(?:\.\d+)?)\s*([KMGTP]i?)?B?$", re.IGNORECASE)
_DURATION = re.compile(r"^(?:\d+(?:\.\d+)?(?:ms|s|m|h|d))+$")
_DURATION_PART = re.compile(r"(\d+(?:\.\d+)?)(ms|s|m|h|d)")
_PREFIXES: Final = "KMGTP"
_SECONDS: Final = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


def parse_size(text: str) -> int:
    """Bytes of `512Mi`, `32Gi`, `10G` or `4096`. Raises ValueError that says what is expected."""
    match = _SIZE.fullmatch(text.strip())
    if not match:
        raise ValueError(f"{text!r} is not a size; write it like 512Mi, 32Gi or 10G")
    unit = match[2] or ""
    power = _PREFIXES.index(unit[0].upper()) + 1 if unit else 0
    return round(float(match[1]) * float(1024 if unit[1:] else 1000) ** power)


def parse_duration(text: str) -> float:
    """Seconds of `90s`, `15m`, `2h`, `1h30m`, or of a bare number. Raises ValueError."""
    text = text.strip()
    if re.fullmatch(r"\d+(\.\d+)?", text):
        return float(text)
    if not _DURATION.fullmatch(text):
        raise ValueError(f"{text!r} is not a duration; write it like 90s, 15m or 2h")
    return sum(float(number) * _SECONDS[unit] for number, unit in _DURATION_PART.findall(text))


def format_size(size_bytes: int) -> str:
    """Three significant digits with a binary unit: `512 B`, `1.50 GiB`."""
    value, unit = float(size_bytes), "B"
    for prefix in _PREFIXES:
        if value < 1024:
            break
        value, unit = value / 1024, f"{prefix}iB"
    if unit == "B":
        return f"{size_bytes} B"
    return f"{value:.{2 if value < 10 else 1 if value < 100 else 0}f} {unit}"


def format_duration(seconds: float) -> str:
    """The two largest units, zeros left out: `0.4s`, `12s`, `3m20s`, `2h05m`, `3d04h`, `15m`."""
    if seconds < 10:
        return f"{seconds:.1f}".removesuffix(".0") + "s"
    whole = round(seconds)
    for size, unit, smaller, name in (
        (86400, "d", 3600, "h"),
        (3600, "h", 60, "m"),
        (60, "m", 1, "s"),
    ):
        if whole >= size:
            rest = whole % size // smaller
            return f"{whole // size}{unit}" + (f"{rest:02d}{name}" if rest else "")
    return f"{whole}s"


# --- settings --------------------------------------------------------------------------------


Command = TypeVar("Command", bound=Callable[..., Any])

LARGEST_FILE_BYTES: Final = 1 << 20


@dataclass(frozen=True)
class SettingKind:
    """What a value may be. `parse` takes the value as a file or a person writes it, and returns it
    as the program uses it (None: as if it were not given). It raises a ValueError that says what is
    allowed."""

    metavar: str
    parse: Callable[[Any], Any]


@dataclass(frozen=True, kw_only=True)
class Setting:
    """A setting. `field`: its field in the configuration, whose name has the unit. `several`: a
    list in a file, words in the environment, a repeated flag. `for_run`: `keepstep run` has this
    setting, too; the others are only for programs that start sidecars."""

    field: str
    kind: SettingKind
    help: str
    default: Any
    several: bool = False
    for_run: bool = True
    hidden: bool = False

    @property
    def name(self) -> str:
        return self.field.removesuffix("_bytes").removesuffix("_s")

    @property
    def flag(self) -> str:
        return "--" + self.name.removesuffix("s" * self.several).replace("_", "-")

    @property
    def variable(self) -> str:
        return f"KEEPSTEP_{self.name.upper()}"

    @property
    def required(self) -> bool:
        return self.default is REQUIRED

    def validate_value(self, value: object, *, where: str) -> Any:
        """The checked value. Raises UsageError that names `where` the value stands."""
        try:
            if not self.several:
                return self.kind.parse(value)
            if not isinstance(value, list | tuple):
                raise ValueError(f"{value!r} is not a list")
            return tuple(map(self.kind.parse, value))
        except ValueError as error:
            raise UsageError(f"{where}: {error}") from error

    def option(self, shown: str | None = None) -> Callable[[Command], Command]:
        """The flag of a command. `shown`: the default in its help, if not the setting's own."""
        if shown is None and self.field.endswith("_s") and self.default is not None:
            shown = format_duration(self.default)
        elif shown is None:
            shown = "" if self.default in (None, (), False, REQUIRED) else str(self.default)
        return click.option(
            self.flag,
            self.name,
            cls=_Option,
            setting=self,
            default=None,
            expose_value=False,
            envvar=self.variable,
            multiple=self.several,
            is_flag=not self.kind.metavar,
            metavar=self.kind.metavar or None,
            hidden=self.hidden,
            help=self.help + (f"  [default: {shown}]" if shown else ""),
        )


REQUIRED: Final = dataclasses.MISSING


def setting(kind: SettingKind, default: Any, text: str, **options: Any) -> Any:
    """A field that is a setting. `options`: those of Setting."""
    metadata = {"kind": kind, "help": text, "default": default, **options}
    return dataclasses.field(default=default, metadata=metadata)


def settings_of(configuration: Any) -> tuple[Setting, ...]:
    """The settings that a dataclass declares."""
    return tuple(
        Setting(field=field.name, **field.metadata) for field in dataclasses.fields(configuration)
    )


# --- kinds -----------------------------------------------------------------------------------


def _words(value: object) -> str:
    """A text. Whole numbers are accepted too: `restore_from = 1200`."""
    if isinstance(value, bool | float) or not isinstance(value, str | int):
        raise ValueError(f"{value!r} is not a text")
    return str(value)


def integer_kind(least: int, most: int | None = None) -> SettingKind:
    """A kind for whole numbers, such as steps, slots or threads."""
    allowed = f"a whole number of at least {least}" + (f", at most {most}" if most else "")

    def parse(value: object) -> int:
        text = "" if isinstance(value, bool) else str(value).strip()
        if not (text.isascii() and text.isdecimal() and len(text) < 19):
            raise ValueError(f"{value!r} is not {allowed}")
        if int(text) < least or (most is not None and int(text) > most):
            raise ValueError(f"{value!r} is not {allowed}")
        return int(text)

    return SettingKind("N", parse)


AUTO: Final = "auto"


def _whole_or_auto(value: object) -> int | str:
    try:
        return AUTO if value == AUTO else int(integer_kind(1).parse(value))
    except ValueError as error:
        raise ValueError(f"{error}, nor {AUTO}") from None


def _positive(value: object) -> float:
    try:
        number = float(value) if type(value) is float else float(_words(value))
    except ValueError:
        number = math.nan
    if not 0 < number < math.inf:
        raise ValueError(f"{value!r} is not a number of more than 0, like 0.3")
    return number


def enum_kind(kinds: type[enum.Enum]) -> SettingKind:
    """A kind for the values of an enum."""
    values = [str(kind.value) for kind in kinds]

    def parse(value: object) -> enum.Enum:
        if value not in values:
            raise ValueError(f"{value!r} is not one of {', '.join(values)}")
        return kinds(value)

    return SettingKind("|".join(values), parse)


def _rate(value: object) -> int:
    if (rate := parse_size(_words(value))) < 1:
        raise ValueError(f"{value!r}: starts at 1; leave it out for no limit")
    return rate


def _duration(value: object) -> float:
    seconds = float(value) if type(value) is float else parse_duration(_words(value))
    if not 0 <= seconds < math.inf:
        raise ValueError(f"{value!r} is not a duration; write it like 90s, 15m or 2h")
    return seconds


def _span(value: object) -> str | None:
    text = _words(value)
    if text and not (int(text) if text.isdecimal() else parse_duration(text)):
        raise ValueError(f"{text!r} keeps nothing; write a number of steps, or a time like 6h")
    return text or None


def _path(value: object) -> Path | None:
    if not isinstance(value, str) or "\0" in value:
        raise ValueError(f"{value!r} is not a path")
    return Path(os.path.abspath(value)) if value else None


_ALMOST_A_URL: Final = re.compile("(s3|gs|az|file)(:|//)")


def _place(value: object) -> str | None:
    text = _words(value)
    if "://" in text:
        return text
    if typo := _ALMOST_A_URL.match(text):
        raise ValueError(f"write {typo[1]}://, or ./{text} for a directory of that name")
    return str(_path(text) or "") or None


def _switch(value: object) -> bool:
    text = value if isinstance(value, bool) else _words(value).lower()
    if text in (True, "true", "yes", "on", "1"):
        return True
    if text in (False, "false", "no", "off", "0"):
        return False
    raise ValueError(f"{value!r} is not true or false")


TEXT: Final = SettingKind("NAME", lambda value: _words(value) or None)
ADDRESS: Final = SettingKind("HOST:PORT", TEXT.parse)
URL: Final = SettingKind("URL", TEXT.parse)
PEM: Final = SettingKind("PEM", TEXT.parse)
STEP: Final = SettingKind("[RUN/]STEP", TEXT.parse)
DIR: Final = SettingKind("DIR", _path)
PATH: Final = SettingKind("PATH", _path)
PLACE: Final = SettingKind("URL", _place)
POSITIVE: Final = SettingKind("X", _positive)
WHOLE_OR_AUTO: Final = SettingKind("N|auto", _whole_or_auto)
SIZE: Final = SettingKind("SIZE", lambda value: parse_size(_words(value)))
RATE: Final = SettingKind("SIZE", _rate)
DURATION: Final = SettingKind("DURATION", _duration)
SPAN: Final = SettingKind("K|DURATION", _span)
SWITCH: Final = SettingKind("", _switch)


# --- by click --------------------------------------------------------------------------------

FILE: Final = "keepstep.file"
"""Where a click context keeps the path of the file that its `default_map` was read from."""


class _Option(click.Option):
    """Checks the value of a setting, and puts it by its field into the context's object."""

    def __init__(self, *arguments: Any, setting: Setting, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._setting = setting

    def type_cast_value(self, ctx: click.Context, value: Any) -> Any:
        if value is None or value == ():
            return value
        match ctx.get_parameter_source(self._setting.name):
            case ParameterSource.ENVIRONMENT:
                where = self._setting.variable
            case ParameterSource.DEFAULT_MAP:
                where = f"{ctx.meta[FILE]}: {self._setting.name}"
            case _:
                where = self._setting.flag
        read = self._setting.validate_value(value, where=where)
        if read is not None:
            ctx.ensure_object(dict)[self._setting.field] = read
        return read


def parsing_callback(parse: Callable[[str], Any]) -> Callable[..., Any]:
    """A callback of click that checks and reads a text."""

    def callback(ctx: click.Context, param: click.Parameter, value: str | None) -> Any:
        try:
            return None if value is None else parse(value)
        except (ValueError, UsageError) as error:
            raise click.BadParameter(str(error), ctx, param) from error

    return callback


def duration_option(*names: str, **options: Any) -> Callable[[Command], Command]:
    """An option in seconds, written like `90s`, `15m`, `2h`."""
    return click.option(
        *names, metavar="DURATION", callback=parsing_callback(parse_duration), **options
    )


def size_option(*names: str, **options: Any) -> Callable[[Command], Command]:
    """An option in bytes, written like `512Mi`, `5GB`."""
    return click.option(
        *names, metavar="SIZE", callback=parsing_callback(_positive_size), **options
    )


def _positive_size(text: str) -> int:
    if (size_bytes := parse_size(text)) < 1:
        raise ValueError(f"{text!r} is no size that holds anything")
    return size_bytes


# --- files -----------------------------------------------------------------------------------


def read_file(
    path: Path, settings: Iterable[Setting], *, beside: Collection[str]
) -> dict[str, Any]:
    """The content of a TOML file; no value is checked. Raises UsageError that names the file, and
    the known settings if it has another one, which is not `beside` them."""
    try:
        if path.exists() and not path.is_file():
            raise UsageError(f"{path} cannot be read (it is not a file)")
        with path.open("rb") as file:
            data = file.read(LARGEST_FILE_BYTES + 1)
        if len(data) > LARGEST_FILE_BYTES:
            raise UsageError(f"{path} cannot be read (more than {LARGEST_FILE_BYTES} bytes)")
        written = tomllib.loads(data.decode())
    except OSError as error:
        reason = "no such file" if isinstance(error, FileNotFoundError) else error.strerror or error
        raise UsageError(f"{path} cannot be read ({reason})") from error
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{path} is not TOML ({error})") from error
    hidden = {setting.name: setting.hidden for setting in settings}
    for name in written.keys() - hidden.keys() - set(beside):
        shown = [known for known in hidden if not hidden[known]]
        near = difflib.get_close_matches(name, shown, n=1)
        meant = f"; did you mean {near[0]!r}?" if near else "."
        raise UsageError(f"{path}: no key {name!r}{meant} Keys are {', '.join(shown)}")
    return written


def to_toml(settings: Iterable[Setting], configuration: object) -> str:
    """A file with the same values, defaults included; `read_file` is the inverse."""
    values = ((setting.name, getattr(configuration, setting.field)) for setting in settings)
    return "".join(
        f"{name} = {toml_value(value)}\n"
        for name, value in values
        if value is not None and value != ()
    )


def toml_value(value: Any) -> str:
    """A value in TOML syntax."""
    if isinstance(value, tuple):
        return f"[{', '.join(map(toml_value, value))}]"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int | float):
        return repr(value)
    # A JSON string is a TOML string, except for DEL.
    return json.dumps(str(value), ensure_ascii=False).replace("\x7f", "\\u007f")
