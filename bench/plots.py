"""Draws the report's pictures: how blocked time and time to durable grow, and what saving costs."""

from __future__ import annotations

from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.axes import Axes

from bench.ours import OURS
from bench.report import pages_of, savers_of, size_name
from bench.results import Results

_OURS = {one.name for one in OURS}


def draw(results: Results, *, main: int, prefix: Path) -> list[str]:
    """Write `<prefix>-*.png`; returns the files' names."""
    pictures = {
        "blocked": lambda axes: _growth(
            axes, results, "blocked_s", "blocked time of a save", ("memcpy", "memcpy_s")
        ),
        "durable": lambda axes: _growth(
            axes, results, "durable_s", "from the call to durable", ("disk", "fio_write_s")
        ),
        "cost": lambda axes: _cost(axes, results, main),
    }
    names = []
    for name, paint in pictures.items():
        figure, axes = plt.subplots(figsize=(8, 5))
        paint(axes)
        figure.tight_layout()
        path = prefix.with_name(f"{prefix.name}-{name}.png")
        figure.savefig(path, dpi=110)
        plt.close(figure)
        names.append(path.name)
    return names


def _growth(axes: Axes, results: Results, figure: str, title: str, floor: tuple[str, str]) -> None:
    sizes = results.sizes()
    floors = [
        (f"{floor[0]} (floor){on.where}", floor[0], floor[1], on.results, ":" if on.huge else "--")
        for on in pages_of(results)
    ]
    savers = [(name, one.name, figure, of, "") for name, one, of in savers_of(results)]
    for label, subject, key, of, style in [*floors, *savers]:
        spreads = [(size, of.spread(subject, size, key)) for size in sizes]
        points = [(size / (1 << 30), one) for size, one in spreads if one is not None]
        if not points:
            continue
        lines = axes.plot(
            [x for x, _ in points],
            [one.median for _, one in points],
            f"k{style}" if style else "",
            marker="o",
            markersize=3,
            linewidth=2.5 if subject in _OURS else 1.2,
            label=label,
        )
        axes.fill_between(
            [x for x, _ in points],
            [one.low for _, one in points],
            [one.high for _, one in points],
            color=lines[0].get_color(),
            alpha=0.12,
        )
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks([size / (1 << 30) for size in sizes], [size_name(size) for size in sizes])
    axes.set_xlabel("state")
    axes.set_ylabel("seconds")
    axes.set_title(title)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=7)


def _cost(axes: Axes, results: Results, main: int) -> None:
    found = [
        (label, one.name in _OURS, of.spread(one.name, main, "ratio"))
        for label, one, of in reversed([*savers_of(results)])
    ]
    rows = [(label, ours, spread) for label, ours, spread in found if spread is not None]
    axes.barh(
        [label for label, _, _ in rows],
        [(spread.median - 1) * 100 for _, _, spread in rows],
        color=["C2" if ours else "C7" for _, ours, _ in rows],
    )
    axes.set_xscale("symlog", linthresh=1)
    axes.axvline(3, color="k", linestyle="--", linewidth=1)
    axes.set_xlabel("step time added, % (every step saved, 1 s of compute off the CPU; bar: 3 %)")
    axes.set_title(f"{size_name(main)} state")
