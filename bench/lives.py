"""Measures lives of one run: started without keepstep, killed with SIGKILL, restored from memory
and from disk."""

from __future__ import annotations

import ctypes
import json
import mmap
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from bench import hugepages
from bench.floors import bare_read
from bench.ours import slots_for
from bench.processes import Sidecar, environment

Figures = dict[str, float]
_PATIENCE_S = 120.0


def measure(size_bytes: int, directory: Path) -> Figures:
    """All lives, one after the other. Returns seconds."""
    plain = _first_step(Trainer(size_bytes, "--plain"))
    sidecar = Sidecar(directory, slots=slots_for(size_bytes))
    try:
        figures = {"plain_start_s": plain, "sidecar_start_s": sidecar.begin()}
        figures |= _killed(size_bytes, sidecar)
        sidecar.kill()
        figures |= _engine(directory)
        figures |= _from_local(size_bytes, sidecar, "bare")
        figures |= _from_local(size_bytes, sidecar, "ahead", ahead_s=1.0 + 4e-9 * size_bytes)
    except Exception as error:
        raise RuntimeError(f"{error}\n{sidecar.text()[-3000:]}") from error
    finally:
        sidecar.close()
        shutil.rmtree(directory, ignore_errors=True)
    beyond = figures["kill_to_step_s"] - figures["plain_start_s"]
    figures["kill_beyond_start_s"] = beyond
    figures["kill_beyond_restore_s"] = beyond - figures["restore_memory_s"]
    return figures


class Trainer:
    """A `bench.trainer` process."""

    def __init__(self, size_bytes: int, *options: str, socket: Path | None = None) -> None:
        extra = {"KEEPSTEP_SOCKET": str(socket)} if socket else {}
        command = [sys.executable, "-m", "bench.trainer", "--bytes", str(size_bytes), *options]
        self.spawned = time.monotonic()
        self.process = subprocess.Popen(
            command, env=environment(**extra), stdout=subprocess.PIPE, text=True
        )

    def until(self, event: str) -> dict[str, Any]:
        """The next line with this event. Raises RuntimeError if the process ends without it."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            record = json.loads(line)
            if record["event"] == event:
                return dict(record)
        raise RuntimeError(f"the trainer ended ({self.process.wait()}) before {event!r}")

    def end(self) -> None:
        """Kill the process if it still runs, and reap it."""
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(_PATIENCE_S)
        assert self.process.stdout is not None
        self.process.stdout.close()


def _first_step(trainer: Trainer) -> float:
    try:
        return float(trainer.until("step")["at"]) - trainer.spawned
    finally:
        trainer.end()


def _killed(size_bytes: int, sidecar: Sidecar) -> Figures:
    """Kill a trainer after at least three commits. Its successor starts at once."""
    options = ("--reach", "committed")
    first = Trainer(size_bytes, *options, socket=sidecar.socket)
    try:
        for _ in range(3):
            committed = first.until("committed")
        sidecar.wait_slots()
        committed = first.until("committed")
        time.sleep(0.02)
        killed = time.monotonic()
        first.process.kill()
        second = Trainer(size_bytes, *options, socket=sidecar.socket)
    finally:
        first.end()
    try:
        restored = second.until("restored")
        step = second.until("step")
        second.until("committed")
    finally:
        second.end()
    if restored["step"] < committed["step"]:
        raise RuntimeError(f"step {committed['step']} was committed, {restored['step']} restored")
    if restored["tier"] != "memory":
        raise RuntimeError(f"restored from {restored['tier']}, not from memory")
    return {"kill_to_step_s": step["at"] - killed, "restore_memory_s": restored["seconds"]}


def _engine(directory: Path) -> Figures:
    """Read and verify the newest shard into touched memory, beside a bare read of its file."""
    from keepstep_sidecar.tiers import verified_chunks
    from keepstep_sidecar.tiers.source import local_source
    from keepstep_sidecar.volume.volume import Volume, VolumeSet

    volume = Volume(directory / "bench", run="bench")
    try:
        shard = max(volume.scan().shards, key=lambda shard: shard.step_id)
        source = local_source(VolumeSet([volume]), shard)
        path, size = shard.path, shard.size_bytes
        # memory as of a slot: shared, on small pages unless huge pages are measured
        with hugepages.memory(size) or mmap.mmap(-1, size) as memory:
            ctypes.memset(ctypes.addressof(ctypes.c_char.from_buffer(memory)), 1, size)
            loads, reads = [], []
            for _ in range(2):
                reads.append(bare_read(path))
                begun = time.perf_counter()
                with memoryview(memory)[:size] as view:
                    verified_chunks.load_image(source, view)
                loads.append(time.perf_counter() - begun)
    finally:
        volume.close()
    return {"engine_load_s": min(loads), "engine_read_s": min(reads)}


def _from_local(size_bytes: int, sidecar: Sidecar, kind: str, *, ahead_s: float = 0.0) -> Figures:
    """Restore after trainer, sidecar and all images in memory are gone.

    So the first touch of a slot is paid for again. `kind` is `bare` if the trainer asks as soon as
    the sidecar's socket is there. It is `ahead` if the sidecar starts `ahead_s` before that, as in
    a real restart, in which the trainer still imports torch.
    """
    sidecar.kill()
    sidecar.lose_memory()
    gate = sidecar.socket if ahead_s == 0 else sidecar.memory / "go"
    trainer = Trainer(size_bytes, "--wait-for", str(gate), socket=sidecar.socket)
    try:
        trainer.until("built")
        sidecar.begin()
        if ahead_s:
            time.sleep(ahead_s)
            gate.touch()
        restored = trainer.until("restored")
    finally:
        trainer.end()
    if restored["tier"] != "local":
        raise RuntimeError(f"restored from {restored['tier']}, not from local")
    return {f"restore_local_{kind}_s": restored["seconds"]}
