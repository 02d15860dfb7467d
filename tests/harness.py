"""Runs a real sidecar process on a real socket, memory and disk; checks its images; waits for
conditions."""

from __future__ import annotations

import asyncio
import glob
import inspect
import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import time
import tracemalloc
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from keepstep.errors import ForeignError, ImageError, TornError
from keepstep.image import (
    ControlPage,
    Layout,
    check_control,
    chunk_bounds,
    read_control,
    read_layout,
)
from keepstep.image.control_page import Manifest
from keepstep.image.xxh3 import xxh3_128
from keepstep.steps import StepId
from tests import warm

ROOT = Path(__file__).parents[1]
PROGRAM = (sys.executable, "-m", "keepstep_sidecar")


def eventually(
    condition: Callable[[], Any],
    *,
    within_s: float = 60.0,
    what: str | Callable[[], str] = "",
    every_s: float = 0.01,
) -> Any:
    """Wait for the first true value of `condition` and return it. Fails the test if there is none
    in time. `what`: what the test waits for, or a function that says so after the time is up."""
    deadline = time.monotonic() + within_s
    while True:
        value = condition()
        if value:
            return value
        if time.monotonic() > deadline:
            text = what() if callable(what) else what
            pytest.fail(f"not within {within_s} s: {text or condition}")
        time.sleep(every_s)


async def until(condition: Callable[[], Any], *, within_s: float = 60.0, what: str = "") -> Any:
    """`eventually` on an event loop. `condition` may also return an awaitable of the value."""
    deadline = time.monotonic() + within_s
    while True:
        value = condition()
        if inspect.isawaitable(value):
            value = await value
        if value:
            return value
        if time.monotonic() > deadline:
            pytest.fail(f"not within {within_s} s: {what or condition}")
        await asyncio.sleep(0.01)


def free_port() -> int:
    """A port of this machine that nobody listens at now. It lies below those that the kernel gives
    to connections, so that none of them takes it before it is used."""
    while True:
        port = secrets.choice(range(28_000, 32_768))
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


def peak_of(call: Callable[[], object]) -> int:
    """The most bytes that Python's objects take while it runs."""
    tracemalloc.start()
    try:
        call()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def files_below(directory: Path, *endings: str) -> list[Path]:
    """All files below `directory` whose names have one of these endings. Works while other
    processes make and remove directories there; `Path.rglob` fails if a directory goes then."""
    return [
        Path(place) / name
        for place, _, names in os.walk(directory)
        for name in names
        if name.endswith(endings)
    ]


def matching(directory: Path, *patterns: str) -> list[Path]:
    """What matches one of these patterns below `directory`, while other processes make and remove
    directories there."""
    return [
        directory / name for pattern in patterns for name in glob.glob(pattern, root_dir=directory)
    ]


def inodes(paths: Iterable[Path]) -> dict[Path, int]:
    """The inodes of those files that still exist: other processes may remove some meanwhile."""
    found = {}
    for path in paths:
        with suppress(FileNotFoundError):
            found[path] = path.stat().st_ino
    return found


def flip(path: Path, at: int) -> None:
    """Change one bit of this byte, as a drive might."""
    with path.open("r+b") as file:
        byte = os.pread(file.fileno(), 1, at)[0]
        os.pwrite(file.fileno(), bytes([byte ^ 1]), at)


def digests(layout: Layout, view: memoryview) -> list[bytes]:
    """The digests of all chunks of an image, in order."""
    bounds = (chunk_bounds(layout, chunk) for chunk in range(layout.chunk_count))
    return [xxh3_128(view[begin:end]) for begin, end in bounds]


def layout_of(path: Path) -> Layout:
    """The layout of a shard. Errors name its path."""
    with path.open("rb") as file:
        try:
            return read_layout(file.fileno())
        except ImageError as error:
            raise type(error)(error.reason, path=path) from None


def control_of(path: Path) -> ControlPage:
    """The control page of a shard, whose seal is checked."""
    with path.open("rb") as file:
        return read_control(file.fileno(), read_layout(file.fileno()))


def verify_image(
    view: memoryview,
    layout: Layout,
    *,
    path: Path | str | None = None,
    run: str | None = None,
    step_id: StepId | None = None,
) -> ControlPage:
    """Check a whole image against its seal and every digest. Raises ImageError or a subclass."""
    if len(view) != layout.size_bytes:
        raise TornError(f"{len(view)} bytes, but the image has {layout.size_bytes}", path=path)
    try:
        manifest = Manifest.from_layout(layout, bytes(view[layout.digests_begin :]), run=run)
    except ImageError as error:
        raise type(error)(error.reason, path=path) from None
    check_control(manifest.control, layout, step_id=step_id, path=path)
    for chunk in manifest.chunk_indices:
        begin, end = manifest.bounds_of_chunk(chunk)
        manifest.verify_chunk(chunk, view[begin:end], path=path)
    if bytes(view[: len(layout.header)]) != layout.header:  # the layout may come from elsewhere
        raise ForeignError(f"its header is not that of layout {layout.id}", path=path)
    return manifest.control


def torchrun(
    world: int, script: Path, *arguments: object, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run `world` ranks of a script to their end under torchrun, as users do."""
    program = warm.python()
    command = [program, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", str(world), str(script), *map(str, arguments)]
    variables = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    variables |= {"PYTHON_EXEC": program, **environment}
    return subprocess.run(command, env=variables, capture_output=True, text=True, timeout=100)


class SidecarProcess:
    """Controls `python -m keepstep_sidecar` on directories of its own. After a `kill`, `start`
    starts it again on the same directories."""

    def __init__(self, run: str, memory: Path, volume: Path, log: Path) -> None:
        self.run, self.memory, self.volume, self.log = run, memory, volume, log
        self.program: tuple[str, ...] = PROGRAM
        self.huge: Path | None = None
        """A hugetlbfs for the slots, used as long as it has free pages."""
        self.process: subprocess.Popen[bytes] | warm.Process | None = None

    @property
    def socket(self) -> Path:
        return self.memory / "sidecar.sock"

    @property
    def root(self) -> Path:
        """The run's directory on the volume."""
        return self.volume / self.run

    def published(self) -> list[int]:
        """The numbers of the steps that readers see, in order."""
        return sorted(StepId.parse(path.name).step for path in self.root.glob("0*"))

    def lose_memory(self) -> None:
        """Remove the memory, as when a pod is deleted. The sidecar must be dead."""
        for path in (*self.memory.iterdir(), *(self.huge.iterdir() if self.huge else ())):
            shutil.rmtree(path) if path.is_dir() else path.unlink()

    def slots(self, rank: int) -> list[Path]:
        """The slots of a rank, on small and on huge pages."""
        roots = (self.memory, self.huge) if self.huge else (self.memory,)
        return [path for root in roots for path in root.glob(f"rank-{rank:05d}/*.slot")]

    def start(self, *options: str, **environment: str) -> SidecarProcess:
        command = [*self.program, "--run", self.run]
        command += ["--memory-dir", str(self.memory), "--volume", str(self.volume), *options]
        if self.huge is not None:
            command += ["--huge-pages-dir", str(self.huge)]
        with self.log.open("ab") as log:
            variables = {**os.environ, **environment}
            if self.program[0] == sys.executable:
                self.process = warm.Process(
                    command[1:], modules=warm.SIDECAR, stdout=log, env=variables
                )
            else:
                self.process = subprocess.Popen(command, stdout=log, stderr=log, env=variables)
        eventually(self._answers, what=f"the sidecar's socket; its log is {self.log}")
        return self

    def _answers(self) -> bool:
        assert self.process is not None
        if self.process.poll() is not None:
            pytest.fail(f"the sidecar ended with {self.process.returncode}: {self.text()[-3000:]}")
        with socket.socket(socket.AF_UNIX) as probe:
            return probe.connect_ex(str(self.socket)) == 0

    def text(self) -> str:
        return self.log.read_text(errors="replace")

    def kill(self) -> None:
        """Send SIGKILL, and wait until the sidecar is gone."""
        assert self.process is not None
        self.process.kill()
        self.process.wait()

    def terminate(self, *, within_s: float = 30.0) -> int:
        """Send SIGTERM, on which the sidecar flushes and ends. Returns its exit code."""
        assert self.process is not None
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(within_s)

    def get(self, route: str) -> Any:
        """GET a JSON document."""
        import http.client

        connection = http.client.HTTPConnection("localhost", timeout=10)
        connection.sock = socket.socket(socket.AF_UNIX)
        try:
            connection.sock.connect(str(self.socket))
            connection.request("GET", route)
            return json.loads(connection.getresponse().read())
        finally:
            connection.close()

    def end(self) -> None:
        if self.process is not None and self.process.poll() is None:
            self.kill()
