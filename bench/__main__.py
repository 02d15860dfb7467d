"""The driver: `python -m bench` measures every subject at every size in interleaved rounds.

A block is one size in one round: it measures every subject once, in an order that rotates from
round to round. Blocks run until the time budget is used up, the most important ones first. So a
slower machine gets fewer rounds, but not fewer figures.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path

from bench import hugepages, machine, report
from bench.ours import OURS, KeepstepLazy
from bench.peers import PEERS, FastPersist
from bench.processes import MEMORY_PREFIX, ROOT, environment
from bench.results import BARS, Results, Sample
from bench.worker import ARCHIVE, DISK, IMPORTS, LIVES, MEMCPY, PEER
from tests.hugetlbfs import Unavailable

_MIB = 1 << 20
_WORKER_TIMEOUT_S = 240.0
_PAGES = {"small": (False,), "huge": (True,), "both": (False, True)}


@dataclass(frozen=True)
class Job:
    """The command line of one worker, and whether its memory is on huge pages."""

    subject: str
    options: tuple[str, ...] = ()
    huge_pages: bool = False


@dataclass(frozen=True)
class Plan:
    """What to measure. `sizes` are in bytes; the bars apply to the size `main`.

    Without `peers`, only keepstep and the floors are measured: more rounds in the same time.
    `pages`: keepstep and the floors are measured on these, huge (True) or not, in turns; the others
    have memory of their own.
    """

    sizes: tuple[int, ...]
    main: int
    rounds: int
    side_rounds: int
    minutes: float
    wait_s: float
    steps: int
    peers: bool = True
    pages: tuple[bool, ...] = (False,)

    def blocks(self) -> Iterator[tuple[int, int]]:
        """(round, size): the main size alternates with the others."""
        for number in range(max(self.rounds, self.side_rounds)):
            if number < self.rounds:
                yield number, self.main
            if number < self.side_rounds:
                yield from ((number, size) for size in self.sizes if size != self.main)

    def jobs(self, number: int, size: int) -> list[Job]:
        """The jobs of a block: every subject, rotated by the round's number."""
        loop = ("--wait", str(self.wait_s), "--steps", str(self.steps))
        few = ("--wait", str(self.wait_s), "--steps", "2")
        lazy = eager = "blocked,durable"
        peers, present = "once", PEERS
        if size == self.main:
            lazy, eager = "blocked,durable,inflation,busy,lost", "blocked,durable,inflation,lost"
            # Some peers take minutes, so later rounds have only FastPersist of them. The subjects
            # of the bars are in all rounds.
            peers, present = "once,inflation,lost", PEERS if number == 0 else (FastPersist,)
        savers = [
            Job(one.name, ("--measures", lazy if one is KeepstepLazy else eager, *loop))
            for one in OURS
        ]
        floors = [Job(MEMCPY), Job(DISK), Job(LIVES)]
        if size == self.main:
            floors += [Job(IMPORTS), Job(PEER), Job(ARCHIVE)]
        # one after the other on each kind of pages, so that both see the same moods of the machine
        jobs = [replace(one, huge_pages=on) for one in (*floors, *savers) for on in self.pages]
        if self.peers:
            jobs += [Job(one.name, ("--measures", peers, *few)) for one in present]
        turn = number * 3 % len(jobs)
        return jobs[turn:] + jobs[:turn]


def main() -> int:
    options = _options()
    plan = _plan(options)
    directory = options.dir / f"keepstep-bench-{os.getpid()}"
    directory.mkdir(parents=True)
    results = Results()
    try:
        described = machine.describe(directory)
        began = time.monotonic()
        _run(plan, results, directory, only=options.only)
        described["took"] = f"{(time.monotonic() - began) / 60:.1f} minutes"
        described["rounds"] = _rounds_of(results)
    finally:
        shutil.rmtree(directory, ignore_errors=True)
    _write(results, described, plan.main, options.out, options.name or machine.slug())
    return 0


def _run(plan: Plan, results: Results, directory: Path, *, only: str) -> None:
    began = time.monotonic()
    took: dict[int, float] = {}
    strikes: Counter[tuple[str, bool, int]] = Counter()
    for number, size in plan.blocks():
        spent = time.monotonic() - began
        # later rounds of the main size are shorter: they lack the slow peers
        likely_s = took.get(size, 0.0) * (0.5 if size == plan.main and number == 1 else 1.0)
        if spent + likely_s > plan.minutes * 60:
            print(f"no time for round {number + 1} of {report.size_name(size)}", file=sys.stderr)
            continue
        for job in plan.jobs(number, size):
            # memory may give no huge pages at one size, and enough of them at the others
            failing = (job.subject, job.huge_pages, size if job.huge_pages else 0)
            if strikes[failing] > 1 or only not in job.subject:
                continue
            sample = measure(job, number, size, directory)
            results.samples.append(sample)
            if sample.missing:
                # do not retry a peer that is not installed; try any other failure a second time
                strikes[failing] += 2 if sample.missing.startswith("PeerMissing") else 1
        took[size] = time.monotonic() - began - spent


def measure(
    job: Job, number: int, size: int, directory: Path, *, tree: Path = ROOT, note: str = ""
) -> Sample:
    """Run one worker of the checkout in `tree`, and print how it went."""
    sample = Sample(job.subject, size, number, huge_pages=job.huge_pages)
    began = time.monotonic()
    try:
        with hugepages.reserved(size, directory) if job.huge_pages else nullcontext():
            _work(job, sample, directory / "worker", tree=tree)
    except Unavailable as error:
        sample.missing = str(error)
    sample.seconds = time.monotonic() - began
    verdict = sample.missing.splitlines()[0][:80] if sample.missing else "ok"
    print(
        f"round {number + 1}  {report.size_name(size):>8}  {job.subject:<30}"
        f" {'2 MiB pages' if job.huge_pages else '':<11} {sample.seconds:6.1f} s  {note}{verdict}",
        file=sys.stderr,
        flush=True,
    )
    return sample


def _work(job: Job, sample: Sample, place: Path, *, tree: Path) -> None:
    """Fill in the figures of the worker, or why it has none. Whatever it made is removed."""
    command = [sys.executable, "-m", "bench.worker", job.subject]
    command += ["--bytes", str(sample.size_bytes), "--dir", str(place), *job.options]
    # a process group of its own, so that a hung worker can be killed with all its helpers
    worker = subprocess.Popen(
        command,
        cwd=tree,
        env=environment(tree=tree),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        process_group=0,
    )
    try:
        out, errors = worker.communicate(timeout=_WORKER_TIMEOUT_S)
        result = json.loads(out.strip().splitlines()[-1])
        sample.figures = result.get("figures", {})
        sample.missing = result.get("missing") or result.get("error", "")
        if "error" in result:
            print(errors[-3000:], file=sys.stderr)
    except subprocess.TimeoutExpired:
        os.killpg(worker.pid, 9)
        worker.communicate()
        sample.missing = f"did not end within {_WORKER_TIMEOUT_S:.0f} s"
    except (IndexError, ValueError):
        sample.missing = f"exit code {worker.returncode}: {errors.strip()[-300:]}"
    finally:
        shutil.rmtree(place, ignore_errors=True)
        for left in Path("/dev/shm").glob(f"{MEMORY_PREFIX}{worker.pid}-*"):
            shutil.rmtree(left, ignore_errors=True)
        hugepages.clean()


def _rounds_of(results: Results) -> str:
    """How many rounds each size got, as text."""
    counts = {
        size: len({one.round for one in results.samples if one.size_bytes == size})
        for size in results.sizes()
    }
    return ", ".join(f"{report.size_name(size)}: {count}" for size, count in counts.items())


def _write(
    results: Results, described: dict[str, str], main_size: int, out: Path, name: str
) -> None:
    """Write report and samples below `out`; print the first half of the report."""
    out.mkdir(parents=True, exist_ok=True)
    prefix = out / name
    text = report.markdown(results, machine=described, main=main_size)
    prefix.with_suffix(".md").write_text(text)
    document = {"machine": described, "main_bytes": main_size, "samples": results.as_json()}
    prefix.with_suffix(".json").write_text(json.dumps(document, indent=1))
    print(text.split("## How each figure grows")[0])
    print(f"{prefix}.md, {prefix}.json, {len(BARS)} bars", file=sys.stderr)


def _plan(options: argparse.Namespace) -> Plan:
    return Plan(
        sizes=tuple(size * _MIB for size in options.sizes),
        main=options.main * _MIB,
        rounds=options.rounds,
        side_rounds=options.side_rounds,
        minutes=options.minutes,
        wait_s=1.0,
        steps=4,
        peers=not options.no_peers,
        pages=_PAGES[options.pages],
    )


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    parser.add_argument("--minutes", type=float, default=14.0, help="time budget")
    parser.add_argument("--rounds", type=int, default=5, help="of the main size, at most")
    parser.add_argument("--side-rounds", type=int, default=2, help="of the other sizes, at most")
    parser.add_argument(
        "--sizes", type=int, nargs="+", default=[64, 256, 1024, 2048, 4096], metavar="MIB"
    )
    parser.add_argument("--main", type=int, default=2048, metavar="MIB", help="size of the bars")
    parser.add_argument("--dir", type=Path, default=ROOT / "build", help="on the disk to measure")
    parser.add_argument("--out", type=Path, default=ROOT / "bench" / "results")
    parser.add_argument("--name", help="of the result files; default: from the machine")
    parser.add_argument("--no-peers", action="store_true", help="only keepstep and the floors")
    parser.add_argument(
        "--pages",
        choices=_PAGES,
        default="small",
        help="of keepstep's slots and the floors' memory; huge ones need root",
    )
    parser.add_argument("--only", default="", help="only subjects whose name has this in it")
    return parser.parse_args()


if __name__ == "__main__":
    raise SystemExit(main())
