"""Compares tiers and reshards of two checkouts on one quiet machine, in interleaved pairs.

`python -m bench.compare_tiers --base TREE --pairs 5`: each pair runs `bench.peer`, `bench.archive`
and `bench.reshard` of TREE and of this checkout, one right after the other. Which checkout comes
first alternates. `bench.compare` does the same for the bars of a save and a restore on one machine.

A figure is worse if the median of the pairs' ratios exceeds what `bench.compare` allows. The
commands also measure floors, which do not depend on keepstep: their ratios show the machine's
noise.
"""

from __future__ import annotations

import argparse
import os
import re
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

from bench import machine
from bench.compare import ALLOWED, BASE, THIS, commit
from bench.processes import ROOT


@dataclass(frozen=True)
class Figure:
    """A figure that `pattern` finds in the output of a command. `rate`: more is better. `floor`: it
    does not depend on keepstep."""

    name: str
    unit: str
    command: str
    pattern: str
    rate: bool = True
    floor: bool = False


_NUMBER = r"\s+([0-9.]+)"
FIGURES = (
    Figure("plain TLS, one stream", "GB/s", "peer", r"plain TLS, 1 stream\(s\)", floor=True),
    Figure("a lost rank from its buddy, verified", "GB/s", "peer", "restore from the buddy"),
    Figure("a copy to a buddy, durable", "GB/s", "peer", "copy"),
    Figure("obstore alone", "MB/s", "archive", '"MB/s":.*?"obstore":', floor=True),
    Figure("archive upload, checked and read back", "MB/s", "archive", '"MB/s":.*?"ours":'),
    Figure("read of all shards", "s", "reshard", "read_s", rate=False, floor=True),
    Figure("restore of 4 ranks into 2", "s", "reshard", "reshard_s", rate=False),
    Figure("the same by stock dcp.load", "s", "reshard", "stock_s", rate=False),
    Figure("plan of 4,096 ranks", "s", "plan", "4096 +[0-9]+ +[0-9]+ +[0-9]+", rate=False),
)
_Found = dict[str, list[float]]


def main() -> int:
    options = _options()
    trees = {BASE: options.base.resolve(), THIS: ROOT}
    commands = {
        "peer": ["bench.peer", "--rounds", "1", "--mib", f"{options.size}"],
        "archive": ["bench.archive", "--rounds", "1", "--mib", f"{options.size}"],
        "reshard": ["bench.reshard", "--bytes", f"{options.size << 20}"],
        "plan": ["bench.reshard", "--plan"],
    }
    began = time.monotonic()
    described = machine.describe(options.dir)
    found: dict[str, _Found] = {BASE: defaultdict(list), THIS: defaultdict(list)}
    for number in range(options.pairs):
        for name, words in commands.items():
            for which in (BASE, THIS) if number % 2 == 0 else (THIS, BASE):
                print(f"pair {number + 1}: {name} of {which}", file=sys.stderr)
                _measure(name, words, trees[which], options.dir, found[which])
    described["command"] = (
        f"python -m bench.compare_tiers --base TREE --pairs {options.pairs} --size {options.size}"
    )
    described |= {which: commit(tree) for which, tree in trees.items()}
    described["took"] = f"{(time.monotonic() - began) / 60:.1f} minutes"
    text, worse = report(found, described, options.size)
    print(text)
    (options.out / f"{machine.slug()}-compared-tiers.md").write_text(text)
    return int(worse)


def _measure(name: str, words: list[str], tree: Path, directory: Path, found: _Found) -> None:
    where = {"peer": "--dir", "archive": "--dir", "reshard": "--directory"}.get(name)
    sources = [tree, *(tree / part / "src" for part in ("lib", "sidecar", "operator"))]
    done = subprocess.run(
        [sys.executable, "-m", *words, *([where, f"{directory}"] if where else [])],
        cwd=tree,
        env=os.environ | {"PYTHONPATH": ":".join(map(str, sources))},
        capture_output=True,
        text=True,
    )
    if done.returncode:
        raise SystemExit(f"{name} of {tree.name} failed:\n{done.stderr[-2000:]}")
    for figure in FIGURES:
        if figure.command == name:
            match = re.search(figure.pattern + _NUMBER, done.stdout, re.DOTALL)
            if match is None:
                raise SystemExit(f"{name} printed no {figure.name}:\n{done.stdout}")
            found[figure.name].append(float(match[1]))


def report(found: dict[str, _Found], described: dict[str, str], size_mib: int) -> tuple[str, bool]:
    """The whole table, and whether a figure of keepstep is worse. Ratios above 1 are worse."""
    worse = False
    rows = []
    for figure in FIGURES:
        base, this = (found[which][figure.name] for which in (BASE, THIS))
        pairs = [b / t if figure.rate else t / b for b, t in zip(base, this, strict=True)]
        ratio = statistics.median(pairs)
        verdict = "floor" if figure.floor else "ok"
        if ratio > ALLOWED and not figure.floor:
            worse, verdict = True, f"**WORSE by {(ratio - 1) * 100:.0f} %**"
        rows.append(
            f"| {figure.name} | {statistics.median(base):.3g} {figure.unit}"
            f" | {statistics.median(this):.3g} {figure.unit}"
            f" | {ratio:.3f} [{min(pairs):.3f}, {max(pairs):.3f}] | {verdict} |"
        )
    about = "\n".join(f"| {name} | {value} |" for name, value in described.items())
    return (
        f"# Tiers and reshards of two commits, {size_mib} MiB of state\n\n"
        "Made by `python -m bench.compare_tiers`: medians over interleaved pairs; ratios of pairs,"
        f" above 1 is worse.\n\n| machine |  |\n| --- | --- |\n{about}\n\n"
        "| figure | base | this | this / base, pairs |  |\n| --- | --- | --- | --- | --- |\n"
        + "\n".join(rows)
        + "\n"
    ), worse


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.compare_tiers", description=__doc__)
    parser.add_argument("--base", type=Path, required=True, help="a checkout to compare with")
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--size", type=int, default=512, metavar="MIB", help="of the state")
    parser.add_argument("--dir", type=Path, default=ROOT / "build", help="on the disk to measure")
    parser.add_argument("--out", type=Path, default=ROOT / "bench" / "results")
    return parser.parse_args()


if __name__ == "__main__":
    raise SystemExit(main())
