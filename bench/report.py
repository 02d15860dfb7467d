"""Writes results as Markdown: the bars, keepstep beside its peers, and then every figure."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator, Sequence

from bench.ours import OURS
from bench.peers import PEERS
from bench.results import BARS, Bar, Results

_BESIDE = {
    "blocked": "blocked_s",
    "call to durable": "durable_s",
    "step time, off CPU": "ratio",
    "lost while persisting": "lost_s",
    "CPU s/GB (copy and write)": "cpu_s_per_gb",
}


def markdown(
    results: Results, *, machine: dict[str, str], size_bytes: int, pages: Sequence[bool]
) -> str:
    """The whole report. `pages`: those that were measured, huge (True) or not."""
    state = f"{size_bytes / (1 << 30):g} GiB state"
    parts = [
        "# keepstep, measured",
        "Made by `make bench`. Ratios are of medians over interleaved rounds;"
        " [a, b] are the quartiles. Every subject runs in processes of its own.",
        table(("machine", ""), machine.items()),
    ]
    for huge in pages:
        rows = [_bar(bar, results.of(huge_pages=huge), huge_pages=huge) for bar in BARS]
        parts += [
            f"## Bars, {state}, {'2 MiB' if huge else '4 KiB'} pages",
            table(("figure", "floor", "keepstep", "against it", "bar", ""), rows),
        ]
    missing = {sample.title: sample.missing for sample in results.samples if sample.missing}
    parts += [
        f"## Beside its peers, {state}",
        "Blocked: the call, and the fence before the next optimizer step, with a wait longer than"
        " the copy between. Step time: every step saved, a wait standing in for an accelerator,"
        " over the same steps unsaved. Lost: with compute on every core; a saver that blocks loses"
        " its whole save, and its step time is computed from that. CPU: of the training process and"
        " of all helpers, without kernel threads.",
        table(("", *_BESIDE), _beside(results)),
        *(f"- {name} has no figures in a round: {why}" for name, why in missing.items()),
        "## Every figure",
        table(("subject", "figure", "median [quartiles]"), _every(results)),
        "## Configuration of each",
        "\n".join(f"- {saver.name}: {saver.note}" for saver in (*OURS, *PEERS) if saver.note),
    ]
    return "\n\n".join(parts) + "\n"


def _bar(bar: Bar, results: Results, *, huge_pages: bool) -> list[str]:
    most = bar.limit_on(huge_pages=huge_pages)
    limit = f"<= {most:g} {bar.unit}"
    try:
        value, floor, figure = (of(results) for of in (bar.value, bar.floor_value, bar.figure))
    except LookupError as error:
        return [bar.name, bar.floor, "not measured", str(error.args[0]), limit, "?"]
    show = seconds if bar.unit in ("x", "s") else lambda number: f"{number:.3g} {bar.unit}"
    below = bar.floor if bar.floor == "0" else f"{bar.floor}: {show(floor)}"
    verdict = "pass" if figure <= most else "**FAIL**"
    return [bar.name, below, show(value), f"{figure:.3g} {bar.unit}", limit, verdict]


def _beside(results: Results) -> Iterator[list[str]]:
    for title in dict.fromkeys(
        sample.title for sample in results.samples if "blocked_s" in sample.figures
    ):
        yield [title, *(_cell(results, title, figure) for figure in _BESIDE.values())]


def _every(results: Results) -> Iterator[list[str]]:
    for title, figure in dict.fromkeys(
        (sample.title, figure) for sample in results.samples for figure in sample.figures
    ):
        yield [title, figure, _cell(results, title, figure)]


def _cell(results: Results, title: str, figure: str) -> str:
    values = [
        sample.figures[figure]
        for sample in results.of(title=title).samples
        if figure in sample.figures
    ]
    if not values:
        return "-"
    shown = _shown(figure, statistics.median(values))
    if len(values) == 1:
        return shown
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return f"{shown} [{_shown(figure, low)}, {_shown(figure, high)}]"


def _shown(figure: str, value: float) -> str:
    if figure.endswith("_s"):
        return seconds(value)
    return f"{value:.3g} x" if figure == "ratio" else f"{value:.3g}"


def seconds(value: float) -> str:
    """A time in s or ms, with three significant digits."""
    return f"{value * 1e3:.3g} ms" if abs(value) < 0.0995 else f"{value:.3g} s"


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table in Markdown."""
    lines = ["| " + " | ".join(head) + " |", "|" + " --- |" * len(head)]
    # a reason may have several lines, but a cell must have one
    lines += ["| " + " | ".join(cell.replace("\n", " ") for cell in row) + " |" for row in rows]
    return "\n".join(lines)
