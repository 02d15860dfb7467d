"""The driver: `python -m bench` measures every subject in interleaved rounds.

A round measures every subject once, in an order that rotates from round to round. Rounds end when
the time budget is used up: a slower machine gets fewer rounds, but not fewer figures.
"""

from __future__ import annotations

import argparse
import compileall
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path

from bench import hugepages, machine, report
from bench.floors import CopyAndFio
from bench.ours import OURS, KeepstepLazy
from bench.peers import PEERS, FastPersist
from bench.processes import MEMORY_PREFIX, ROOT, environment
from bench.results import Results, Sample
from bench.worker import PARTS
from tests.hugetlbfs import Unavailable

_WORKER_TIMEOUT_S = 240.0
_MEASURES = "blocked,durable,inflation,lost"
_PAGES = {"small": (False,), "huge": (True,), "both": (False, True)}


@dataclass(frozen=True)
class Job:
    """The command line of one worker, and whether its memory is on huge pages."""

    subject: str
    options: tuple[str, ...] = ()
    huge_pages: bool = False


def jobs(number: int, *, pages: Sequence[bool] = (False,), peers: bool = False) -> list[Job]:
    """The jobs of a round. keepstep and its floors are measured on each kind of `pages`, huge
    (True) or not, one right after the other; other tools have memory of their own."""
    found = [Job(part, (), huge) for part in PARTS for huge in pages]
    for saver in OURS:
        measures = f"{_MEASURES},busy" if saver is KeepstepLazy else _MEASURES
        found += [Job(saver.name, ("--measures", measures), huge) for huge in pages]
    found += [Job(CopyAndFio.name, ("--measures", "durable,busy,lost"), huge) for huge in pages]
    if peers:
        # some take minutes, so later rounds have only the fastest of them
        present = (FastPersist,) if number else PEERS
        found += [Job(saver.name, ("--measures", _MEASURES, "--steps", "2")) for saver in present]
    turn = number * 3 % len(found)
    return found[turn:] + found[:turn]


def main() -> None:
    options = _options()
    pages, size = _PAGES[options.pages], options.size << 20
    directory = options.dir / f"keepstep-bench-{os.getpid()}"
    directory.mkdir(parents=True)
    results = Results()
    try:
        described = machine.describe(directory)
        began = time.monotonic()
        for number in range(options.rounds):
            # as long as those before it
            ends_s = (time.monotonic() - began) * (number + 1) / max(number, 1)
            if number and ends_s > options.minutes * 60:
                break
            for job in jobs(number, pages=pages, peers=not options.no_peers):
                if re.search(options.only, job.subject):
                    results.samples.append(measure(job, number, size, directory))
        described["took"] = f"{(time.monotonic() - began) / 60:.1f} minutes"
        described["rounds"] = str(len({sample.round for sample in results.samples}))
    finally:
        shutil.rmtree(directory, ignore_errors=True)
    options.out.mkdir(parents=True, exist_ok=True)
    prefix = options.out / (options.name or machine.slug())
    text = report.markdown(results, machine=described, size_bytes=size, pages=pages)
    prefix.with_suffix(".md").write_text(text)
    samples = [asdict(sample) for sample in results.samples]
    document = {"machine": described, "size_bytes": size, "samples": samples}
    prefix.with_suffix(".json").write_text(json.dumps(document, indent=1))
    print(text.split("## Every figure")[0])
    print(f"{prefix}.md, {prefix}.json", file=sys.stderr)


def measure(
    job: Job, number: int, size_bytes: int, directory: Path, *, tree: Path = ROOT, note: str = ""
) -> Sample:
    """Run one worker of the checkout in `tree`, and print how it went."""
    sample = Sample(job.subject, number, huge_pages=job.huge_pages)
    for package in ("lib", "sidecar"):  # as pip does; PYTHONDONTWRITEBYTECODE may be set
        compileall.compile_dir(tree / package / "src", quiet=1)
    began = time.monotonic()
    try:
        with hugepages.reserved(size_bytes, directory) if job.huge_pages else nullcontext():
            _work(job, sample, size_bytes, directory / "worker", tree=tree)
    except Unavailable as error:
        sample.missing = str(error)
    sample.seconds = time.monotonic() - began
    verdict = sample.missing.splitlines()[0][:80] if sample.missing else "ok"
    print(
        f"round {number + 1}  {sample.title:<40} {sample.seconds:6.1f} s  {note}{verdict}",
        file=sys.stderr,
        flush=True,
    )
    return sample


def _work(job: Job, sample: Sample, size_bytes: int, place: Path, *, tree: Path) -> None:
    """Fill in the figures of the worker, or why it has none. Whatever it made is removed."""
    command = [sys.executable, "-m", "bench.worker", job.subject]
    command += ["--bytes", str(size_bytes), "--dir", str(place), *job.options]
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


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    parser.add_argument("--minutes", type=float, default=14.0, help="time budget")
    parser.add_argument("--rounds", type=int, default=5, help="at most")
    parser.add_argument("--size", type=int, default=2048, metavar="MIB", help="of the state")
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
    parser.add_argument("--only", default="", help="only subjects whose name matches this pattern")
    return parser.parse_args()


if __name__ == "__main__":
    main()
