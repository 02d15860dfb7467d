"""CPU seconds and memory of processes, read from /proc, and a sidecar to measure."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from bench import hugepages
from tests.harness import PROGRAM, SidecarProcess, eventually

ROOT = Path(__file__).resolve().parent.parent
MEMORY_PREFIX = "keepstep-bench-"


def environment(*, tree: Path = ROOT, **extra: str) -> dict[str, str]:
    """This process's environment with the packages of the checkout `tree` first on PYTHONPATH, and
    with bytecode, which installed packages have."""
    parts = [str(tree / "lib/src"), str(tree / "sidecar/src"), str(tree)]
    parts += filter(None, [os.environ.get("PYTHONPATH")])
    path = os.pathsep.join(dict.fromkeys(parts))
    return {**os.environ, "PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "", **extra}


def cpu_s(pid: int) -> float:
    """CPU seconds of all threads of a process, to the nanosecond; 0 if it is gone."""
    try:
        # CPUCLOCK_SCHED of another process: include/linux/posix-timers.h
        return time.clock_gettime((~pid << 3) | 2)
    except OSError:
        return 0.0


def tree_cpu_s(pid: int | None = None) -> float:
    """CPU seconds of a process, of its live descendants, and of its children that ended."""
    pid = pid or os.getpid()
    ended = 0.0
    if pid == os.getpid():
        times = os.times()
        ended = times.children_user + times.children_system
    return cpu_s(pid) + ended + sum(tree_cpu_s(child) for child in _children(pid))


def _children(pid: int) -> list[int]:
    found: list[int] = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):  # the thread ended in between
            found += [int(word) for word in task.read_text().split()]
    return found


def own_memory_kib(pid: int) -> int:
    """RssAnon and RssFile of a process, which leaves shared memory out, KiB."""
    rows = dict(row.split(":") for row in Path(f"/proc/{pid}/status").read_text().splitlines())
    return sum(int(rows[name].split()[0]) for name in ("RssAnon", "RssFile"))


def memory_limit_bytes() -> int:
    """The machine's memory, or the control group's limit if that is lower."""
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    with contextlib.suppress(OSError, ValueError):  # "max", or no such file
        memory = min(memory, int(Path("/sys/fs/cgroup/memory.max").read_text()))
    return memory


class Sidecar(SidecarProcess):
    """A sidecar of its own, with its memory in /dev/shm and its volume in `directory`."""

    def __init__(self, directory: Path, *, slots: int = 4, options: tuple[str, ...] = ()) -> None:
        memory = tempfile.mkdtemp(prefix=f"{MEMORY_PREFIX}{os.getpid()}-", dir="/dev/shm")
        super().__init__("bench", Path(memory), directory, directory / "sidecar.log")
        self.program = ("env", *PROGRAM)  # started cold, as users do
        self._slots = slots or 2
        chosen = ("--slots", str(slots)) if slots else ()
        self._options = (*chosen, "--keep", "2", *options)
        if (mount := hugepages.mount()) is not None:
            self.huge = mount / self.memory.name
            self.huge.mkdir()

    def begin(self) -> float:
        """Start the sidecar. Returns the seconds until it listens."""
        self.volume.mkdir(parents=True, exist_ok=True)
        started = time.perf_counter()
        with _errors():
            self.start(*self._options, **environment())
        return time.perf_counter() - started

    @property
    def pid(self) -> int:
        """Process id of the running sidecar."""
        assert self.process is not None
        return self.process.pid

    def wait_slots(self) -> None:
        """Wait until every slot of rank 0 is made: their first touch takes seconds per GiB."""
        self._wait(lambda states: len(states) >= self._slots, f"{self._slots} slots")

    def wait_sealed(self) -> None:
        """Wait until rank 0 has an image in memory that is fetched, hashed and ready to restore."""
        self._wait(lambda states: "sealed" in states, "fetched image")

    def _wait(self, reached: Callable[[list[str]], bool], what: str) -> None:
        def there() -> bool:
            ranks = self.get("/v1/status")["ranks"]
            return reached([slot["state"] for of in ranks for slot in of["slots"]])

        with _errors():
            eventually(there, within_s=120.0, what=what)

    def close(self) -> None:
        """End the sidecar and free its memory. The files on the volume stay."""
        self.end()
        shutil.rmtree(self.memory, ignore_errors=True)
        if self.huge is not None:
            shutil.rmtree(self.huge, ignore_errors=True)


@contextlib.contextmanager
def _errors() -> Iterator[None]:
    """What fails a test is an error here."""
    try:
        yield
    except pytest.fail.Exception as error:
        raise RuntimeError(str(error)) from None
