"""Trainers and sidecars forked from one warm process: real processes, without their imports.

A forkserver imports torch and the sidecar once; a trainer is at its first step in a fifth of a
second, so that thousands of kills take an hour. Forked torch works as each trainer computes on one
thread. Every process is in a session of its own: Ctrl-C ends the soak, never what it looks at.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import multiprocessing
import os
import random
import signal
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from keepstep.errors import NotDurableError
from tests.harness import SidecarProcess, eventually

WORLD = 2
COMPARED = ("exp_avg", "exp_avg_sq")
_CONTEXT = multiprocessing.get_context("forkserver")
# torch._dynamo: the first optimizer of a process imports it, which takes longer than a whole life
_CONTEXT.set_forkserver_preload(
    [
        "torch._dynamo",
        "torch.distributed",
        "keepstep.checkpointer",
        "keepstep_sidecar.__main__",
        "keepstep_sidecar.app",
        "tests.faults.processes",
    ]
)


def digest(tensors: Any) -> str:
    """Digest of all tensors of a state, in order."""
    import xxhash

    state = xxhash.xxh3_128()
    for tensor in tensors:
        state.update(tensor.detach().contiguous().view(-1).numpy().tobytes())
    return state.hexdigest()


@dataclass(frozen=True)
class Order:
    """What a life of trainers is to do. `steps`: how many before it ends by itself with `close`.
    `waiting`: how likely it waits for a step that it saved."""

    socket: str
    meeting: str
    seed: int
    steps: int = 1_000_000
    waiting: float = 0.0


def train(rank: int, order: Order, log: str) -> None:
    """One trainer process: restores, then trains and saves until it is killed or done. What it
    believes goes to `log`, one write a line, so that no signal tears one."""
    _alone(log + ".err")
    signal.signal(signal.SIGTERM, _end)
    import torch

    import keepstep

    os.environ["KEEPSTEP_SOCKET"] = order.socket
    torch.set_num_threads(1)
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{order.meeting}", rank=rank, world_size=WORLD
    )
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(256, 512), torch.nn.Linear(512, 256))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    checkpointer = keepstep.Checkpointer({"model": model, "optimizer": optimizer})
    out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def say(**what: Any) -> None:
        os.write(out, (json.dumps({"time": time.time(), **what}) + "\n").encode())

    def state() -> list[Any]:
        return [
            *model.parameters(),
            *(one[part] for part in COMPARED for one in optimizer.state.values()),
        ]

    at = checkpointer.restore()
    epoch = checkpointer.epoch
    say(
        event="restored",
        step=at.step if at else -1,
        epoch=str(epoch.id if epoch else None),
        parent=str(epoch.parent if epoch else None),
        digest=digest(state()) if at else "",
        tier=str(at.tier) if at else "",
    )
    dice = random.Random(f"{order.seed}/{rank}")
    first = at.step + 1 if at else 0
    timeout_s = 30.0
    try:
        for step in range(first, first + order.steps):
            inputs = torch.randn(8, 256, generator=torch.Generator().manual_seed(step))
            optimizer.zero_grad()
            model(inputs * (rank + 1)).square().mean().backward()
            for parameter in model.parameters():
                torch.distributed.all_reduce(parameter.grad)
            optimizer.step()
            say(event="step", step=step, digest=digest(state()))
            kept = checkpointer.save(step)
            say(event="saved", step=step, kept=kept, stats=_counted(checkpointer.stats))
            if kept and dice.random() < order.waiting:
                _wait(checkpointer, step, dice.choice(["staged", "committed"]), say)
    except SystemExit:
        # the other rank may have stopped at another step, which then is never committed
        timeout_s = 2.0
    try:
        checkpointer.close(timeout=timeout_s)
        say(event="closed")
    except NotDurableError as error:
        say(event="not closed", why=str(error))


def _wait(checkpointer: Any, step: int, reached: str, say: Any) -> None:
    try:
        checkpointer.wait(step, reached, timeout=5.0)
    except NotDurableError as error:
        say(event="not reached", step=step, state=reached, why=str(error))
    else:
        say(event="reached", step=step, state=reached)


def _counted(stats: Any) -> tuple[int, int]:
    """Saves, and those of them whose end is known. The first is read first: it only grows here."""
    saves = stats.saves
    return saves, stats.staged + stats.skipped + stats.discarded


def _end(number: int, frame: object) -> NoReturn:
    raise SystemExit(128 + number)


def serve(command: tuple[str, ...], log: str, interrupted_at: int) -> None:
    """The sidecar's own command line; `interrupted_at`: see `interrupt_sidecar`, 0 for never."""
    _alone(log)
    from keepstep_sidecar.__main__ import main

    if interrupted_at:
        from tests.faults.injection import interrupt_sidecar

        interrupt_sidecar(interrupted_at)

    main(list(command), standalone_mode=True)


def _alone(log: str) -> None:
    os.setsid()
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(file, 1)
    os.dup2(file, 2)
    faulthandler.register(signal.SIGUSR1)


class _Forked:
    """As much of `subprocess.Popen` as a `SidecarProcess` needs, of a forked process."""

    def __init__(self, process: Any) -> None:
        self._process = process
        self.pid: int = process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode  # type: ignore[no-any-return]

    def poll(self) -> int | None:
        return self.returncode

    def wait(self, timeout: float | None = None) -> int | None:
        self._process.join(timeout)
        return self.returncode

    def kill(self) -> None:
        self._process.kill()

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)


class ForkedSidecar(SidecarProcess):
    """A sidecar that starts in a tenth of a second. `interrupted_at`: of its next start only."""

    interrupted_at = 0

    def start(self, *options: str, **environment: str) -> SidecarProcess:
        assert not environment, "the environment is the forkserver's"
        command = ["--run", self.run, "--memory-dir", str(self.memory)]
        command += ["--volume", str(self.volume), *options]
        process = _CONTEXT.Process(
            target=serve, args=(tuple(command), str(self.log), self.interrupted_at)
        )
        self.interrupted_at = 0
        process.start()
        self.process = _Forked(process)  # type: ignore[assignment]
        eventually(self._answers, what=f"the sidecar's socket; its log is {self.log}")
        return self


@dataclass
class Life:
    """One life of the trainers: processes and their logs."""

    order: Order
    logs: list[Path]
    processes: list[Any] = field(default_factory=list)
    _said: list[list[dict[str, Any]]] = field(default_factory=lambda: [[] for _ in range(WORLD)])
    _read: list[int] = field(default_factory=lambda: [0] * WORLD)
    _told: list[int] = field(default_factory=lambda: [0] * WORLD)

    def start(self) -> Life:
        for rank in range(WORLD):
            process = _CONTEXT.Process(target=train, args=(rank, self.order, str(self.logs[rank])))
            process.start()
            self.processes.append(process)
        return self

    def events(self, rank: int, *kinds: str) -> list[dict[str, Any]]:
        """What a rank said, oldest first; of these kinds only, if any are named."""
        if self.logs[rank].exists():
            with self.logs[rank].open("rb") as log:
                log.seek(self._read[rank])
                new = log.read()
            self._read[rank] += len(new)
            self._said[rank] += map(json.loads, new.splitlines())
        return [one for one in self._said[rank] if not kinds or one["event"] in kinds]

    def news(self, rank: int) -> list[dict[str, Any]]:
        """What a rank said since this was last asked."""
        said = self.events(rank)[self._told[rank] :]
        self._told[rank] += len(said)
        return said

    def restored(self) -> list[dict[str, Any]]:
        """What each rank that came so far said of its restore."""
        return [one for rank in range(WORLD) for one in self.events(rank, "restored")]

    def steps(self, rank: int, *, kept: bool = False) -> list[int]:
        """Steps that this rank saved; only those that are kept, as it was told."""
        saved = self.events(rank, "saved")
        return [one["step"] for one in saved if one["kept"] or not kept]

    def common(self, *, kept: bool = False) -> set[int]:
        """Steps that every rank saved."""
        return set.intersection(*(set(self.steps(rank, kept=kept)) for rank in range(WORLD)))

    def kill(self, ranks: range | list[int]) -> None:
        for rank in ranks:
            self.processes[rank].kill()

    def terminate(self) -> None:
        for process in self.processes:
            process.terminate()

    def end(self) -> None:
        """Whatever still lives dies; returns when it is gone."""
        self.kill(range(WORLD))
        for process in self.processes:
            process.join(20)

    def dump(self) -> str:
        """Where every thread of every trainer stands, and what they logged last."""
        for process in self.processes:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGUSR1)
        time.sleep(0.5)  # for the dump to be written: nothing says when it is
        return "\n".join(
            f"--- {path}, exit code {process.exitcode}:\n{path.read_text()[-4000:]}"
            for process, log in zip(self.processes, self.logs, strict=True)
            for path in [log.with_name(log.name + ".err")]
            if path.exists()
        )
