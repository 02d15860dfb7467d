"""Compares the bars of two checkouts of this repository on one quiet machine, in interleaved pairs.

`python -m bench.compare --base TREE --pairs 5` measures every subject in TREE and in this checkout,
one right after the other. Which checkout comes first alternates from pair to pair. Each checkout is
measured by its own `bench.worker`; measures that differ between the two are named in the report.
The floors belong to the machine, so each pair measures them once for both.

A bar is worse if the median of its ratios in the pairs exceeds `ALLOWED`. The least and the largest
of them show how much of that is noise. The exit code is 1 if a bar is worse or has no figure.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import statistics
import subprocess
import time
from pathlib import Path

from bench import machine
from bench.__main__ import jobs, measure
from bench.processes import ROOT
from bench.report import table
from bench.results import BARS, Bar, Results

ALLOWED = 1.05
BASE, THIS = "base", "this"
_FLOORS = ("memcpy", "disk")
_MEASURES = ("worker.py", "measures.py", "ours.py", "lives.py", "trainer.py", "imports.py")


def main() -> int:
    options = _options()
    trees = {BASE: options.base.resolve(), THIS: ROOT}
    results = {BASE: Results(), THIS: Results()}
    directory = options.dir / f"keepstep-bench-{os.getpid()}"
    directory.mkdir(parents=True)
    try:
        described = machine.describe(directory) | _compared(trees)
        # to a reader of the results, commits mean something, and paths of checkouts do not
        described["command"] = described["command"].replace(str(options.base), "TREE")
        began = time.monotonic()
        for number in range(options.pairs):
            _pair(number, trees, results, directory, options)
        described["took"] = f"{(time.monotonic() - began) / 60:.1f} minutes"
    finally:
        shutil.rmtree(directory, ignore_errors=True)
    rows = [compared(bar, results) for bar in BARS]
    if options.only:
        rows = [row for row in rows if row[-1] != "?"]
    head = ("bar", "base", "this", "this / base, pairs", "")
    text = (
        f"# Bars of two commits, {options.size} MiB of state\n\n"
        "Made by `python -m bench.compare`: medians over interleaved pairs; above 1 is worse.\n\n"
        f"{table(('machine', ''), described.items())}\n\n{table(head, rows)}\n"
    )
    (options.out / f"{options.name or f'{machine.slug()}-compared'}.md").write_text(text)
    print(text)
    return int(any(row[-1] != "ok" for row in rows))


def _pair(
    number: int,
    trees: dict[str, Path],
    results: dict[str, Results],
    directory: Path,
    options: argparse.Namespace,
) -> None:
    order = (BASE, THIS) if number % 2 == 0 else (THIS, BASE)
    for job in jobs(number):
        if options.only and job.subject not in (*_FLOORS, *options.only):
            continue
        if job.subject in _FLOORS:
            floor = measure(job, number, options.size << 20, directory)
            for which in order:
                results[which].samples.append(floor)
            continue
        for which in order:
            sample = measure(
                job, number, options.size << 20, directory, tree=trees[which], note=f"{which} "
            )
            results[which].samples.append(sample)


def compared(bar: Bar, results: dict[str, Results]) -> list[str]:
    """The bar's row in the report: both figures, their ratio, and a verdict."""
    pairs = []
    for number in sorted({sample.round for sample in results[BASE].samples}):
        with contextlib.suppress(LookupError):  # a worker failed, and was reported then
            pairs.append(_ratio(bar, {which: of.of(round=number) for which, of in results.items()}))
    if not pairs:
        return [bar.name, "-", "-", "no pair has it", "?"]
    figures = [f"{bar.figure(results[which]):.4g} {bar.unit}" for which in (BASE, THIS)]
    ratio = statistics.median(pairs)
    spread = f"{ratio:.3f} [{min(pairs):.3f}, {max(pairs):.3f}]"
    verdict = f"**WORSE by {(ratio - 1) * 100:.0f} %**" if ratio > ALLOWED else "ok"
    return [bar.name, *figures, spread, verdict]


def _ratio(bar: Bar, results: dict[str, Results]) -> float:
    base, this = (bar.figure(results[which]) for which in (BASE, THIS))
    # a figure that is measured beyond a floor may be negative: then scale its change by the floor
    scale = base if base > 0 else bar.floor_value(results[BASE])
    return 1 + (this - base) / scale


def _compared(trees: dict[str, Path]) -> dict[str, str]:
    """The commits, and which measures differ between them."""
    differing = [
        name
        for name in _MEASURES
        if len({(tree / "bench" / name).read_bytes() for tree in trees.values()}) > 1
    ]
    commits = {which: commit(tree) for which, tree in trees.items()}
    return commits | {"measures that differ": ", ".join(differing) or "none"}


def commit(tree: Path) -> str:
    """The commit of a checkout, and whether its sources have changed since."""

    def git(*words: str) -> str:
        done = subprocess.run(
            ["git", "-C", str(tree), *words], capture_output=True, text=True, check=True
        )
        return done.stdout.strip()

    changed = git("status", "--porcelain", "--untracked-files=no", "--", "lib", "sidecar", "bench")
    return git("log", "-1", "--format=%h %s") + (" (with changes)" if changed else "")


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
