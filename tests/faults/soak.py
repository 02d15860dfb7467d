"""What must hold of two trainers and a sidecar, whatever was killed when.

Training is deterministic, so the state after step s is the same in every life: each rank logs the
digest of each state it saved, and whatever is restored, staged or committed must have the digest of
its step.

Invariants: a restore is bit-equal, from whatever tier, and so is every sealed image in memory and
every committed one on the drive; a step that is not on all ranks is never restored; no step mixes
epochs; steps never go back within an epoch; the watermark never falls; a restart from memory loses
the one step in flight at most; what `wait` and `close` said was true; every save was staged, or its
loss was counted, or it is on its way.
"""

from __future__ import annotations

import random
import uuid
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from keepstep.errors import ImageError
from keepstep.image import add_rank_suffix
from keepstep.steps import StepId
from tests.faults.processes import WORLD, Life, Order
from tests.faults.trainer import COMPARED, digest
from tests.harness import SidecarProcess, control_of, eventually, layout_of, verify_image

_PATIENCE_S = 240.0
"""A machine that has no memory for a minute is no broken promise; what hangs, hangs for longer."""

_NAMES = ["model.0.weight", "model.0.bias", "model.1.weight", "model.1.bias"]
_STATE = [*_NAMES, *(f"optimizer.state.{name}.{part}" for part in COMPARED for name in _NAMES)]


@dataclass
class Soak:
    """Runs lives against one sidecar and remembers what it learnt.

    `watermark`: the newest step that was committed for certain. `staged`: per rank, the newest step
    that memory must hold; emptied with it. `lost`: finished steps lost -> how often, of restarts
    that found sidecar and memory as they were. `kept`: steps since the last restart that all ranks
    were told are kept; such a restart may lose one of them.
    """

    sidecar: SidecarProcess
    directory: Path
    random: random.Random
    width: int = 512
    expected: dict[int, str] = field(default_factory=dict)
    epochs: list[str] = field(default_factory=list)
    watermark: int = -1
    lives: int = 0
    trained: int = 0
    staged: dict[int, int] = field(default_factory=dict)
    finished: set[int] = field(default_factory=set)
    kept: set[int] = field(default_factory=set)
    undisturbed: bool = True
    lost: Counter[int] = field(default_factory=Counter)
    tiers: Counter[str] = field(default_factory=Counter)

    @contextmanager
    def living(self, *, steps: int = 1_000_000, waiting: float = 0.0) -> Iterator[Life]:
        """A life of both trainers; whoever still lives at its end is killed."""
        self.lives += 1
        logs = [self.directory / f"life-{self.lives}-{rank}.jsonl" for rank in range(WORLD)]
        meeting = self.directory / f"meeting-{uuid.uuid4().hex}"
        seed = self.random.randrange(1 << 30)
        life = Life(
            Order(str(self.sidecar.socket), str(meeting), seed, steps, waiting, self.width), logs
        )
        try:
            yield life.start()
        finally:
            life.end()

    def until_steps(self, life: Life, count: int) -> None:
        """Wait until every rank saved `count` steps in this life, or ended as it should."""

        def ready() -> bool:
            for rank, process in enumerate(life.processes):
                assert process.poll() in (None, 0), (
                    f"rank {rank} ended with {process.poll()}\n{life.dump()}"
                )
            return all(len(life.steps(rank)) >= count for rank in range(WORLD))

        self._eventually(life, ready, what=f"{count} steps of every rank")

    def until_committed_again(self, life: Life) -> None:
        """Something was struck and the trainers live on: a step that begins now is committed, and
        from there on everything is as if nothing had been."""
        self.until_steps(life, 1)
        # where memory was emptied, it must be there again: until then steps still go to the old one
        self._eventually(life, self._memory_is_there, what="memory to be made again")
        last = max(life.steps(rank)[-1] for rank in range(WORLD))
        self._eventually(
            life,
            lambda: self.check_volume() > last,
            what=f"a step beyond {last} to be committed after a fault",
        )
        self.learn(life)
        self.staged.clear()
        self.undisturbed = True

    def _memory_is_there(self) -> bool:
        return self.sidecar.socket.exists() and all(map(self.sidecar.slots, range(WORLD)))

    def _eventually(self, life: Life, condition: Any, *, what: str) -> None:
        try:
            eventually(condition, within_s=_PATIENCE_S, what=what)
        except BaseException as error:
            if type(error).__name__ != "Failed":  # as pytest.fail raises
                raise
            tail = self.sidecar.text()[-3000:]
            raise AssertionError(f"{error}\n{life.dump()}\n--- sidecar:\n{tail}") from None

    def check_start(self, life: Life) -> None:
        """Everything that must hold of the ranks that came as far as a restore."""
        starts = life.restored()
        if not starts:
            return
        start = starts[0]
        assert len({(start["step"], start["epoch"], start["parent"]) for start in starts}) == 1, (
            starts
        )
        assert start["epoch"] not in self.epochs, "an epoch was used twice"
        if self.epochs:
            assert start["epoch"] > self.epochs[-1], "epochs only grow"
        self.epochs.append(start["epoch"])
        self.tiers[start["tier"] or "nothing"] += 1
        for begin in starts:
            assert begin["step"] < 0 or begin["digest"] == self.expected[begin["step"]], (
                f"step {begin['step']} was restored from {begin['tier']}, but not bit-equal"
            )
        assert start["step"] >= self.watermark, (
            f"step {self.watermark} was committed, and step {start['step']} restored"
        )
        self._check_loss(start["step"])
        self.finished, self.kept = {start["step"]} - {-1}, {start["step"]} - {-1}
        self.undisturbed = True

    def _check_loss(self, step: int) -> None:
        if not (self.finished and self.undisturbed):
            return
        self.lost[sum(1 for later in self.finished if later > step)] += 1
        lost = sorted(later for later in self.kept if later > step)
        assert len(lost) <= 1, f"step {step} was restored; lost, although kept: {lost}"

    def learn(self, life: Life) -> None:
        """What a life did, and whether what it was told can be."""
        for rank in range(WORLD):
            self._learn(life, rank)
        self.finished |= life.common()
        self.kept |= life.common(kept=True)

    def _learn(self, life: Life, rank: int) -> None:
        for event in life.news(rank):
            match event["event"]:
                case "step":
                    self._learn_step(event["step"], event["digest"])
                case "saved":
                    self._check_counted(rank, event)
                case "reached" if event["state"] == "staged":
                    self.staged[rank] = max(self.staged.get(rank, -1), event["step"])
                case "reached":
                    self.watermark = max(self.watermark, event["step"])
                case "closed":
                    self.watermark = max(self.watermark, *life.steps(rank)[-1:], -1)
        steps = life.steps(rank)
        assert steps == sorted(set(steps)), "steps never go back within an epoch"

    def _learn_step(self, step: int, found: str) -> None:
        self.trained += step not in self.expected
        known = self.expected.setdefault(step, found)
        assert known == found, "training itself is not deterministic"

    def _check_counted(self, rank: int, saved: dict[str, Any]) -> None:
        saves, ended = saved["stats"]
        assert saves - 1 <= ended <= saves, (
            f"rank {rank}, step {saved['step']}: {saves} saves, but of {ended} the end is counted"
        )

    def forget_memory(self, life: Life) -> None:
        """From now on nothing in memory may be relied upon."""
        self.learn(life)
        self.staged.clear()
        self.undisturbed = False

    def check_volume(self) -> int:
        """Verify every committed step on the drive, byte by byte. Returns the newest that was not
        retired meanwhile, or -1."""
        committed = [-1]
        for directory in sorted(self.sidecar.root.glob("[0-9]*-[0-9]*")):
            step_id = StepId.parse(directory.name)
            try:
                self._check_step(directory, step_id)
            except (AssertionError, FileNotFoundError):
                if directory.exists():
                    raise
                continue  # retired while we read it, as a whole
            committed.append(step_id.step)
        newest = max(committed)
        self.watermark = max(self.watermark, newest)
        return newest

    def check_promised(self) -> None:
        """No trainer lives: what was said to be committed is on the drive, or what is newer. The
        sidecar may still write: what was listed may be retired before it is read."""
        eventually(
            lambda: self.check_volume() >= self.watermark,
            within_s=_PATIENCE_S,
            what=f"step {self.watermark}, which is committed, or a newer one on the drive",
        )

    def _check_step(self, directory: Path, step_id: StepId) -> None:
        shards = sorted(directory.glob("*.safetensors"))
        assert len(shards) == WORLD, f"{directory}: a committed step lacks a shard"
        for rank, shard in enumerate(shards):
            data = memoryview(shard.read_bytes())
            layout = layout_of(shard)
            control = verify_image(data, layout, path=shard)
            assert control.step_id == step_id, "a step mixes epochs or steps"
            assert control.rank == rank
            self._check_content(data, layout, step_id.step, shard)

    def check_memory(self) -> None:
        """No trainer lives: every sealed image in memory is that of its step, and none is missing
        that `wait` said is staged."""
        for rank in range(WORLD):
            found = [-1]
            for path in self.sidecar.slots(rank):
                try:
                    layout = layout_of(path)
                    before = control_of(path)
                    data = memoryview(path.read_bytes())[: layout.size_bytes]  # of whole pages
                    if control_of(path) != before:
                        continue  # the sidecar fetched something into it meanwhile
                except (ImageError, FileNotFoundError):
                    continue
                self._check_content(data, layout, before.step, path)
                found.append(before.step)
            assert max(found) >= self.staged.get(rank, -1), (
                f"rank {rank}: step {self.staged[rank]} was said to be staged, the newest image in"
                f" memory is that of step {max(found)}"
            )

    def _check_content(self, data: memoryview, layout: Any, step: int, path: Path) -> None:
        import torch

        if step not in self.expected:
            return
        tensors = []
        for name in _STATE:
            # plain tensors of the same name in every rank: the lowest keeps it bare
            entry = layout.entries[add_rank_suffix(name, layout.rank) if layout.rank else name]
            tensors.append(
                torch.frombuffer(bytearray(data[entry.begin : entry.end]), dtype=torch.float32)
            )
        assert digest(tensors) == self.expected[step], f"{path} is not step {step}"
