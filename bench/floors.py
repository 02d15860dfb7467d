"""The floors: how long the machine itself takes to copy, write and read as many bytes, and what
both take from a training beside them, whatever the writer does else."""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import shutil
import statistics
import subprocess
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from bench import hugepages
from bench.processes import cpu_s
from bench.savers import Saver
from bench.state import State

CHUNK_BYTES = 8 << 20
_THREADS = 4
Figures = dict[str, float]


def copier(state: State) -> Callable[[], None]:
    """Copies the state into touched memory: one memmove per tensor, without the GIL."""
    import torch

    from bench.state import fill

    # functions of a CDLL release the GIL, ctypes.memmove does not
    move = ctypes.CDLL(None).memmove
    move.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]
    sources = list(state.tensors().values())
    ones = torch.ones(1 << 20, dtype=torch.uint8)
    target = fill(torch.empty(sum(source.nbytes for source in sources), dtype=torch.uint8), ones)

    def copy() -> None:
        address = target.data_ptr()
        for source in sources:
            move(address, source.data_ptr(), source.nbytes)
            address += source.nbytes

    copy()
    return copy


def hash_cpu_s(state: State) -> float:
    """The CPU time of one digest of each chunk of the state."""
    import torch
    import xxhash

    begun = time.thread_time()
    for tensor in state.tensors().values():
        data = memoryview(tensor.detach().reshape(-1).view(torch.uint8).numpy())
        for begin in range(0, len(data), CHUNK_BYTES):
            xxhash.xxh3_128_digest(data[begin : begin + CHUNK_BYTES])
    return time.thread_time() - begun


def memcpy(size_bytes: int, *_: object, repeats: int = 5) -> Figures:
    """The time and the CPU time of one copy of the state, and the CPU time to digest a GB."""
    from bench.state import gpt

    state = gpt(size_bytes)
    copy = copier(state)
    times, spent = [], []
    for _ in range(repeats):
        cpu, begun = cpu_s(os.getpid()), time.perf_counter()
        copy()
        times.append(time.perf_counter() - begun)
        spent.append(cpu_s(os.getpid()) - cpu)
    hashed = statistics.median(hash_cpu_s(state) for _ in range(repeats))
    return {
        "memcpy_s": statistics.median(times),
        "memcpy_cpu_s": statistics.median(spent),
        "hash_cpu_s_per_gb": hashed * 1e9 / state.size_bytes,
    }


_FIO_WRITES = {
    "libaio_qd16": ["--ioengine=libaio", "--iodepth=16"],
    "psync": ["--ioengine=psync"],
    "psync_4jobs": ["--ioengine=psync", "--numjobs=4"],
}


def disk(size_bytes: int, directory: Path) -> Figures:
    """fio's best O_DIRECT write of 8 MiB blocks with end_fsync into a new file, the same over that
    file, and the best O_DIRECT read."""
    if shutil.which("fio") is None:
        raise RuntimeError("fio is not installed: it is the floor of every durable figure")
    directory.mkdir(parents=True, exist_ok=True)
    file = directory / "fio.dat"
    size_bytes = size_bytes // (4 * CHUNK_BYTES) * (4 * CHUNK_BYTES) or 4 * CHUNK_BYTES
    figures: Figures = {}
    try:
        for name, options in _FIO_WRITES.items():
            file.unlink(missing_ok=True)
            run = _fio(file, size_bytes, "write", [*options, "--end_fsync=1"])
            figures[f"fio_{name}_s"] = run["seconds"]
            figures[f"fio_{name}_cpu_s"] = run["cpu_s"]
        best = min(_FIO_WRITES, key=lambda name: figures[f"fio_{name}_s"])
        figures["fio_write_s"] = figures[f"fio_{best}_s"]
        figures["fio_write_cpu_s_per_gb"] = figures[f"fio_{best}_cpu_s"] * 1e9 / size_bytes
        over = _fio(file, size_bytes, "write", [*_FIO_WRITES[best], "--end_fsync=1"])
        figures["fio_over_s"] = over["seconds"]
        reads = [_fio(file, size_bytes, "read", options)["seconds"] for options in _READS]
        figures["fio_read_s"] = min(reads)
        figures["bare_read_s"] = min(bare_read(file) for _ in range(2))
        figures["read_s"] = min(figures["fio_read_s"], figures["bare_read_s"])
    finally:
        file.unlink(missing_ok=True)
    return figures


_READS = (["--ioengine=libaio", "--iodepth=16"], ["--ioengine=psync", "--numjobs=4"])


def _fio(file: Path, size_bytes: int, direction: str, options: list[str]) -> Figures:
    jobs = 4 if "--numjobs=4" in options else 1
    share = size_bytes // jobs
    command = ["fio", "--name=floor", f"--filename={file}", f"--rw={direction}", "--direct=1"]
    command += [f"--bs={CHUNK_BYTES}", f"--size={share}", f"--offset_increment={share}"]
    command += ["--thread", "--output-format=json", *options]
    if hugepages.mount() is not None:
        command.append("--iomem=shmhuge")  # mmaphuge uses one file for all threads, and aborts
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    results = json.loads(done.stdout)["jobs"]
    seconds = max(job[direction]["runtime"] for job in results) / 1e3
    spent = sum(
        (job["usr_cpu"] + job["sys_cpu"]) / 100 * job["job_runtime"] / 1e3 for job in results
    )
    return {"seconds": seconds, "cpu_s": spent}


class CopyAndFio(Saver):
    """What any writer costs: on a thread, one copy of the state; then fio writes as many bytes at
    the writer's priority, hashes nothing, and has no other process to talk to."""

    name = "memcpy and fio"
    note = "a copy on a thread, then fio in a process of its own, at the priority of the writer"

    def __init__(self, state: State, directory: Path) -> None:
        super().__init__(state, directory)
        self._copy = copier(state)
        self._copied = threading.Event()
        self._writer: threading.Thread | None = None

    def save(self, step: int) -> None:
        self.wait_durable()
        self._copied.clear()
        self._writer = threading.Thread(target=self._write, name="floor")
        self._writer.start()

    def _write(self) -> None:
        from keepstep_sidecar.volume.files import WRITER_NICENESS

        self._copy()
        self._copied.set()
        options = [*_FIO_WRITES["libaio_qd16"], "--end_fsync=1", f"--nice={WRITER_NICENESS}"]
        size = self.state.size_bytes // CHUNK_BYTES * CHUNK_BYTES
        _fio(self.directory / "fio.dat", size, "write", options)

    def fence(self) -> None:
        if self._writer is not None:
            self._copied.wait()

    wait_staged = fence

    def wait_durable(self) -> None:
        if self._writer is not None:
            self._writer.join()


def bare_read(file: Path) -> float:
    """Seconds to read `file` with O_DIRECT and 4 threads into touched memory."""
    size = file.stat().st_size
    fd = os.open(file, os.O_RDONLY | os.O_DIRECT)
    with hugepages.memory(size) or mmap.mmap(-1, size) as memory:
        if hugepages.mount() is None:
            memory.madvise(mmap.MADV_HUGEPAGE)
        ctypes.memset(ctypes.addressof(ctypes.c_char.from_buffer(memory)), 1, size)
        view = memoryview(memory)

        def read(begin: int) -> None:
            os.preadv(fd, [view[begin : begin + CHUNK_BYTES]], begin)

        begun = time.perf_counter()
        with ThreadPoolExecutor(_THREADS) as threads:
            list(threads.map(read, range(0, size, CHUNK_BYTES)))
        seconds = time.perf_counter() - begun
        view.release()
        os.close(fd)
    return seconds
