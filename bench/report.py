"""Writes results as Markdown and JSON: the bars, then all figures beside the peers, then growth."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from bench.ours import OURS
from bench.peers import PEERS
from bench.results import BARS, Bar, Results, Spread
from bench.savers import Saver

_SAVERS = (*OURS, *PEERS)


@dataclass(frozen=True)
class Column:
    """One figure of a table of savers."""

    title: str
    figure: str
    show: Callable[[float], str]


def seconds(value: float) -> str:
    """A time in s or ms, with three significant digits."""
    if abs(value) < 0.0995:
        return f"{value * 1e3:.3g} ms"
    return f"{value:.3g} s"


def _times(value: float) -> str:
    return f"{value:.3g} x"


_BESIDE = (
    Column("blocked", "blocked_s", seconds),
    Column("call to durable", "durable_s", seconds),
    Column("step time, off CPU", "ratio", _times),
    Column("lost while persisting", "lost_s", seconds),
    Column("CPU s/GB (copy and write)", "cpu_s_per_gb", lambda value: f"{value:.3g}"),
)

_GROWTH = (
    Column("blocked time of a save (call + fence)", "blocked_s", seconds),
    Column("from the call to durable", "durable_s", seconds),
    Column(
        "CPU s per GB made durable, copy and write", "cpu_s_per_gb", lambda value: f"{value:.3g}"
    ),
)

_LIFE = (
    ("plain start to the first finished step", "plain_start_s"),
    ("kill -9 to the successor's first finished step", "kill_to_step_s"),
    ("the same, beyond a plain start", "kill_beyond_start_s"),
    ("`restore()` from memory", "restore_memory_s"),
    ("a shard read and verified into a touched slot", "engine_load_s"),
    ("a bare O_DIRECT read of that shard", "engine_read_s"),
    ("`restore()` from local, sidecar just up, memory made anew", "restore_local_bare_s"),
    ("the same, fetched and hashed before it was asked", "restore_local_ahead_s"),
    ("start of a sidecar until its socket is there", "sidecar_start_s"),
)

_TIERS = (
    ("a copy at a buddy, from durable here", "peer", "peer_copy_s"),
    ("`restore()` from a buddy, memory and drive made anew", "peer", "peer_restore_s"),
    ("as many bytes over plain TLS, digested", "peer", "peer_floor_s"),
    ("archived, from durable here", "archive", "archive_copy_s"),
    ("`obstore.put` of the same file", "archive", "archive_put_s"),
    ("`restore()` from the archive, memory and drive made anew", "archive", "archive_restore_s"),
    ("`obstore.get` of the same file, digested", "archive", "archive_get_s"),
)

_FLOORS = (
    ("memcpy", "memcpy", "memcpy_s"),
    ("fio write, best", "disk", "fio_write_s"),
    ("the same over a file that is there", "disk", "fio_over_s"),
    ("fio libaio, depth 16", "disk", "fio_libaio_qd16_s"),
    ("fio psync", "disk", "fio_psync_s"),
    ("fio psync, 4 jobs", "disk", "fio_psync_4jobs_s"),
    ("O_DIRECT read, best", "disk", "read_s"),
    ("fio read, best", "disk", "fio_read_s"),
    ("preadv, 4 threads", "disk", "bare_read_s"),
)


def markdown(results: Results, *, machine: dict[str, str], main: int) -> str:
    """The whole report."""
    parts = [
        "# keepstep, measured",
        "Made by `make bench`. Ratios are of medians over interleaved rounds;"
        " [a, b] are the quartiles. Every subject runs in processes of its own.",
        table(("machine", ""), ([name, value] for name, value in machine.items())),
        *_bars(results, main),
        _skipped(results),
        f"## Beside its peers, {size_name(main)} state",
        "Blocked: the call, and the fence before the next optimizer step, with a wait longer than"
        " the copy between. Step time: every step saved, a wait standing in for an accelerator,"
        " over the same steps unsaved. Lost: with compute on every core; a saver that blocks loses"
        " its whole save, and its step time is computed from that. CPU: of the training process and"
        " of all helpers, without kernel threads.",
        _beside(results, main),
        _missing(results),
        "## How each figure grows",
        *(_growth(results, column) for column in _GROWTH),
        "### Floors",
        _floors(results),
        "### Lives of keepstep: killed and restored",
        _lives(results),
        "### A buddy and an archive",
        _by_size(results, _parts(results, _TIERS)),
        "## Configuration of each",
        "\n".join(f"- {one.name}: {one.note}" for one in _SAVERS if one.note),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def size_name(size_bytes: int) -> str:
    """The name of a size, like "2 GiB"."""
    gib = size_bytes / (1 << 30)
    return f"{gib:g} GiB" if gib >= 1 else f"{size_bytes >> 20} MiB"


@dataclass(frozen=True)
class Pages:
    """The samples on pages of one size. `where` stands behind the names of subjects."""

    huge: bool
    where: str
    results: Results


def pages_of(results: Results) -> list[Pages]:
    """Small pages first. Where all are of one size, `where` is empty."""
    peers = {one.name for one in PEERS}
    found = [Pages(huge, "", results.on(huge_pages=huge)) for huge in (False, True)]
    found = [one for one in found if any(it.subject not in peers for it in one.results.samples)]
    if len(found) < 2:
        return found
    names = {False: ", 4 KiB pages", True: ", 2 MiB pages"}
    return [replace(one, where=names[one.huge]) for one in found]


def savers_of(results: Results) -> Iterator[tuple[str, type[Saver], Results]]:
    """Each saver's name and samples: keepstep's on pages of each size, then the others."""
    for one in OURS:
        yield from ((f"{one.name}{on.where}", one, on.results) for on in pages_of(results))
    yield from ((one.name, one, results) for one in PEERS)


def _bars(results: Results, main: int) -> Iterator[str]:
    for on in pages_of(results):
        rows = [_bar_row(bar, on.results, main, huge_pages=on.huge) for bar in BARS]
        yield f"## Bars, {size_name(main)} state{on.where}"
        yield table(("figure", "floor", "keepstep", "against it", "bar", ""), rows)


def _skipped(results: Results) -> str:
    counts = [
        f"{saver.name} skipped {total('skipped'):.0f} and discarded {total('discarded'):.0f}"
        for saver in OURS
        for total in [_total(results, saver.name)]
    ]
    return "Of all saves of this run, at all sizes: " + ", ".join(counts) + "."


def _total(results: Results, subject: str) -> Callable[[str], float]:
    samples = [one for one in results.samples if one.subject == subject]
    return lambda figure: sum(one.figures.get(figure, 0.0) for one in samples)


def _bar_row(bar: Bar, results: Results, main: int, *, huge_pages: bool) -> list[str]:
    most = bar.limit_on(huge_pages=huge_pages)
    limit = f"<= {most:g} {bar.unit}"
    try:
        value, floor, figure = (f(results, main) for f in (bar.value, bar.floor_value, bar.figure))
    except LookupError as error:
        return [bar.name, bar.floor, "not measured", str(error.args[0]), limit, "?"]
    show = seconds if bar.unit in ("x", "s") else lambda number: f"{number:.3g} {bar.unit}"
    below = bar.floor if bar.floor == "0" else f"{bar.floor}: {show(floor)}"
    verdict = "pass" if figure <= most else "**FAIL**"
    return [bar.name, below, show(value), f"{figure:.3g} {bar.unit}", limit, verdict]


def _beside(results: Results, main: int) -> str:
    rows = []
    for name, saver, samples in savers_of(results):
        spreads = [samples.spread(saver.name, main, column.figure) for column in _BESIDE]
        if any(spreads):
            cells = [_cell(one, c.show) for one, c in zip(spreads, _BESIDE, strict=True)]
            rows.append([name, *cells])
    return table(("", *(column.title for column in _BESIDE)), rows)


def _cell(spread: Spread | None, show: Callable[[float], str]) -> str:
    if spread is None:
        return "-"
    if spread.count == 1:
        return show(spread.median)
    return f"{show(spread.median)} [{show(spread.low)}, {show(spread.high)}]"


def _missing(results: Results) -> str:
    missing = results.missing()
    return "\n".join(
        f"- {name} has no figures in at least one round: {why}" for name, why in missing.items()
    )


def _growth(results: Results, column: Column) -> str:
    rows = []
    for name, saver, samples in savers_of(results):
        spreads = [samples.spread(saver.name, size, column.figure) for size in results.sizes()]
        if any(spreads):
            rows.append([name, *(_cell(one, column.show) for one in spreads)])
    return f"### {column.title}\n\n" + _by_size(results, rows)


def _floors(results: Results) -> str:
    return _by_size(results, _parts(results, _FLOORS))


def _lives(results: Results) -> str:
    return _by_size(results, _parts(results, [(title, "lives", one) for title, one in _LIFE]))


def _parts(results: Results, of: Iterable[tuple[str, str, str]]) -> Iterator[list[str]]:
    for title, subject, figure in of:
        for on in pages_of(results):
            spreads = [on.results.spread(subject, size, figure) for size in results.sizes()]
            if any(spreads):
                yield [f"{title}{on.where}", *(_cell(one, seconds) for one in spreads)]


def _by_size(results: Results, rows: Iterable[Sequence[str]]) -> str:
    return table(("", *map(size_name, results.sizes())), rows)


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table in Markdown."""
    lines = ["| " + " | ".join(head) + " |", "|" + " --- |" * len(head)]
    # a reason may have several lines, but a cell must have one
    lines += ["| " + " | ".join(cell.replace("\n", " ") for cell in row) + " |" for row in rows]
    return "\n".join(lines)
