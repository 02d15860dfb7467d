"""Kill trainers and sidecars at random moments, and check every promise after each kill.

Two real trainer processes (gloo) train a deterministic model and save every step. Because training
is deterministic, the state after step s is the same in every life: each rank logs the digest of
each state it saved, and whatever is restored or committed must have the digest of its step.

Invariants: a committed step restores bit-equal; a step that is not on all ranks is never restored;
no step mixes epochs; steps never go back within an epoch; a restart loses at most the steps in
flight; the watermark never falls.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

WORLD = 2
_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["torch", "keepstep.checkpointer"])


def digest(tensors: Any) -> str:
    """Digest of all tensors of a state, in order."""
    import xxhash

    state = xxhash.xxh3_128()
    for tensor in tensors:
        state.update(tensor.detach().contiguous().view(-1).numpy().tobytes())
    return state.hexdigest()


def train(rank: int, socket: str, meeting: str, log: str, steps: int) -> None:
    """One trainer process: restores, then trains and saves until it is killed or done."""
    import torch

    import keepstep

    os.environ["KEEPSTEP_SOCKET"] = socket
    torch.set_num_threads(1)
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{meeting}", rank=rank, world_size=WORLD
    )
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(256, 512), torch.nn.Linear(512, 256))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    checkpointer = keepstep.Checkpointer({"model": model, "optimizer": optimizer})
    with open(log, "a", buffering=1) as out:

        def say(**what: Any) -> None:
            out.write(json.dumps({"time": time.time(), **what}) + "\n")

        at = checkpointer.restore()
        state = [*model.parameters(), *(s["exp_avg_sq"] for s in optimizer.state.values())]
        epoch = checkpointer.epoch.id if checkpointer.epoch else None
        say(
            event="restored",
            step=at.step if at else -1,
            epoch=str(epoch),
            parent=str(checkpointer.epoch.parent) if checkpointer.epoch else "None",
            digest=digest(state) if at else "",
            tier=str(at.tier) if at else "",
        )
        for step in range(at.step + 1 if at else 0, steps):
            inputs = torch.randn(8, 256, generator=torch.Generator().manual_seed(step))
            optimizer.zero_grad()
            model(inputs * (rank + 1)).square().mean().backward()
            for parameter in model.parameters():
                torch.distributed.all_reduce(parameter.grad)
            optimizer.step()
            state = [*model.parameters(), *(s["exp_avg_sq"] for s in optimizer.state.values())]
            say(event="step", step=step, digest=digest(state))
            checkpointer.save(step)
            say(event="saved", step=step)
    checkpointer.close()


@dataclass
class Life:
    """One life of the trainers: processes and their logs."""

    processes: list[Any]
    logs: list[Path]

    def events(self, rank: int) -> list[dict[str, Any]]:
        if not self.logs[rank].exists():
            return []
        lines = self.logs[rank].read_text().splitlines()
        # a kill may tear the last line
        return [one for one in map(_parse, lines) if one is not None]

    def steps(self, rank: int) -> list[int]:
        return [one["step"] for one in self.events(rank) if one["event"] == "saved"]

    def kill(self, ranks: Iterator[int] | range | list[int]) -> None:
        for rank in ranks:
            self.processes[rank].kill()
        for process in self.processes:
            process.join(0.01)

    def end(self) -> None:
        self.kill(range(WORLD))
        for process in self.processes:
            process.join(20)


def _parse(line: str) -> dict[str, Any] | None:
    try:
        return dict(json.loads(line))
    except ValueError:
        return None


@dataclass
class Soak:
    """Runs lives against one sidecar and remembers what it learnt."""

    sidecar: Any
    directory: Path
    eventually: Callable[..., Any]
    random: random.Random
    expected: dict[int, str] = field(default_factory=dict)
    epochs: list[str] = field(default_factory=list)
    watermark: int = -1
    lives: int = 0
    lost_steps: list[int] = field(default_factory=list)
    restarts_s: list[float] = field(default_factory=list)
    tiers: dict[str, int] = field(default_factory=dict)

    def live(self, steps: int = 1_000_000) -> Life:
        self.lives += 1
        meeting = self.directory / f"meeting-{uuid.uuid4().hex}"
        logs = [self.directory / f"life-{self.lives}-{rank}.jsonl" for rank in range(WORLD)]
        processes = [
            _CONTEXT.Process(
                target=train,
                args=(rank, str(self.sidecar.socket), str(meeting), str(logs[rank]), steps),
            )
            for rank in range(WORLD)
        ]
        for process in processes:
            process.start()
        return Life(processes, logs)

    def until_steps(self, life: Life, count: int) -> None:
        """Wait until every rank saved `count` steps in this life."""

        def ready() -> bool:
            for rank, process in enumerate(life.processes):
                if not process.is_alive() and process.exitcode != 0:
                    raise AssertionError(f"rank {rank} ended with {process.exitcode}")
            return all(len(life.steps(rank)) >= count for rank in range(WORLD))

        self.eventually(ready, within_s=60, what="trainers to make steps")

    def check_life(self, life: Life, *, all_kept: bool, before: Life | None) -> None:
        """Everything that must hold of a life that began after a kill."""
        starts = [life.events(rank)[0] for rank in range(WORLD)]
        assert all(one["event"] == "restored" for one in starts)
        assert len({(one["step"], one["epoch"], one["parent"]) for one in starts}) == 1, starts
        start = starts[0]
        assert start["epoch"] not in self.epochs, "an epoch was used twice"
        if self.epochs:
            assert start["epoch"] > self.epochs[-1], "epochs only grow"
        self.epochs.append(start["epoch"])
        self.tiers[start["tier"]] = self.tiers.get(start["tier"], 0) + 1
        for rank in range(WORLD):
            if start["step"] >= 0:
                assert starts[rank]["digest"] == self.expected[start["step"]], (
                    "restored, but not bit-equal"
                )
            self._learn(life, rank)
            steps = life.steps(rank)
            assert steps == sorted(set(steps)), "steps never go back within an epoch"
        assert start["step"] >= self.watermark, "a committed step was lost"
        if before is not None and all_kept:
            finished = min(max(before.steps(rank), default=-1) for rank in range(WORLD))
            self.lost_steps.append(finished - start["step"])

    def _learn(self, life: Life, rank: int) -> None:
        for event in life.events(rank):
            if event["event"] == "step":
                known = self.expected.setdefault(event["step"], event["digest"])
                assert known == event["digest"], "training itself is not deterministic"

    def learn(self, life: Life) -> None:
        for rank in range(WORLD):
            self._learn(life, rank)

    def check_volume(self) -> int:
        """Verify every committed step on disk, byte by byte. Returns how many there are."""
        from keepstep.steps import StepId

        committed = []
        for directory in sorted(self.sidecar.root.glob("[0-9]*-[0-9]*")):
            id = StepId.parse(directory.name)
            try:
                self._check_step(directory, id)
            except (AssertionError, FileNotFoundError):
                if directory.exists():
                    raise
                continue  # retired while we read it, as a whole
            committed.append(id)
        newest = max((one.step for one in committed), default=-1)
        return self._raise_watermark(newest, len(committed))

    def _check_step(self, directory: Path, id: Any) -> None:
        from keepstep.image import read_layout, verify_image

        shards = sorted(directory.glob("*.safetensors"))
        assert len(shards) == WORLD, f"{directory}: a committed step lacks a shard"
        for rank, shard in enumerate(shards):
            data = memoryview(shard.read_bytes())
            layout = read_layout(shard)
            control = verify_image(data, layout, path=shard)
            assert control.id == id, "a step mixes epochs or steps"
            assert control.rank == rank
            self._check_content(data, layout, id.step)

    def _raise_watermark(self, newest: int, count: int) -> int:
        if count:
            self.watermark = max(self.watermark, newest)
        return count

    def _check_content(self, data: memoryview, layout: Any, step: int) -> None:
        import torch

        from keepstep.image import local_name

        if step not in self.expected:
            return
        names = ["model.0.weight", "model.0.bias", "model.1.weight", "model.1.bias"]
        names += [f"optimizer.state.{name}.exp_avg_sq" for name in names]
        tensors = []
        for name in names:
            # plain tensors of the same name in every rank: the lowest keeps it bare
            entry = layout.entries[local_name(name, layout.rank) if layout.rank else name]
            tensors.append(
                torch.frombuffer(bytearray(data[entry.begin : entry.end]), dtype=torch.float32)
            )
        assert digest(tensors) == self.expected[step], f"step {step} on disk is not step {step}"

    @contextmanager
    def living(self, steps: int = 1_000_000) -> Iterator[Life]:
        life = self.live(steps)
        try:
            yield life
        finally:
            life.end()
