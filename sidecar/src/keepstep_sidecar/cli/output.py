"""Prints results: one JSON document, or tables and plain lines.

Names and errors come from files that are not trusted. So control characters are escaped before
they reach a terminal, and no text is taken for markup.
"""

from __future__ import annotations

import dataclasses
import enum
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import click

from keepstep.steps import EpochId, StepId

if TYPE_CHECKING:
    from rich.console import Console


def to_plain(value: Any) -> Any:
    """`value` in types of JSON. Steps and epochs become their names, which commands accept."""
    if isinstance(value, StepId | EpochId | Path):
        return str(value)
    if isinstance(value, enum.Enum):
        return value.value
    if dataclasses.is_dataclass(value):
        fields = dataclasses.fields(value)
        return {field.name: to_plain(getattr(value, field.name)) for field in fields}
    if isinstance(value, Mapping):
        return {str(to_plain(key)): to_plain(value) for key, value in value.items()}
    if isinstance(value, tuple | list):
        return [to_plain(item) for item in value]
    return value


def print_json(value: Any) -> None:
    """Print one JSON document on stdout."""
    click.echo(json.dumps(to_plain(value), indent=2))


_CONTROL = re.compile(
    r"[\x00-\x08\x0b-\x1f\x7f-\x9f"  # all controls but newlines and tabs
    r"\u200e\u200f\u2028-\u202e\u2066-\u2069"  # directions of text, other ends of lines
    r"\ud800-\udfff]"  # surrogates: no encoding can write them
)


def printable(text: str) -> str:
    """`text` with all that a terminal would obey escaped, like `\\x1b`; newlines and tabs stay."""
    return _CONTROL.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def print_line(text: str, *, err: bool = False) -> None:
    """Print a plain line."""
    click.echo(printable(text), err=err)


def console(*, stderr: bool = False) -> Console:
    """A console of rich that escapes control characters. When its output is piped it is 240 columns
    wide, so that tables are not cut off."""
    from rich.console import Console
    from rich.text import Text

    class Printing(Console):
        def render_str(self, text: str, **options: Any) -> Text:
            return super().render_str(printable(text), **options)

    made = Printing(stderr=stderr, highlight=False, markup=False, emoji=False, soft_wrap=False)
    if not made.is_terminal:
        made.width = 240
    return made


def print_lines(lines: Iterable[str]) -> None:
    """Print plain lines without wrapping them."""
    shown = console()
    for line in lines:
        shown.print(line, soft_wrap=True)


def print_facts(facts: Iterable[tuple[str, str]], *, width: int) -> None:
    """Print one line for each name and text. `width`: the columns of the name."""
    print_lines(f"{name:<{width}}{text}" for name, text in facts)


def print_table(
    columns: Sequence[str],
    rows: Iterable[Iterable[object]],
    *,
    right: tuple[str, ...] = (),
    empty: str = "",
) -> None:
    """Print a table. Columns in `right` are aligned to the right. Without rows it prints the line
    `empty`, if given."""
    from rich import box
    from rich.table import Table

    made = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for column in columns:
        justify: Literal["left", "right"] = "right" if column in right else "left"
        made.add_column(column, justify=justify, overflow="fold", no_wrap=column in right)
    for row in rows:
        made.add_row(*map(str, row))
    if made.row_count:
        console().print(made)
    elif empty:
        print_lines([empty])


@contextmanager
def progress(total_bytes: int, *, quiet: bool) -> Iterator[Callable[[str, int], None]]:
    """Show a progress bar on a terminal. The yielded function takes a description of the current
    work and the number of bytes that were done since its last call."""
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

    shown = console(stderr=True)
    with Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(binary_units=True),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
        console=shown,
        disable=quiet or not shown.is_terminal,
        transient=True,
    ) as bar:
        task = bar.add_task("", total=total_bytes)
        yield lambda text, done: bar.update(task, description=text, advance=done)


def ranks_text(ranks: Sequence[int], world: int) -> str:
    """`all 8`, or the ranks that are there: `0-2,5 of 8`."""
    if tuple(ranks) == tuple(range(world)):
        return f"all {world}"
    spans: list[list[int]] = []
    for rank in ranks:
        if spans and spans[-1][1] == rank - 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    text = ",".join(f"{first}" if first == last else f"{first}-{last}" for first, last in spans)
    return f"{text or 'none'} of {world}"
