"""A part of a spec, read field by field. An error names the wrong field and says what to write.

The CRD's schema refuses the same errors first. This module is for objects that are older than a
rule of the schema: one of them must not end the cache of all policies. Pure.
"""

from __future__ import annotations

import enum
import re
from typing import TypeVar

from keepstep.errors import UsageError
from keepstep_operator.api.quantities import parse_bytes, parse_duration, parse_millicores
from keepstep_operator.object_body import Body

Choice = TypeVar("Choice", bound=enum.Enum)

_LEAST_BYTES = 1 << 20


class PolicyError(UsageError):
    """A policy that cannot work. `field`: the wrong field's path below spec. The message says what
    to write.

    `reason`: the reason of the condition Accepted=False, one word.
    """

    def __init__(self, field: str, message: str, *, reason: str = "Invalid") -> None:
        super().__init__(f"spec.{field}: {message}" if field else message)
        self.field = field
        self.reason = reason


class Fields:
    """A part of the spec with its path, which messages name."""

    def __init__(self, path: str, fields: object) -> None:
        self._path = path
        if not isinstance(fields, dict):
            raise PolicyError(path, f"an object is needed, not {fields!r}")
        self.fields: Body = fields

    def wrong(self, name: str, message: str, *, reason: str = "Invalid") -> PolicyError:
        """The error to raise about the field `name`; '': about the whole part."""
        return PolicyError(self._at(name), message, reason=reason)

    def child(self, name: str) -> Fields:
        """A part below this one; empty if it is left out."""
        value = self.fields.get(name)
        return Fields(self._at(name), {} if value is None else value)

    def value(self, name: str) -> object:
        return self.fields.get(name)

    def number(self, name: str, default: int, *, least: int, most: int) -> int:
        value = self.fields.get(name, default)
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            raise self.wrong(name, f"{value!r} is not a whole number from {least} to {most}")
        return value

    def optional_number(self, name: str, *, least: int, most: int) -> int | None:
        if self.fields.get(name) is None:
            return None
        return self.number(name, least, least=least, most=most)

    def text(
        self, name: str, form: re.Pattern[str], what: str, *, default: str | None = None
    ) -> str:
        """A string of this form. `what`: what is expected, for the message."""
        value = self.fields.get(name, default)
        if not isinstance(value, str) or not form.fullmatch(value):
            raise self.wrong(name, f"{value!r} is not {what}")
        return value

    def optional_text(self, name: str, form: re.Pattern[str], what: str) -> str | None:
        return None if self.fields.get(name) is None else self.text(name, form, what)

    def directory(self, name: str, *, example: str) -> str:
        """An absolute path, returned in normal form (no `//`, no `/./`, no trailing slash), so that
        prefixes can be compared."""
        path = self.fields.get(name)
        if not isinstance(path, str) or not path.startswith("/"):
            raise self.wrong(name, f"an absolute directory is needed, like {example}")
        parts = [part for part in path.split("/") if part not in ("", ".")]
        if ".." in parts:
            raise self.wrong(name, "must not contain '..'")
        if not parts:
            raise self.wrong(name, "must not be the root of the node")
        return "/" + "/".join(parts)

    def choice(self, name: str, default: Choice) -> Choice:
        value = self.fields.get(name, default.value)
        try:
            return type(default)(value)
        except ValueError:
            words = " or ".join(str(choice.value) for choice in type(default))
            raise self.wrong(name, f"{value!r} is not {words}") from None

    def duration(self, name: str, default: str, *, least: int, most: int) -> int:
        value = self.fields.get(name, default)
        try:
            seconds = parse_duration(value)
        except ValueError as error:
            raise self.wrong(name, str(error)) from None
        if not least <= seconds <= most:
            raise self.wrong(name, f"{value} is not from {least}s to {most}s")
        return seconds

    def size(self, name: str, default: str | None = None, *, reason: str = "Invalid") -> int:
        value = self.fields.get(name, default)
        if value is None:
            raise self.wrong(name, "is needed: a quantity like 32Gi", reason=reason)
        try:
            size_bytes = parse_bytes(value)
        except ValueError as error:
            raise self.wrong(name, str(error), reason=reason) from None
        if size_bytes < _LEAST_BYTES:
            raise self.wrong(name, f"{value} is less than 1Mi; write a unit", reason=reason)
        return size_bytes

    def optional_size(self, name: str) -> int | None:
        return None if self.fields.get(name) is None else self.size(name)

    def millicores(self, name: str, default: str) -> int:
        value = self.fields.get(name, default)
        try:
            millicores = parse_millicores(value)
        except ValueError as error:
            raise self.wrong(name, str(error)) from None
        if millicores < 1:
            raise self.wrong(name, f"{value} is not a positive number of CPUs")
        return millicores

    def _at(self, name: str) -> str:
        return ".".join(part for part in (self._path, name) if part)
