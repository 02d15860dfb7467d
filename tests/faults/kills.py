"""`make soak`: strikes two trainers and a sidecar at random moments, and checks every promise.

`python -m tests.faults.kills --kills 500 --minutes 20` is a slice: it begins a run of its own, and
adds what it did to a file of results (docs/soak.json) while it goes, so that slices add up, also
those that were stopped with Ctrl-C, and two that ran beside each other. What counts as a kill is a
SIGKILL of trainers, of the sidecar, or of both at once. The first broken invariant ends a slice
with 1; what is left to look at stays in its directory.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import json
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tests import hugetlbfs
from tests.faults.processes import WORLD, Life
from tests.faults.soak import Soak
from tests.harness import SidecarProcess

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "docs" / "soak.json"
_WRITE_EVERY = 25
_HUGE_PAGES, _HUGE_WIDTH = 320, 12_000  # eight slots of 74 MB
_LIVES_KEPT = 4


# --- what strikes ----------------------------------------------------------------------------


def _kill_one(soak: Soak, life: Life) -> None:
    life.kill([soak.random.randrange(WORLD)])


def _kill_both(soak: Soak, life: Life) -> None:
    life.kill(range(WORLD))


def _kill_all(soak: Soak, life: Life) -> None:
    soak.sidecar.kill()
    _moment(soak, 0.05)
    life.end()
    soak.undisturbed = False
    soak.sidecar.start()


def _kill_all_with_memory(soak: Soak, life: Life) -> None:
    soak.sidecar.kill()
    life.end()
    soak.sidecar.lose_memory()
    soak.forget_memory(life)
    soak.sidecar.start()


def _terminate(soak: Soak, life: Life) -> None:
    """SIGTERM: the trainers' handler raises wherever they are, and they close."""
    life.terminate()
    for process in life.processes:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(20)
        assert process.poll() is not None, f"SIGTERM did not end it\n{life.dump()}"


def _let_end(soak: Soak, life: Life) -> None:
    """They make the steps that they were told to, and close."""
    for rank, process in enumerate(life.processes):
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(60)
        assert process.poll() == 0, f"rank {rank}: {process.poll()}\n{life.dump()}"
        event = life.events(rank)[-1]
        assert event["event"] == "closed", f"rank {rank} made its last step: {event}"


def _kill_sidecar(soak: Soak, life: Life) -> None:
    soak.sidecar.kill()
    soak.undisturbed = False
    _moment(soak, 0.1)
    soak.sidecar.start()
    soak.until_committed_again(life)


def _kill_sidecar_and_memory(soak: Soak, life: Life) -> None:
    soak.sidecar.kill()
    soak.sidecar.lose_memory()
    soak.forget_memory(life)
    soak.sidecar.start()
    soak.until_committed_again(life)


def _empty_memory(soak: Soak, life: Life) -> None:
    """Under a living sidecar, and with it the socket."""
    soak.sidecar.lose_memory()
    soak.forget_memory(life)
    soak.until_committed_again(life)


Strike = Callable[[Soak, Life], None]

ENDS: dict[str, Strike] = {
    "a trainer": _kill_one,
    "both trainers": _kill_both,
    "trainers and sidecar": _kill_all,
    "trainers and sidecar, memory emptied": _kill_all_with_memory,
    "trainers told to end (SIGTERM)": _terminate,
    "trainers that end by themselves": _let_end,
}
"""What ends a life; the last two kill nobody."""

WHILE_TRAINING: dict[str, Strike] = {
    "the sidecar, trainers go on": _kill_sidecar,
    "the sidecar, memory emptied, trainers go on": _kill_sidecar_and_memory,
    "memory emptied, sidecar and trainers go on": _empty_memory,
}
"""What a life must survive; the last kills nobody."""

STARTING = "a trainer while it starts"
NO_KILL = frozenset(
    {
        "trainers told to end (SIGTERM)",
        "trainers that end by themselves",
        "memory emptied, sidecar and trainers go on",
    }
)


def _moment(soak: Soak, most_s: float) -> None:
    time.sleep(soak.random.uniform(0.0, most_s))  # the moment is what is random here


def live_once(soak: Soak, done: Counter[str], *, ends: list[str], whiles: list[str]) -> None:
    """One life: it restores, trains, meets what it meets, and everything is checked."""
    dice = soak.random
    end = dice.choice(ends)
    steps = dice.randrange(1, 12) if ENDS[end] is _let_end else 1_000_000
    with soak.living(steps=steps, waiting=dice.choice([0.0, 0.2])) as life:
        if dice.random() < 0.25:
            _moment(soak, 0.3)
            _kill_one(soak, life)
            done[STARTING] += 1
        else:
            soak.until_steps(life, 1)
            soak.check_start(life)
            if whiles and ENDS[end] is not _let_end and dice.random() < 0.15:
                _moment(soak, 0.1)
                what = dice.choice(whiles)
                done[what] += 1
                WHILE_TRAINING[what](soak, life)
            _moment(soak, 0.2)
            done[end] += 1
            ENDS[end](soak, life)
        life.end()
        if not soak.epochs or not life.restored() or life.restored()[0]["epoch"] != soak.epochs[-1]:
            soak.check_start(life)
        soak.learn(life)
    soak.check_memory()
    soak.check_promised()


# --- a slice ---------------------------------------------------------------------------------


def kills_in(struck: Counter[str]) -> int:
    """How many of the strikes were a SIGKILL."""
    return sum(count for what, count in struck.items() if what not in NO_KILL)


def run(
    soak: Soak,
    struck: Counter[str],
    *,
    kills: int,
    seconds: float,
    report: Callable[[float], None],
    only: str = "",
) -> None:
    """Lives until there were so many kills, or the time is up; `report` hears of the seconds so
    far. Raises AssertionError for what does not hold."""
    ends = [name for name in ENDS if only in name] or list(ENDS)
    whiles = [name for name in WHILE_TRAINING if only in name]
    began = time.monotonic()
    while kills_in(struck) < kills and time.monotonic() - began < seconds:
        live_once(soak, struck, ends=ends, whiles=whiles)
        _forget_old_lives(soak)
        if soak.lives % _WRITE_EVERY == 0:
            report(time.monotonic() - began)


def _forget_old_lives(soak: Soak) -> None:
    for path in soak.directory.glob(f"life-{soak.lives - _LIVES_KEPT}-*"):
        path.unlink()
    for path in soak.directory.glob("meeting-*"):
        path.unlink()


def main() -> int:
    options = _options()
    seed = options.seed if options.seed is not None else random.randrange(1 << 30)
    options.dir.mkdir(parents=True, exist_ok=True)
    directory = Path(tempfile.mkdtemp(prefix="soak-", dir=options.dir))
    memory = Path(tempfile.mkdtemp(prefix="keepstep-soak-", dir="/dev/shm"))
    print(f"seed {seed}, in {directory}", flush=True)
    with _pages(directory / "pages", huge=options.huge_pages) as pages:
        code = _slice(options, seed, directory, memory, pages)
    if not code:
        shutil.rmtree(directory)
    return code


@contextlib.contextmanager
def _pages(directory: Path, *, huge: bool) -> Iterator[Path | None]:
    """A hugetlbfs with room for all slots; None where small pages are asked for."""
    if not huge:
        yield None
        return
    with hugetlbfs.reserved(_HUGE_PAGES), hugetlbfs.mounted(directory) as mounted:
        yield mounted


def _slice(
    options: argparse.Namespace, seed: int, directory: Path, memory: Path, pages: Path | None
) -> int:
    sidecar = SidecarProcess("soak", memory, directory / "volume", directory / "sidecar.log")
    sidecar.huge = pages
    soak = Soak(sidecar, directory, random.Random(seed))
    if pages is not None:
        soak.width = _HUGE_WIDTH
    began, commit, struck = time.monotonic(), _commit(), Counter[str]()
    broken: list[str] = []

    def report(seconds: float) -> None:
        words = f"make soak KILLS={options.kills}"
        words += " SOAK_ARGS=--huge-pages" if options.huge_pages else ""
        about = {"command": words, "commit": commit, "seed": seed}
        done = _described(soak, struck)
        add(
            options.results,
            {**about, "seconds": round(seconds), **done, "broken_invariants": broken},
        )
        print(f"{kills_in(struck)} kills, {soak.lives} lives, {seconds:.0f} s", flush=True)

    try:
        sidecar.start()
        seconds = options.minutes * 60
        run(soak, struck, kills=options.kills, seconds=seconds, report=report, only=options.only)
    except KeyboardInterrupt:
        print("stopped; what was done so far counts", file=sys.stderr)
    except BaseException as error:  # what pytest.fail raises is no Exception
        broken.append(str(error).splitlines()[0] if str(error) else repr(error))
        print(f"BROKEN in life {soak.lives}: {type(error).__name__}: {error}", file=sys.stderr)
        sidecar.end()
        shutil.copytree(memory, directory / "memory", ignore=_sockets)
        if pages is not None:
            shutil.copytree(pages, directory / "memory-huge")
    finally:
        sidecar.end()
        shutil.rmtree(memory, ignore_errors=True)
        if soak.lives:
            report(time.monotonic() - began)
    return int(bool(broken))


def _described(soak: Soak, struck: Counter[str]) -> dict[str, Any]:
    return {
        "kills": kills_in(struck),
        "struck": dict(sorted(struck.items())),
        "lives": soak.lives,
        "steps_trained": soak.trained,
        "restored_from": dict(sorted(soak.tiers.items())),
        "finished_steps_lost": {str(lost): n for lost, n in sorted(soak.lost.items())},
    }


def _sockets(directory: str, names: list[str]) -> list[str]:
    return [name for name in names if name.endswith(".sock")]


def _commit() -> str:
    """The commit that made the code under test what it is."""

    def git(*words: str) -> str:
        command = ["git", "-C", str(ROOT), *words]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    try:
        changed = git("status", "--porcelain", "--untracked-files=no", "--", "lib", "sidecar")
        commit = git("log", "-1", "--format=%h", "--", "lib", "sidecar")
        return commit + (" (with changes)" if changed else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


# --- results ---------------------------------------------------------------------------------


def add(path: Path, slice_: dict[str, Any]) -> None:
    """Put a slice into the file, or the place of what it was before; add all slices up."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch()
    with path.open("r+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        slices = json.loads(file.read() or '{"slices": []}')["slices"]
        same = ("seed", "commit")
        slices = [other for other in slices if any(other[key] != slice_[key] for key in same)]
        slices.append(slice_)
        file.seek(0)
        file.write(json.dumps({"all": totals(slices), "slices": slices}, indent=1) + "\n")
        file.truncate()


def totals(slices: list[dict[str, Any]]) -> dict[str, Any]:
    """All slices as one."""
    summed: dict[str, Any] = {
        key: sum(slice_[key] for slice_ in slices) for key in ("kills", "lives", "steps_trained")
    }
    for key in ("struck", "restored_from", "finished_steps_lost"):
        counts: Counter[str] = Counter()
        for slice_ in slices:
            counts.update(slice_[key])
        summed[key] = dict(sorted(counts.items()))
    lost = sorted(Counter({int(k): n for k, n in summed["finished_steps_lost"].items()}).elements())
    summed["finished_steps_lost_median"] = lost[len(lost) // 2] if lost else 0
    summed["finished_steps_lost_max"] = lost[-1] if lost else 0
    summed["broken_invariants"] = sum(len(slice_["broken_invariants"]) for slice_ in slices)
    return summed


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.faults.kills", description=__doc__)
    parser.add_argument("--kills", type=int, default=500)
    parser.add_argument("--minutes", type=float, default=60.0, help="time budget")
    parser.add_argument("--seed", type=int, help="default: another one each time")
    parser.add_argument("--only", default="", help="only strikes whose name has this in it")
    parser.add_argument("--dir", type=Path, default=ROOT / "build", help="on the drive to use")
    parser.add_argument("--huge-pages", action="store_true", help="slots on them (root)")
    parser.add_argument("--results", type=Path, default=RESULTS)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
