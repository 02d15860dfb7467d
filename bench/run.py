"""Measures what leading a run costs: one process leads, one has all the other machines.

    python -m bench.run                        64 machines, a step a second; 2,048, a step each 5 s
    python -m bench.run --machines 64 --every 1 --seconds 60
    python -m bench.run --machines 64 --train  what leading takes from a training beside it

The leader is the product's own code: hub, host and ledger in a process of their own, on the port of
a real peers' server. Each other machine has a real connection (TCP, TLS, an address of its own).
Simulated are the machines behind these: what the 8 ranks of each hold follows from the clock, they
delete what they are told to delete, and each keeps copies for the machine before it. They send the
same reports as the product's reporter: at once when a step is durable, else two seconds after the
last.

Printed: each figure, its bar, and their ratio. *commit*: from the moment at which the last rank of
all is durable to that at which a machine knows of the commit. *known again*: from the start of a
leader in place of one that was killed, until it knows everything of all machines.

With `--train`, a process computes steps of 100 ms beside the leader, in turns of some seconds with
the other machines silent and at work. *held up*: how much longer the mean step is then, as the
median of all pairs of turns, and *error*, its standard error. *free*: the leader may run on another
core, too. *shared*: it has only the core of that process, as on a node whose cores are all busy.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import functools
import json
import logging
import multiprocessing
import os
import random
import resource
import socket
import statistics
import time
import zlib
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Iterator
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Final

import msgspec

from keepstep.core.commit_rule import ReportedTier, merge_equal_reports
from keepstep.core.retention import Retention
from keepstep.core.shard import Ranks, Shard
from keepstep.leader.leader import Leader
from keepstep.steps import Epoch, EpochId, StepId, Tier, TierAnswer
from keepstep.wire.member_reports import (
    LeaderReply,
    MemberReport,
    Report,
    ReportedRanks,
    ReportedVolume,
)
from keepstep.wire.run_reports import RunPolicy
from keepstep_sidecar.concurrency import ChangeNotifier
from keepstep_sidecar.leader.host import OWN, Host
from keepstep_sidecar.leader.hub import Hub
from keepstep_sidecar.leader.link import LeaderConnection
from keepstep_sidecar.report.reporter import Rhythm
from keepstep_sidecar.tiers.peer.secret import SecretCredentials
from keepstep_sidecar.tiers.peer.server import Server

RANKS: Final = 8
_decode: Final = msgspec.json.Decoder(LeaderReply).decode
SECRET: Final = b"a secret of this benchmark"
EPOCH: Final = EpochId(1, "0123abcd")
_TURN_S: Final = 3.0
_TURNS: Final = 40
COPIED_S: Final = 0.1
"""How long after it is durable a machine's shards are copied to its buddy."""


@dataclass(frozen=True)
class Bars:
    """What a run of this size may cost: cores, MiB more than without members, and seconds."""

    cores: float
    mib: float | None
    commit_s: float | None
    known_s: float


BARS: Final = {64: Bars(0.05, 64, 0.3, 20.0), 2048: Bars(0.5, None, None, 20.0)}


@dataclass(frozen=True)
class Clock:
    """When each step is where, on the clock that both processes have. `begin`: of step 0."""

    machines: int
    begin: float
    every_s: float

    def staged_at(self, step: int) -> float:
        return self.begin + step * self.every_s

    def durable_at(self, step: int, machine: int) -> float:
        chance = random.Random(step * self.machines + machine).random()
        return self.staged_at(step) + self.every_s * (0.1 + 0.3 * chance)

    @functools.cache  # noqa: B019 - one clock a process
    def done_at(self, step: int) -> float:
        """When the last machine is durable."""
        return max(self.durable_at(step, machine) for machine in range(self.machines))


class Machine:
    """A simulated machine: what it holds, said as the product's reporter says it: whole at first,
    then only what changed since the last answer; one report at a time. `seen`: when it heard first
    of each commit. `send`: sends a report, False if that is not possible now."""

    def __init__(self, clock: Clock, node_rank: int) -> None:
        self.seen: dict[int, float] = {}
        self.send: Callable[[MemberReport], bool] = lambda report: False
        self._clock, self._node_rank = clock, node_rank
        self._before = (node_rank - 1) % clock.machines
        self._life, self._started_at = os.urandom(8).hex(), time.time()
        self._sequence, self._answered, self._follows = 0, 0, 0
        self._held: dict[Tier, set[int]] = {tier: set() for tier in _TIERS}
        self._sent_bytes: dict[Tier, set[int]] = {tier: set() for tier in _TIERS}
        self._sent: dict[Tier, set[int]] = {}
        self._peers_version = self._sent_version = ""
        self._acknowledged = 0
        self._rhythm, self._reported_at = Rhythm(), 0.0
        self._later: asyncio.TimerHandle | None = None

    async def live(self) -> None:
        """Hold each step in time: first in memory, then on the drive, then the other's copy."""
        clock, now = self._clock, time.monotonic()
        step = max(0, int((now - clock.begin) / clock.every_s))
        while True:
            times = (
                (clock.staged_at(step), Tier.MEMORY),
                (clock.durable_at(step, self._node_rank), Tier.LOCAL),
                (clock.durable_at(step, self._before) + COPIED_S, Tier.PEER),
            )
            for at, tier in sorted(times):
                await asyncio.sleep(max(at - time.monotonic(), 0.0))
                self._held[tier].add(step)
                self._held[Tier.MEMORY] = set(sorted(self._held[Tier.MEMORY])[-4:])
                self.report()
            step += 1

    def connected(self) -> None:
        """On a new connection everything is said anew."""
        self._follows, self._answered = 0, self._sequence
        self.report()

    def report(self) -> None:
        """Say what changed, unless an answer is still awaited."""
        whole = not self._follows
        new_list = self._peers_version != self._sent_version
        anything = whole or new_list or self._held != self._sent_bytes
        if self._answered < self._sequence or not anything:
            return
        pressing = (
            whole
            or new_list
            or max(self._held[Tier.LOCAL], default=0) > max(self._sent_bytes[Tier.LOCAL], default=0)
        )
        wait_s = self._rhythm.least_gap_s if pressing else self._rhythm.max_deferral_s
        due_in_s = self._reported_at + wait_s - time.monotonic()
        if self._later is not None:
            self._later.cancel()
        if due_in_s > 0:
            self._later = asyncio.get_running_loop().call_later(due_in_s, self.report)
            return
        self._reported_at = time.monotonic()
        self._sent = {tier: set(steps) for tier, steps in self._held.items()}
        ranks = [
            self._rank(rank, whole, alive=True, tiers=(Tier.MEMORY, Tier.LOCAL))
            for rank in _ranks(self._node_rank)
        ]
        ranks += [
            self._rank(rank, whole, alive=False, tiers=(Tier.PEER,))
            for rank in _ranks(self._before)
        ]
        report = Report(
            sidecar="bench",
            started_at=self._started_at,
            sequence=self._sequence + 1,
            since=0 if whole else self._follows,
            ready=True,
            library="bench",
            pinned="mlock",
            epochs=(Epoch(EPOCH),) if whole else (),
            ranks=merge_equal_reports(rank for rank in ranks if rank.tiers),
            volumes=(ReportedVolume(name="/nvme", engine="direct", used_bytes=1, free_bytes=2),),
            peer_address=f"10.{self._node_rank >> 8}.{self._node_rank & 255}.1:9465",
            peers_version=self._peers_version,
        )
        report_ = MemberReport(
            life=self._life, nodes=self._clock.machines, report=report, heard=self._acknowledged
        )
        self._sequence += 1
        self._sent_version = self._peers_version
        if not self.send(report_):
            self._answered = self._sequence

    def _rank(
        self, rank: int, whole: bool, *, alive: bool, tiers: tuple[Tier, ...]
    ) -> ReportedRanks:
        world = self._clock.machines * RANKS
        reported = {}
        for tier in tiers:
            before = set() if whole else self._sent_bytes[tier]
            if whole or before != self._held[tier]:
                held = ReportedTier.from_shards(
                    Shard(
                        step_id=StepId(EPOCH, step),
                        rank=rank,
                        world=world,
                        size_bytes=16 << 30,
                        root=None if tier is Tier.MEMORY else f"{step:016x}{rank:016x}",
                    )
                    for step in sorted(self._held[tier] - before)
                )
                gone = tuple(StepId(EPOCH, step) for step in sorted(before - self._held[tier]))
                answer = TierAnswer.STEPS if self._held[tier] else TierAnswer.NONE
                reported[tier] = replace(held, answer=answer, gone=None if whole else gone)
        newest = max(self._held[Tier.MEMORY], default=None) if alive else None
        staged = None if newest is None else StepId(EPOCH, newest)
        return ReportedRanks(
            ranks=Ranks.of((rank,)), world=world, alive=alive, staged=staged, tiers=reported
        )

    def take(self, leader_reply: LeaderReply) -> None:
        """A reply of the leader."""
        now, reply = time.monotonic(), leader_reply.reply
        newest = reply.committed.get(str(Tier.LOCAL))
        for step_id in reply.commits if newest is None else (*reply.commits, newest):
            self.seen.setdefault(step_id.step, now)
        self._acknowledged, self._peers_version = leader_reply.number, reply.peers_version
        self._rhythm = Rhythm.clamped_to_bounds(reply.interval_s, reply.least_gap_s)
        if leader_reply.answers == self._sequence > self._answered:
            self._answered, self._follows = self._sequence, 0
            if reply.changes_since == self._sequence:
                self._follows, self._sent_bytes = self._sequence, self._sent
        gone = {step_id.step for step_id in reply.retire}
        self._held[Tier.LOCAL] -= gone
        if newest is not None:  # a buddy keeps the newest commit, and what is newer
            kept = {step for step in self._held[Tier.PEER] if step >= newest.step}
            self._held[Tier.PEER] = kept
        self.report()


_TIERS: Final = (Tier.MEMORY, Tier.LOCAL, Tier.PEER)


def _ranks(machine: int) -> range:
    return range(machine * RANKS, (machine + 1) * RANKS)


class _Link(LeaderConnection):
    """The connection of a machine, from an address of its own."""

    def __init__(self, node_rank: int, address: str, machine: Machine) -> None:
        super().__init__(
            address,
            SecretCredentials(SECRET, "bench", node_rank),
            take=lambda frame: machine.take(_decode(frame)),
            changed=lambda: machine.connected() if self.connected else None,
        )
        machine.send = lambda report: self.send(msgspec.json.encode(report))
        self._own = f"127.1.{node_rank // 200}.{1 + node_rank % 200}"

    def _socket(self, family: int) -> socket.socket:
        plain = super()._socket(family)
        plain.bind((self._own, 0))
        return plain


# --- the leader's process ------------------------------------------------------------------------


def lead(clock: Clock, port: int, connection: Connection) -> None:
    """Lead until killed. Each message on `connection` is answered with the figures since the
    last."""
    logging.disable(logging.CRITICAL)
    asyncio.run(_lead(clock, port, connection))


async def _lead(clock: Clock, port: int, connection: Connection) -> None:
    began, life = time.monotonic(), os.urandom(8).hex()
    alone_mib = _rss_mib()
    policy = RunPolicy(keep=Retention(last=2), outlives_pod=False, replicas=1, restarts=False)
    leader = Leader(life=life, nodes=clock.machines, policy=policy)
    machine = Machine(clock, OWN)
    host = Host(leader, ChangeNotifier())
    host.own = machine.take
    server = Server(
        f"127.0.0.1:{port}",
        SecretCredentials(SECRET, "bench", OWN),
        lambda _: None,  # type: ignore[arg-type, return-value]
        join=Hub(host.receive_member_frame, host.handle_disconnect, nodes=clock.machines).join,
    )
    server.start()
    loop = asyncio.get_running_loop()

    def send(report: MemberReport) -> bool:
        loop.call_soon(machine.take, host.take_own_report(report))
        return True

    machine.send = send
    machine.connected()
    living = asyncio.create_task(machine.live())
    asked = asyncio.Event()
    loop.add_reader(connection.fileno(), asked.set)
    known_at = 0.0
    cpu_s, since = time.process_time(), time.monotonic()
    while not living.done():
        with contextlib.suppress(TimeoutError):  # once it knows everything, this costs nothing
            await asyncio.wait_for(asked.wait(), None if known_at else 0.05)
        if not known_at and leader.have_all_members_reported:
            known_at = time.monotonic()
        if asked.is_set():
            asked.clear()
            connection.recv()
            now = time.monotonic()
            figures = {
                "cores": (time.process_time() - cpu_s) / (now - since),
                "mib": _rss_mib() - alone_mib,
                "known_s": known_at - began if known_at else -1.0,
                "connected": len(leader.connected),
            }
            connection.send((figures, machine.seen))
            cpu_s, since = time.process_time(), now
    living.result()


def _rss_mib() -> float:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize() / 2**20


class LeaderProcess:
    """A process that leads; killed at the end."""

    def __init__(self, clock: Clock, port: int, *, cores: Iterable[int] = ()) -> None:
        fork = multiprocessing.get_context("spawn")
        self._commands, there = fork.Pipe()
        self._process = fork.Process(target=lead, args=(clock, port, there), daemon=True)
        self._process.start()
        os.sched_setaffinity(self._process.pid or 0, cores) if cores else None

    async def figures(self) -> tuple[dict[str, float], dict[int, float]]:
        self._commands.send("figures")
        while not self._commands.poll():
            if not self._process.is_alive():
                raise RuntimeError("the leader's process has ended")
            await asyncio.sleep(0.05)
        found: tuple[dict[str, float], dict[int, float]] = self._commands.recv()
        return found

    async def all_known(self, *, within_s: float) -> float:
        """Seconds from the leader's start until it knew everything; `within_s` if it does not."""
        deadline = time.monotonic() + within_s
        while time.monotonic() < deadline:
            figures, _ = await self.figures()
            if figures["known_s"] >= 0:
                return figures["known_s"]
            await asyncio.sleep(0.25)
        return within_s

    def kill(self) -> None:
        self._process.kill()
        self._process.join()


# --- the other machines --------------------------------------------------------------------------


@contextlib.asynccontextmanager
async def _others(clock: Clock, port: int) -> AsyncIterator[list[Machine]]:
    machines, tasks = [], []
    for node_rank in range(1, clock.machines):
        machine = Machine(clock, node_rank)
        link = _Link(node_rank, f"127.0.0.1:{port}", machine)
        machines.append(machine)
        tasks.append(link.run())
    async with _running(*tasks):
        yield machines


@contextlib.asynccontextmanager
async def _running(*work: Coroutine[object, object, None]) -> AsyncIterator[None]:
    tasks = [asyncio.create_task(coroutine) for coroutine in work]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def measure(machines: int, every_s: float, seconds: float) -> dict[str, float]:
    """The figures of a run of this size."""
    port = _free_port()
    clock = Clock(machines, time.monotonic() + 2.0, every_s)
    leader = LeaderProcess(clock, port)
    try:
        async with (
            _others(clock, port) as others,
            _running(*(machine.live() for machine in others)),
        ):
            first_s = await leader.all_known(within_s=300.0)
            await asyncio.sleep(2 * every_s)
            await leader.figures()
            begin = time.monotonic()
            await asyncio.sleep(seconds)
            end = time.monotonic()
            figures, seen = await leader.figures()
            waits = [*_waits(clock, seen, begin, end)]
            for machine in others:
                waits += _waits(clock, machine.seen, begin, end)
            leader.kill()
            leader = LeaderProcess(clock, port)
            known_s = await leader.all_known(within_s=300.0)
    finally:
        leader.kill()
    return {
        "first_known_s": first_s,
        "cores": figures["cores"],
        "mib": figures["mib"],
        "commit_s": statistics.median(waits) if waits else float("nan"),
        "slowest_commit_s": max(waits, default=float("nan")),
        "known_s": known_s,
    }


async def held_up(machines: int, every_s: float, cores: set[int]) -> tuple[float, float]:
    """By which part a step of a training is longer while the leader leads, and its standard error.
    `cores`: the leader's; the training has the first of this process, the simulation the last."""
    ours = sorted(os.sched_getaffinity(0))
    port, clock = _free_port(), Clock(machines, time.monotonic() + 2.0, every_s)
    leader = LeaderProcess(clock, port, cores=cores)
    asked, there = multiprocessing.Pipe()
    training = multiprocessing.get_context("spawn").Process(
        target=train, args=(ours[0], there), daemon=True
    )
    training.start()
    os.sched_setaffinity(0, ours[-1:])
    means: list[float] = []

    async def mean_s() -> float:
        asked.send("the mean since the last")
        found: float = await asyncio.to_thread(asked.recv)
        return found

    try:
        async with _others(clock, port) as others:
            for turn in range(2 * _TURNS):
                async with _running(*(machine.live() for machine in others if turn % 2)):
                    await asyncio.sleep(1.0)  # what begins with the turn
                    await mean_s()
                    await asyncio.sleep(_TURN_S)
                    means.append(await mean_s())
    finally:
        training.kill()
        leader.kill()
        os.sched_setaffinity(0, ours)
    parts = [busy / idle - 1 for idle, busy in zip(means[::2], means[1::2], strict=True)]
    low, _, high = statistics.quantiles(parts, n=4)
    error = 1.253 * (high - low) / 1.349 / len(parts) ** 0.5  # of a median of normal values
    return statistics.median(parts), error


def train(core: int, asked: Connection) -> None:
    """Compute steps of about 100 ms. Each message is answered with the mean seconds of a step since
    the last."""
    os.sched_setaffinity(0, {core})
    work, began, pieces = bytes(1 << 20), time.monotonic(), 0
    while time.monotonic() < began + 1:
        zlib.crc32(work)
        pieces += 1
    pieces //= 10
    steps, began = 0, time.monotonic()
    while True:
        for _ in range(pieces):
            zlib.crc32(work)
        steps += 1
        if asked.poll():
            asked.recv()
            now = time.monotonic()
            asked.send((now - began) / steps)
            steps, began = 0, now


def _waits(clock: Clock, seen: dict[int, float], begin: float, end: float) -> Iterator[float]:
    """How long after it was durable everywhere this machine knew of each step's commit."""
    for step, at in seen.items():
        done_at = clock.done_at(step)
        if begin <= done_at < end - clock.every_s:
            yield at - done_at


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port: int = free.getsockname()[1]
        return port


def show(machines: int, figures: dict[str, float]) -> None:
    """Each figure, with its bar and their ratio."""
    bars = BARS.get(machines)
    against = {
        "cores": bars and bars.cores,
        "mib": bars and bars.mib,
        "slowest_commit_s": bars and bars.commit_s,
        "known_s": bars and bars.known_s,
        "held_up_free": 0.01,
    }
    print(f"{machines} machines of {RANKS} ranks", flush=True)
    for name, value in figures.items():
        bar = against.get(name)
        rest = f"   bar {bar:g}, ratio {value / bar:.2f}" if bar else ""
        print(f"  {name:18} {value:8.3f}{rest}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--machines", type=int, help="only a run of so many machines")
    parser.add_argument("--every", type=float, default=1.0, help="seconds from step to step")
    parser.add_argument("--seconds", type=float, default=30.0, help="how long is measured")
    parser.add_argument("--train", action="store_true", help="what it takes from a training")
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    options = parser.parse_args()
    logging.disable(logging.CRITICAL)
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    sizes = ((64, 1.0), (2048, 5.0))
    if options.machines:
        sizes = ((options.machines, options.every),)
    for machines, every_s in sizes:
        if options.train:
            ours = os.sched_getaffinity(0)
            figures = {}
            for name, cores in (("free", ours), ("shared", {min(ours)})):
                part, error = asyncio.run(held_up(machines, every_s, cores))
                figures |= {f"held_up_{name}": part, f"error_{name}": error}
        else:
            figures = asyncio.run(measure(machines, every_s, options.seconds))
        if options.json:
            print(json.dumps({"machines": machines, "every_s": every_s, **figures}), flush=True)
        else:
            show(machines, figures)


if __name__ == "__main__":
    main()
