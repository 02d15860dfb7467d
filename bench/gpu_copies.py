"""Measures copies between GPU and host memory, and the cost of registering a slot with CUDA."""

from __future__ import annotations

import contextlib
import ctypes
import json
import mmap
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from bench.processes import MEMORY_PREFIX, environment

_USER = 1000
_MEMLOCK_BYTES = 8 << 20  # the usual limit of an ordinary user
Figures = dict[str, float | str]


def synchronize(device: str) -> None:
    """Wait for the device; returns at once on a CPU."""
    if device == "cuda":
        torch.cuda.synchronize()


def bandwidth(device: str, size_bytes: int) -> Figures:
    """GB/s of one large copy each way, with a slot, torch's pinned memory and pageable memory."""
    source = torch.ones(size_bytes, dtype=torch.uint8, device=device)
    figures: Figures = {}
    with _slot(size_bytes) as (slot, address):
        registered = _register(address, size_bytes) if device == "cuda" else "no CUDA here"
        targets = {"unregistered_slot" if registered else "registered_slot": slot}
        if device == "cuda":
            targets["pinned"] = _pinned(size_bytes)
        targets["pageable"] = torch.ones(size_bytes, dtype=torch.uint8)
        for name, target in targets.items():
            figures[f"to_{name}_gb_s"] = size_bytes / 1e9 / _copy_s(target, source, device)
            figures[f"from_{name}_gb_s"] = size_bytes / 1e9 / _copy_s(source, target, device)
        if registered:
            figures["registration"] = registered
        elif device == "cuda":
            torch.cuda.cudart().cudaHostUnregister(address)
        targets.clear()
        del slot
    return figures


def registration(device: str, size_bytes: int) -> dict[str, Figures]:
    """Seconds per GiB to register touched shared memory, as the current user. If that is root, also
    as uid 1000 with the usual RLIMIT_MEMLOCK of 8 MiB."""
    who = {f"uid {os.getuid()}": os.getuid()}
    if os.getuid() == 0:
        who[f"uid {_USER}, RLIMIT_MEMLOCK 8 MiB"] = _USER
    return {name: _register_as(uid, device, size_bytes) for name, uid in who.items()}


def child(device: str, size_bytes: int, uid: int, path: str) -> None:
    """The work of the process that `registration` starts: prints one JSON object."""
    if uid != os.getuid():
        resource.setrlimit(resource.RLIMIT_MEMLOCK, (_MEMLOCK_BYTES, _MEMLOCK_BYTES))
        os.setgroups([])
        os.setgid(uid)
        os.setuid(uid)
    with _mapped(Path(path), size_bytes) as (memory, address):
        for page in range(0, size_bytes, 4096):
            memory[page] = 1
        if device != "cuda":
            print(json.dumps({"error": "no CUDA here"}))
            return
        torch.cuda.init()
        torch.zeros(1, device="cuda")
        begun = time.perf_counter()
        error = _register(address, size_bytes)
        seconds = time.perf_counter() - begun
        if error:
            print(json.dumps({"error": error}))
            return
        begun = time.perf_counter()
        torch.cuda.cudart().cudaHostUnregister(address)
        gib = size_bytes / (1 << 30)
        back = time.perf_counter() - begun
        print(json.dumps({"register_s_per_gib": seconds / gib, "unregister_s_per_gib": back / gib}))


def _register_as(uid: int, device: str, size_bytes: int) -> Figures:
    fd, path = tempfile.mkstemp(prefix=MEMORY_PREFIX, dir="/dev/shm")
    try:
        os.posix_fallocate(fd, 0, size_bytes)
        os.fchmod(fd, 0o666)
        command = [sys.executable, "-m", "bench.gpu", "--device", device, "--register-as", str(uid)]
        command += ["--register-file", path, "--register-bytes", str(size_bytes)]
        done = subprocess.run(
            command, env=environment(), capture_output=True, text=True, timeout=120, check=False
        )
        if done.returncode:
            return {"error": done.stderr.strip()[-300:]}
        return dict(json.loads(done.stdout.strip().splitlines()[-1]))
    finally:
        os.close(fd)
        os.unlink(path)


def _register(address: int, size_bytes: int) -> str:
    """Register memory with CUDA. Returns the error; empty if it worked."""
    error = int(torch.cuda.cudart().cudaHostRegister(address, size_bytes, 0))
    return f"cudaHostRegister failed: cudaError {error}" if error else ""


@contextlib.contextmanager
def _slot(size_bytes: int) -> Iterator[tuple[Tensor, int]]:
    """Touched shared memory like a sidecar's, and its address."""
    fd, path = tempfile.mkstemp(prefix=MEMORY_PREFIX, dir="/dev/shm")
    os.posix_fallocate(fd, 0, size_bytes)
    os.close(fd)
    try:
        with _mapped(Path(path), size_bytes) as (memory, address):
            ctypes.memset(address, 0, size_bytes)
            yield torch.frombuffer(memory, dtype=torch.uint8), address
    finally:
        os.unlink(path)


@contextlib.contextmanager
def _mapped(path: Path, size_bytes: int) -> Iterator[tuple[mmap.mmap, int]]:
    with path.open("r+b") as file:
        memory = mmap.mmap(file.fileno(), size_bytes)
    yield memory, ctypes.addressof(ctypes.c_char.from_buffer(memory))
    # not closed here: tensors over it may still live; the garbage collector unmaps it


def _pinned(size_bytes: int) -> Tensor:
    return torch.empty(size_bytes, dtype=torch.uint8, pin_memory=True).fill_(0)


def _copy_s(target: Tensor, source: Tensor, device: str, *, repeats: int = 5) -> float:
    times = []
    for _ in range(repeats + 1):
        synchronize(device)
        begun = time.perf_counter()
        target.copy_(source, non_blocking=True)
        synchronize(device)
        times.append(time.perf_counter() - begun)
    return statistics.median(times[1:])
