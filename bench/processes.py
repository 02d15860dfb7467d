"""CPU seconds and memory of processes, read from /proc, and a sidecar to measure."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench import hugepages

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


class Sidecar:
    """A sidecar of its own, with its memory in /dev/shm and its volume in `directory`."""

    def __init__(
        self, directory: Path, *, slots: int = 4, keep: int = 2, options: tuple[str, ...] = ()
    ) -> None:
        self.directory = directory
        self.options = options
        self.memory_dir = Path(
            tempfile.mkdtemp(prefix=f"{MEMORY_PREFIX}{os.getpid()}-", dir="/dev/shm")
        )
        self.socket = self.memory_dir / "sidecar.sock"
        mount = hugepages.mount()
        self._huge = None if mount is None else mount / self.memory_dir.name
        self._slots, self._keep = slots, keep
        self._process: subprocess.Popen[bytes] | None = None
        self._log = directory / "sidecar.log"

    @property
    def pid(self) -> int:
        """Process id of the running sidecar."""
        assert self._process is not None
        return self._process.pid

    def start(self, *, timeout_s: float = 30.0) -> float:
        """Start the sidecar. Returns the seconds until its socket exists. Raises RuntimeError."""
        self.directory.mkdir(parents=True, exist_ok=True)
        started = time.perf_counter()
        command = [sys.executable, "-m", "keepstep_sidecar", "--run", "bench"]
        command += ["--memory-dir", str(self.memory_dir), "--volume", str(self.directory)]
        command += ["--slots", str(self._slots), "--keep", str(self._keep)]
        if self._huge is not None:
            command += ["--huge-pages-dir", str(self._huge)]
        command += self.options
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(command, env=environment(), stdout=log, stderr=log)
        while not self.socket.exists():
            if self._process.poll() is not None or time.perf_counter() - started > timeout_s:
                tail = self._log.read_text()[-2000:]
                raise RuntimeError(f"the sidecar did not start ({self._process.poll()}):\n{tail}")
            time.sleep(0.005)
        return time.perf_counter() - started

    def cpu_s(self) -> float:
        """CPU seconds of the sidecar since it started."""
        return cpu_s(self.pid)

    def status(self) -> dict[str, Any]:
        """GET /v1/status."""
        connection = http.client.HTTPConnection("localhost", timeout=10)
        connection.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        connection.sock.connect(str(self.socket))
        try:
            connection.request("GET", "/v1/status")
            return dict(json.loads(connection.getresponse().read()))
        finally:
            connection.close()

    def wait_slots(self) -> None:
        """Wait until every slot of rank 0 is made: their first touch takes seconds per GiB."""
        self._wait(lambda states: len(states) >= self._slots, f"{self._slots} slots")

    def wait_sealed(self) -> None:
        """Wait until rank 0 has an image in memory that is fetched, hashed and ready to restore."""
        self._wait(lambda states: "sealed" in states, "fetched image")

    def _wait(self, reached: Callable[[list[str]], bool], what: str) -> None:
        deadline = time.monotonic() + 120.0
        while not reached([one["state"] for of in self.status()["ranks"] for one in of["slots"]]):
            if time.monotonic() > deadline:
                raise RuntimeError(f"no {what} within 120 s")
            time.sleep(0.02)

    def kill(self) -> None:
        """Send SIGKILL, like an out-of-memory killer. Does nothing if the sidecar does not run."""
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(signal.SIGKILL)
            self._process.wait()
            self.socket.unlink(missing_ok=True)

    def forget_memory(self) -> None:
        """Lose every slot, as if the machine had been switched off. Only while the sidecar does not
        run."""
        shutil.rmtree(self.memory_dir)
        self.memory_dir.mkdir(mode=0o700)
        self._forget_huge()

    def _forget_huge(self) -> None:
        if self._huge is not None:
            shutil.rmtree(self._huge, ignore_errors=True)

    def log_tail(self) -> str:
        """The end of the sidecar's log."""
        return self._log.read_text()[-3000:] if self._log.exists() else ""

    def close(self) -> None:
        """End the sidecar and free its memory. The files on the volume stay."""
        self.kill()
        shutil.rmtree(self.memory_dir, ignore_errors=True)
        self._forget_huge()
