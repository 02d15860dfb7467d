"""Launches, follows, finds and ends the demo's training runs and their processes.

Runs are followed only by their journals. Every process that descends from the demo can be found
and ended, so that nothing is left behind.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import tomllib
from demo_report import Journal
from rich.progress import Progress

from keepstep.steps import StepId

TRAIN = Path(__file__).with_name("train_gpt.py")
RANKS = 2
RUN_LIMIT_S = 300.0
POLL_S = 0.02
KEEPSTEP = (sys.executable, "-m", "keepstep_sidecar.cli")
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone")


class DemoError(Exception):
    """The demo cannot go on; the message says why and where to look."""


# --- processes -------------------------------------------------------------------------------


class Household:
    """All processes that descend from this demo, even detached ones.

    They inherit a mark in their environment, by which exactly these processes are found. A process
    group is not enough: torchrun and `keepstep run` put their children into other sessions.
    """

    def __init__(self) -> None:
        self._mark = f"{os.getpid()}.{time.time_ns()}"

    @property
    def environment(self) -> dict[str, str]:
        """The environment of all runs. Each rank has one thread, because the number of threads
        changes the order of additions."""
        return {**os.environ, "KEEPSTEP_DEMO": self._mark, "OMP_NUM_THREADS": "1"}

    def members(self, variable: str = "") -> list[int]:
        """The ids of all processes, or of those whose environment has `variable` (NAME=value)."""
        markers = {f"KEEPSTEP_DEMO={self._mark}".encode(), variable.encode()} - {b""}
        return [pid for pid in _process_ids() if markers <= _environment_of(pid)]

    def kill_all(self) -> None:
        """Send SIGKILL to every member until none is left, because a supervisor may start another
        one meanwhile."""
        deadline = time.monotonic() + 10.0
        while members := self.members():
            for pid in members:
                kill(pid)
            if time.monotonic() > deadline:
                raise DemoError(f"processes {members} do not die")
            time.sleep(POLL_S)


def kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def _process_ids() -> list[int]:
    return [int(entry) for entry in os.listdir("/proc") if entry.isdecimal()]


def _environment_of(pid: int) -> set[bytes]:
    try:
        return set(Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"))
    except OSError:  # the process ended, or belongs to another user
        return set()


# --- runs ------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What all runs of the demo share."""

    out: Path
    steps: int
    household: Household
    progress: Progress

    @property
    def kept(self) -> Path:
        """The --dir of `keepstep run`."""
        return self.out / "keepstep"


class Run:
    """One training run. After its death it can be launched again, and goes on in the same
    journal."""

    def __init__(self, setting: Setting, name: str, *, keepstep: bool) -> None:
        self.setting = setting
        self.name = name
        self.keepstep = keepstep
        self.journal = Journal(setting.out / f"{name}.jsonl")
        self._output = setting.out / f"{name}.out"
        self._task = setting.progress.add_task(name, total=setting.steps, loss="", start=False)
        self._process: subprocess.Popen[bytes] | None = None
        self._launched = 0.0  # unix seconds, as in the journal

    @property
    def home(self) -> Path:
        """The directory with keepstep's record and the shards of this run."""
        return self.setting.kept / self.name

    @property
    def memory(self) -> Path | None:
        """The directory of the run's shared memory; None before keepstep has recorded it."""
        record = self.home / "sidecar.toml"
        if not record.exists():
            return None
        return Path(tomllib.loads(record.read_text())["memory_dir"])

    def launch(self, *, warm: bool = False) -> None:
        """Start the command. `warm`: fork its processes from one that has imported torch."""
        self.setting.progress.start_task(self._task)
        self._launched = time.time()
        with self._output.open("ab") as output:
            self._process = subprocess.Popen(
                self._command(warm),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=self.setting.household.environment,
                start_new_session=True,  # Ctrl-C reaches only the demo, which then ends all
            )

    def _command(self, warm: bool) -> list[str]:
        train = [
            str(TRAIN),
            "--steps",
            str(self.setting.steps),
            "--log-file",
            str(self.journal.path),
        ]
        torchrun = [*TORCHRUN, "--nproc-per-node", str(RANKS), *train]
        if not self.keepstep:
            return [*torchrun, "--no-keepstep"]
        here = ["--dir", str(self.setting.kept), "--run", self.name]
        restarts = ["--restarts", "1", *(["--warm"] if warm else [])]
        return [*KEEPSTEP, "run", *here, *restarts, "--", *torchrun]

    def follow(self, reached: Callable[[], bool]) -> None:
        """Show progress until `reached()`. Raises DemoError if the run ends before, or takes too
        long."""
        deadline = time.monotonic() + RUN_LIMIT_S
        while not reached():
            code = self._poll()
            self._show()
            if code is not None and not reached():
                raise DemoError(f"run {self.name!r} ended early with {code}:\n{self._tail()}")
            if time.monotonic() > deadline:
                raise DemoError(f"run {self.name!r} takes too long:\n{self._tail()}")
            time.sleep(POLL_S)

    def follow_to(self, step: int) -> None:
        """Follow the run until `step` is finished."""
        self.follow(lambda: self.journal.frontier() >= step)

    def finish(self) -> None:
        """Follow the run to its end. Raises DemoError if it fails."""
        self.follow(lambda: self._poll() is not None)
        self._show()
        if code := self._poll():
            raise DemoError(f"run {self.name!r} failed with {code}:\n{self._tail()}")

    def reap(self) -> None:
        """Reap the launched command after it was killed."""
        if self._process:
            self._process.wait()

    def start_s(self) -> float:
        """Seconds from the launch to the first finished step."""
        return self.journal.finished()[0].wall - self._launched

    def committed(self) -> int:
        """The newest committed step on disk, -1 for none."""
        steps = (StepId.parse(path.name).step for path in self.home.glob("[0-9]*.*-*"))
        return max(steps, default=-1)

    def _poll(self) -> int | None:
        assert self._process, "launch comes first"
        return self._process.poll()

    def _show(self) -> None:
        if (last := self.journal.last()) is not None:
            loss = f"loss {last.loss:.3f}"
            self.setting.progress.update(self._task, completed=last.step + 1, loss=loss)

    def _tail(self) -> str:
        lines = self._output.read_text(errors="replace").splitlines()
        return "\n".join([*lines[-25:], f"(all of it: {self._output})"])
