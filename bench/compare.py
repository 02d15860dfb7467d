"""Compares the bars of two checkouts of this repository on one quiet machine, in interleaved pairs.

`python -m bench.compare --base TREE --pairs 5` measures every subject in TREE and in this checkout,
one right after the other. Which checkout comes first alternates from pair to pair. Each checkout is
measured by its own `bench.worker`; measures that differ between the two are named in the report.
The floors belong to the machine, so each pair measures them once for both.

A bar is worse if its median over the pairs exceeds that of the base by more than `ALLOWED`. The
ratios of single pairs beside it show how much of that is noise. The exit code is 1 if a bar is
worse or has no figure.
"""

from __future__ import annotations

import argparse
import filecmp
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from bench import machine, report
from bench.__main__ import Job, Plan, measure
from bench.processes import ROOT
from bench.results import BARS, Bar, Results
from bench.worker import DISK, MEMCPY

ALLOWED = 1.05
BASE, THIS = "base", "this"
_MIB = 1 << 20
_MEASURES = ("worker.py", "measures.py", "ours.py", "lives.py", "trainer.py", "imports.py")


@dataclass(frozen=True)
class Change:
    """One bar in both checkouts. A `ratio` above 1 is worse; `pairs` has the ratio of each pair.

    `missing` says why there is no figure.
    """

    bar: str
    unit: str
    base: float = 0.0
    this: float = 0.0
    ratio: float = 0.0
    pairs: tuple[float, ...] = ()
    missing: str = ""

    @property
    def worse(self) -> bool:
        """Whether this checkout is worse by more than is allowed."""
        return not self.missing and self.ratio > ALLOWED


def main() -> int:
    options = _options()
    size = options.size * _MIB
    trees = {BASE: options.base.resolve(), THIS: ROOT}
    results = {BASE: Results(), THIS: Results()}
    directory = options.dir / f"keepstep-bench-{os.getpid()}"
    directory.mkdir(parents=True)
    try:
        described = _described(directory, trees, options)
        began = time.monotonic()
        for number in range(options.pairs):
            _pair(number, size, trees, results, directory, options.only)
        described["took"] = f"{(time.monotonic() - began) / 60:.1f} minutes"
    finally:
        shutil.rmtree(directory, ignore_errors=True)
    changes = [compared(bar, results, size) for bar in BARS]
    if options.only:
        changes = [one for one in changes if not one.missing]
    name = options.name or f"{machine.slug()}-compared"
    _write(changes, results, described, size, options.out / name)
    return int(any(one.worse or one.missing for one in changes))


def _pair(
    number: int,
    size: int,
    trees: dict[str, Path],
    results: dict[str, Results],
    directory: Path,
    only: Sequence[str],
) -> None:
    order = (BASE, THIS) if number % 2 == 0 else (THIS, BASE)
    for job in _jobs(number, size):
        if only and job.subject not in (MEMCPY, DISK, *only):
            continue
        if job.subject in (MEMCPY, DISK):
            floor = measure(job, number, size, directory)
            for which in order:
                results[which].samples.append(floor)
            continue
        for which in order:
            sample = measure(job, number, size, directory, tree=trees[which], note=f"{which} ")
            results[which].samples.append(sample)


def _jobs(number: int, size: int) -> list[Job]:
    plan = Plan((size,), size, 1, 1, minutes=0, wait_s=1.0, steps=4, peers=False)
    return plan.jobs(number, size)


def compared(bar: Bar, results: dict[str, Results], size: int) -> Change:
    """The figure of `bar` in both checkouts, over all pairs and in each."""
    try:
        base, this = (bar.figure(results[which], size) for which in (BASE, THIS))
        ratio = _ratio(bar, results, size)
    except LookupError as error:
        return Change(bar.name, bar.unit, missing=str(error.args[0]))
    pairs = []
    for number in sorted({one.round for one in results[BASE].samples}):
        only = {which: _round(results[which], number) for which in (BASE, THIS)}
        try:
            pairs.append(_ratio(bar, only, size))
        except LookupError:
            continue  # a worker failed, and was reported then
    return Change(bar.name, bar.unit, base, this, ratio, tuple(pairs))


def _ratio(bar: Bar, results: dict[str, Results], size: int) -> float:
    base, this = (bar.figure(results[which], size) for which in (BASE, THIS))
    # a figure that is measured beyond a floor may be negative: then scale its change by the floor
    scale = base if base > 0 else bar.floor_value(results[BASE], size)
    return 1 + (this - base) / scale


def _round(results: Results, number: int) -> Results:
    only = Results()
    only.samples = [one for one in results.samples if one.round == number]
    return only


def _described(
    directory: Path, trees: dict[str, Path], options: argparse.Namespace
) -> dict[str, str]:
    described = machine.describe(directory)
    # to a reader of the results, commits mean something, and paths of checkouts do not
    described["command"] = (
        f"python -m bench.compare --base TREE --pairs {options.pairs} --size {options.size}"
        + (f" --only {' '.join(options.only)}" if options.only else "")
    )
    for which, tree in trees.items():
        described[which] = commit(tree)
    differing = [
        name
        for name in _MEASURES
        if not filecmp.cmp(trees[BASE] / "bench" / name, trees[THIS] / "bench" / name, False)
    ]
    described["measures that differ"] = ", ".join(differing) or "none"
    return described


def commit(tree: Path) -> str:
    """The commit of a checkout, and whether its sources have changed since."""

    def git(*words: str) -> str:
        done = subprocess.run(
            ["git", "-C", str(tree), *words], capture_output=True, text=True, check=True
        )
        return done.stdout.strip()

    changed = git("status", "--porcelain", "--untracked-files=no", "--", "lib", "sidecar", "bench")
    return git("log", "-1", "--format=%h %s") + (" (with changes)" if changed else "")


def markdown(changes: Sequence[Change], described: dict[str, str], size: int) -> str:
    """The whole report."""
    head = "| bar | base | this | this / base | pairs |  |\n| --- | --- | --- | --- | --- | --- |"
    about = "\n".join(f"| {name} | {value} |" for name, value in described.items())
    return (
        f"# Bars of two commits, {report.size_name(size)} of state\n\n"
        "Made by `python -m bench.compare`: medians over interleaved pairs; above 1 is worse.\n\n"
        f"| machine |  |\n| --- | --- |\n{about}\n\n{head}\n"
        + "".join(f"{_row(one)}\n" for one in changes)
    )


def _row(change: Change) -> str:
    if change.missing:
        return f"| {change.bar} | - | - | - | {change.missing} | ? |"
    verdict = f"**WORSE by {(change.ratio - 1) * 100:.0f} %**" if change.worse else "ok"
    pairs = f"{statistics.median(change.pairs):.3f}" if change.pairs else "-"
    if len(change.pairs) > 1:
        pairs += f" [{min(change.pairs):.3f}, {max(change.pairs):.3f}]"
    return (
        f"| {change.bar} | {change.base:.4g} {change.unit} | {change.this:.4g} {change.unit}"
        f" | {change.ratio:.3f} | {pairs} | {verdict} |"
    )


def _write(
    changes: Sequence[Change],
    results: dict[str, Results],
    described: dict[str, str],
    size: int,
    prefix: Path,
) -> None:
    prefix.parent.mkdir(parents=True, exist_ok=True)
    text = markdown(changes, described, size)
    prefix.with_suffix(".md").write_text(text)
    document = {
        "machine": described,
        "size_bytes": size,
        "bars": [asdict(one) for one in changes],
        "samples": {which: one.as_json() for which, one in results.items()},
    }
    prefix.with_suffix(".json").write_text(json.dumps(document, indent=1) + "\n")
    print(text)
    print(f"{prefix}.md, {prefix}.json", file=sys.stderr)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.compare", description=__doc__)
    parser.add_argument("--base", type=Path, required=True, help="a checkout to compare with")
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--size", type=int, default=1024, metavar="MIB", help="of the state")
    parser.add_argument(
        "--only", nargs="+", default=(), metavar="SUBJECT", help="such as lives, imports: not all"
    )
    parser.add_argument("--dir", type=Path, default=ROOT / "build", help="on the disk to measure")
    parser.add_argument("--out", type=Path, default=ROOT / "bench" / "results")
    parser.add_argument("--name", help="of the result files; default: from the machine")
    return parser.parse_args()


if __name__ == "__main__":
    raise SystemExit(main())
