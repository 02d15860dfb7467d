"""`keepstep inspect`: shows the header and the control page of one image."""

from __future__ import annotations

import datetime
import os
from pathlib import Path

import click

from keepstep.directory import open_user_named_file
from keepstep.errors import ImageError, StorageError
from keepstep.image import ControlPage, Layout, read_control, read_layout
from keepstep_sidecar.cli import output
from keepstep_sidecar.cli.options import json_option
from keepstep_sidecar.config.settings import format_size


@click.command("inspect")
@json_option
@click.argument("file", type=click.Path(exists=True, dir_okay=False, path_type=Path))
def inspect_file(file: Path, as_json: bool) -> None:
    """Show control page, layout, sections and tensors of FILE: a shard, or a slot in memory.

    Reads header and control page only; `keepstep verify` checks the rest.

    \b
    Examples:
      keepstep inspect .keepstep/train/0001.4be1a09c-000001200/rank-00000-of-00002.safetensors
    """
    try:
        fd = open_user_named_file(file)
    except OSError as error:
        raise StorageError(str(error)) from None
    try:
        try:
            layout = read_layout(fd)
        except ImageError as error:
            raise type(error)(error.reason, path=file) from None
        control: ControlPage | ImageError
        try:
            control = read_control(fd, layout)
        except ImageError as error:
            control = error  # a slot that is being filled, and a torn shard, still have a layout
    finally:
        os.close(fd)
    if as_json:
        output.print_json(_document(file, layout, control))
    else:
        _print(file, layout, control)
    if isinstance(control, ImageError):
        raise SystemExit(1)


def _document(file: Path, layout: Layout, control: ControlPage | ImageError) -> dict[str, object]:
    error, seal = (control, None) if isinstance(control, ImageError) else (None, control)
    return {
        "path": file,
        "sealed": seal is not None,
        "error": error and error.reason,
        "control": seal,
        "layout": {
            "id": layout.id,
            "rank": layout.rank,
            "world": layout.world,
            "bytes": layout.size_bytes,
            "header_bytes": len(layout.header),
            "extras_begin": layout.extras_begin,
            "extras_capacity_bytes": layout.extras_capacity_bytes,
            "digests_begin": layout.digests_begin,
            "control_begin": layout.control_begin,
            "chunks": layout.chunk_count,
            "aliases": layout.aliases,
        },
        "sections": {section.value: extents for section, extents in layout.section_extents.items()},
        "tensors": [
            {
                "name": name,
                "dtype": entry.spec.dtype,
                "shape": entry.spec.shape,
                "section": entry.spec.section,
                "offsets": entry.spec.offsets,
                "global_shape": entry.spec.global_shape,
                "begin": entry.begin,
                "end": entry.end,
            }
            for name, entry in layout.entries.items()
        ],
    }


def _print(file: Path, layout: Layout, control: ControlPage | ImageError) -> None:
    count, size = len(layout.entries), layout.size_bytes
    aliases = f", {len(layout.aliases)} tied" if layout.aliases else ""
    facts = [
        ("file", str(file)),
        *_control_facts(control),
        ("layout", f"{layout.id}, {count} tensors{aliases}"),
        ("bytes", f"{size} ({format_size(size)}), {layout.chunk_count} chunks"),
    ]
    output.print_facts(facts, width=9)
    sections = (
        (section.value, format_size(sum(end - begin for begin, end in extents)), len(extents))
        for section, extents in layout.section_extents.items()
    )
    output.print_table(("SECTION", "BYTES", "EXTENTS"), sections, right=("BYTES",))
    tensors = (
        (
            name,
            entry.spec.dtype,
            " x ".join(map(str, entry.spec.shape)) or "scalar",
            entry.spec.section.value,
            entry.begin,
            format_size(entry.end - entry.begin),
        )
        for name, entry in layout.entries.items()
    )
    columns = ("TENSOR", "DTYPE", "SHAPE", "SECTION", "BEGIN", "BYTES")
    output.print_table(columns, tensors, right=("BEGIN", "BYTES"))


def _control_facts(control: ControlPage | ImageError) -> list[tuple[str, str]]:
    if isinstance(control, ImageError):
        return [("seal", f"NONE: {control.reason}")]
    parent = control.epoch.parent
    origin = "from the beginning" if parent is None else f"went on from {parent}"
    facts = [
        ("run", control.run),
        ("step", f"{control.step} of epoch {control.epoch.id}, which {origin}"),
        ("rank", f"{control.rank} of {control.world}"),
        ("staged", _moment(control.staged_at)),
        ("extras", f"{control.extras_bytes} bytes"),
    ]
    if control.base is not None:
        facts += [("base", f"of step {control.base.step}, {control.base.size_bytes} bytes")]
    if control.root is None:
        return [*facts, ("digests", "none: the image was staged only")]
    written = "" if control.written_at is None else f", written {_moment(control.written_at)}"
    return [*facts, ("digests", f"root {control.root}{written}")]


def _moment(unix_s: float) -> str:
    at = datetime.datetime.fromtimestamp(unix_s, tz=datetime.timezone.utc)
    return at.isoformat(sep=" ", timespec="milliseconds")
