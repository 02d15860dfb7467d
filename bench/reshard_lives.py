"""Four ranks save, two restore, on one machine: seconds and memory, beside floors and stock DCP.

The ranks of a life are forked from a process that has imported torch, and communicate by gloo. The
state is sharded by rows. Between the lives the sidecar is killed and its memory is emptied, so that
all bytes come from the drive. The figures prove this: `..._device_mib` is what the kernel's block
layer read for each side, without pages from the cache. Floor and restore read the same files with
O_DIRECT, 8 MiB at a time on 4 threads. Stock DCP uses buffered reads, from files whose pages were
dropped before.
"""

from __future__ import annotations

import importlib
import itertools
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench.floors import CHUNK_BYTES, bare_read
from bench.processes import Sidecar, environment, memory_kib

Figures = dict[str, float]

FRAMES = 6
"""The frames of a window: equals `keepstep.restore.images.FRAMES`, whose import needs torch."""

_TENSORS = 32
_COLUMNS = 4096
_SAVED, _RUNNING = 4, 2


def measure(size_bytes: int, directory: Path) -> Figures:
    """Measure a life of four ranks and one of two, floors for the same bytes, and stock DCP."""
    sidecar = Sidecar(directory, slots=2)
    try:
        sidecar.start()
        _life("save", _SAVED, size_bytes, sidecar.socket)
        sidecar.kill()
        for file in sidecar.memory_dir.rglob("*"):
            if file.is_file() or file.is_socket():
                file.unlink()
        step = max(one for one in directory.glob("bench/0*") if one.is_dir())
        figures = _floors(step, size_bytes)
        # leave no memory to fetch whole images ahead: all bytes come through the ranks' windows
        windows = _RUNNING * FRAMES * CHUNK_BYTES
        sidecar.options = ("--memory-limit", str(windows + (1 << 20)))
        sidecar.start()
        before = _device_mib(sidecar.pid)
        figures |= _worst(_life("restore", _RUNNING, size_bytes, sidecar.socket), "reshard")
        figures["reshard_device_mib"] = _device_mib(sidecar.pid) - before
        status = sidecar.status()
        figures["reshard_window_mib"] = sum(status["window_bytes"].values()) / 2**20
        figures["reshard_handed_on_mib"] = status["window_shared_bytes"] / 2**20
        sidecar.kill()
        _drop_pages(step)
        figures |= _worst(_life("stock", _RUNNING, size_bytes, step), "stock")
    finally:
        sidecar.close()
    figures["reshard_ratio"] = figures["reshard_s"] / (figures["read_s"] + figures["memcpy_s"])
    return figures


def _floors(step: Path, size_bytes: int) -> Figures:
    """An O_DIRECT read of all shards into touched memory, and one memcpy of as many bytes."""
    files = sorted(step.glob("*.safetensors"))
    before = _device_mib(os.getpid())
    read = min(sum(bare_read(file) for file in files) for _ in range(2))
    device = (_device_mib(os.getpid()) - before) / 2
    command = [sys.executable, "-m", "bench.reshard_lives", "memcpy", str(size_bytes)]
    done = subprocess.run(command, env=environment(), check=True, capture_output=True, text=True)
    return {"read_s": read, "read_device_mib": device, "memcpy_s": float(done.stdout)}


def _device_mib(pid: int) -> float:
    """MiB that were read from block devices for a process since it began."""
    for line in Path(f"/proc/{pid}/io").read_text().splitlines():
        if line.startswith("read_bytes:"):
            return int(line.split()[1]) / 2**20
    raise RuntimeError(f"/proc/{pid}/io does not tell what was read from devices")


def _drop_pages(step: Path) -> None:
    for file in step.glob("*.safetensors"):
        fd = os.open(file, os.O_RDONLY)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)


def _worst(answers: list[Figures], prefix: str) -> Figures:
    return {f"{prefix}_{key}": max(one[key] for one in answers) for key in answers[0]}


def _life(action: str, world: int, size_bytes: int, where: Path) -> list[Figures]:
    with tempfile.TemporaryDirectory(prefix="keepstep-bench-") as store:
        command = [sys.executable, "-m", "bench.reshard_lives", action, str(world)]
        command += [str(size_bytes), str(where), f"{store}/store"]
        subprocess.run(command, env=environment(), check=True)
        return [json.loads(Path(f"{store}/store.{rank}").read_text()) for rank in range(world)]


# --- in the ranks ---------------------------------------------------------------------------------


def _memcpy(size_bytes: int) -> None:
    import ctypes

    import torch

    move = ctypes.CDLL(None).memmove
    move.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]
    source = torch.ones(size_bytes, dtype=torch.uint8)
    target = torch.ones(size_bytes, dtype=torch.uint8)
    times = []
    for _ in range(3):
        begun = time.perf_counter()
        move(target.data_ptr(), source.data_ptr(), size_bytes)
        times.append(time.perf_counter() - begun)
    print(min(times))


def _parts(size_bytes: int, world: int, fill: Callable[[int], float]) -> dict[str, Any]:
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard

    mesh = init_device_mesh("cpu", (world,))
    rows = size_bytes // _TENSORS // _COLUMNS // 4 // 12 * 12
    return {
        f"t{number}": DTensor.from_local(
            torch.full((rows // world, _COLUMNS), fill(number)), mesh, [Shard(0)]
        )
        for number in range(_TENSORS)
    }


def _save(size_bytes: int, rank: int, world: int, where: str) -> Figures:
    import torch

    import keepstep

    os.environ["KEEPSTEP_SOCKET"] = where
    parts = _parts(size_bytes, world, lambda number: number + rank / 16)
    with keepstep.Checkpointer({"state": parts}) as checkpointer:
        checkpointer.restore()
        for step in itertools.count():
            kept = torch.tensor(int(checkpointer.save(step)))
            torch.distributed.all_reduce(kept, torch.distributed.ReduceOp.MIN)
            if kept:  # the first saves may find no slot
                return {}
            time.sleep(0.2)


def _restore(size_bytes: int, rank: int, world: int, where: str) -> Figures:
    import torch

    import keepstep

    os.environ["KEEPSTEP_SOCKET"] = where
    parts = _parts(size_bytes, world, lambda _: -1.0)
    checkpointer = keepstep.Checkpointer({"state": parts}, strict=True)
    figures = _timed(checkpointer.restore)
    half = _SAVED // world
    for number in range(_TENSORS):
        local = parts[f"t{number}"].to_local()
        for part, rows in enumerate(local.chunk(half)):
            wanted = torch.full((_COLUMNS,), number + (rank * half + part) / 16)
            assert torch.equal(rows[0], wanted)
            assert torch.equal(rows[-1], wanted)
    checkpointer.close()
    return figures


def _stock(size_bytes: int, rank: int, world: int, where: str) -> Figures:
    from torch.distributed import checkpoint as dcp

    parts = _parts(size_bytes, world, lambda _: -1.0)
    target = {f"state.{name}": tensor for name, tensor in parts.items()}
    reader = dcp.HuggingFaceStorageReader(where)
    figures = _timed(lambda: dcp.load(target, storage_reader=reader))
    local = parts["t1"].to_local()
    assert float(local[0, 0]) == 1 + rank * (_SAVED // world) / 16
    return figures


def _timed(work: Callable[[], Any]) -> Figures:
    """Seconds of `work`, MiB that this process itself read from the drive, and the growth of memory
    at its peak in MiB: of this process alone, and of what it maps of the sidecar's."""
    import torch.distributed as dist

    dist.barrier()
    keys = ("RssAnon", "RssShmem")
    before, read = memory_kib(os.getpid()), _device_mib(os.getpid())
    peak, done = dict(before), threading.Event()

    def watch() -> None:
        while not done.wait(0.002):
            now = memory_kib(os.getpid())
            peak.update({key: max(peak[key], now[key]) for key in keys})

    watcher = threading.Thread(target=watch)
    watcher.start()
    begun = time.perf_counter()
    work()
    seconds = time.perf_counter() - begun
    done.set()
    watcher.join()
    anon, shared = ((peak[key] - before[key]) / 1024 for key in keys)
    read = _device_mib(os.getpid()) - read
    return {"s": seconds, "own_device_mib": read, "anon_mib": anon, "shared_mib": shared}


def _rank(action: str, size_bytes: int, rank: int, world: int, where: str, store: str) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(store, world), rank=rank, world_size=world)
    work = {"save": _save, "restore": _restore, "stock": _stock}[action]
    figures = work(size_bytes, rank, world, where)
    Path(f"{store}.{rank}").write_text(json.dumps(figures))
    dist.barrier()
    dist.destroy_process_group()


def _main(action: str, world: int, size_bytes: int, where: str, store: str) -> None:
    importlib.import_module("torch.distributed.tensor")  # once, for all ranks
    children = {}
    for rank in range(world):
        child = os.fork()
        if child == 0:
            code = 1
            try:
                _rank(action, size_bytes, rank, world, where, store)
                code = 0
            finally:
                sys.stdout.flush()
                if code:
                    sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
                os._exit(code)
        children[child] = rank
    codes = [os.waitpid(child, 0)[1] for child in children]
    raise SystemExit(1 if any(codes) else 0)


if __name__ == "__main__":
    if sys.argv[1] == "memcpy":
        _memcpy(int(sys.argv[2]))
    else:
        _main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), *sys.argv[4:6])
