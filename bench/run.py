"""Measures what leading a run costs: one process leads, one has all the other machines.

    python -m bench.run                        64 machines, a step a second; 2,048, a step each 5 s
    python -m bench.run --machines 64 --every 1 --seconds 60

The leader is the product's own code: hub, host and ledger in a process of their own, on the port of
a real peers' server. Each other machine has a real connection (TCP, TLS, an address of its own) and
the product's own reporter. Only its 8 ranks are simulated: what they hold follows from the clock,
and they delete what they are told to delete. A machine also keeps copies for the one before it.

Printed: each figure, its bar, and their ratio. *commit*: from the moment at which the last rank of
all is durable to that at which a machine knows of the commit. *known again*: from the start of a
leader in place of one that was killed, until it knows everything of all machines.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import logging
import multiprocessing
import os
import random
import resource
import socket
import statistics
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Final

from keepstep.core.commit_rule import ReportedTier
from keepstep.core.retention import Retention
from keepstep.core.shard import Shard
from keepstep.leader.leader import Leader
from keepstep.steps import Epoch, EpochId, StepId, Tier
from keepstep.wire.reports import Pins, Report, ReportedRank, ReportedVolume, ReportReply
from keepstep_sidecar.commit.operator_link import OperatorLink
from keepstep_sidecar.concurrency import Changes
from keepstep_sidecar.leader.host import Host
from keepstep_sidecar.leader.hub import Hub
from keepstep_sidecar.leader.link import Link
from keepstep_sidecar.report.leader_channel import LinkChannel, OwnChannel
from keepstep_sidecar.report.reporter import Look, Reporter
from keepstep_sidecar.tiers.peer.secret import SecretCredentials
from keepstep_sidecar.tiers.peer.server import Server

RANKS: Final = 8
SECRET: Final = b"a secret of this benchmark"
EPOCH: Final = EpochId(1, "0123abcd")
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

    def done_at(self, step: int) -> float:
        """When the last machine is durable."""
        return max(self.durable_at(step, machine) for machine in range(self.machines))


class Machine:
    """A simulated machine: what it holds now, and when that changes. `seen`: when it heard first of
    each commit."""

    def __init__(self, clock: Clock, node_rank: int) -> None:
        self.changes = Changes()
        self.seen: dict[int, float] = {}
        self._clock, self._node_rank = clock, node_rank
        self._started_at = time.time()
        self._gone: set[StepId] = set()
        first = max(0, int((time.monotonic() - clock.begin) / clock.every_s) - 2)
        self._steps = list(range(first, first + 2)) if time.monotonic() > clock.begin else []

    async def live(self) -> None:
        """Ring at each change."""
        clock, step = self._clock, self._steps[-1] + 1 if self._steps else 0
        while True:
            self._steps.append(step)
            durable_at = clock.durable_at(step, self._node_rank)
            copied_at = clock.durable_at(step, self._before) + COPIED_S
            for at in (clock.staged_at(step), *sorted((durable_at, copied_at))):
                await asyncio.sleep(max(at - time.monotonic(), 0.0))
                self.changes.ring()
            step += 1

    @property
    def _before(self) -> int:
        return (self._node_rank - 1) % self._clock.machines

    def report(self, sequence: int) -> Report:
        own = [self._rank(rank) for rank in self._ranks(self._node_rank)]
        copies = [self._copies(rank) for rank in self._ranks(self._before)]
        return Report(
            sidecar="bench",
            started_at=self._started_at,
            sequence=sequence,
            ready=True,
            library="bench",
            pinned="mlock",
            epochs=(Epoch(EPOCH),),
            ranks=(*own, *copies),
            volumes=(ReportedVolume(name="/nvme", engine="direct", used_bytes=1, free_bytes=2),),
            peer_address=f"10.{self._node_rank >> 8}.{self._node_rank & 255}.1:9465",
        )

    def _ranks(self, machine: int) -> range:
        return range(machine * RANKS, (machine + 1) * RANKS)

    def _rank(self, rank: int) -> ReportedRank:
        clock, now = self._clock, time.monotonic()
        staged = [step for step in self._steps if clock.staged_at(step) <= now]
        durable = [step for step in staged if clock.durable_at(step, self._node_rank) <= now]
        return ReportedRank(
            rank=rank,
            world=clock.machines * RANKS,
            alive=True,
            staged=StepId(EPOCH, staged[-1]) if staged else None,
            saves=len(staged),
            tiers={
                Tier.MEMORY: self._held(rank, staged[-4:]),
                Tier.LOCAL: self._held(rank, durable),
            },
        )

    def _copies(self, rank: int) -> ReportedRank:
        clock, now = self._clock, time.monotonic()
        copied = [
            step for step in self._steps if clock.durable_at(step, self._before) + COPIED_S <= now
        ]
        tiers = {Tier.PEER: self._held(rank, copied)}
        return ReportedRank(rank=rank, world=clock.machines * RANKS, alive=False, tiers=tiers)

    def _held(self, rank: int, steps: list[int]) -> ReportedTier:
        kept = (StepId(EPOCH, step) for step in steps)
        return ReportedTier.of(
            tuple(
                Shard(
                    step_id=id,
                    rank=rank,
                    world=self._clock.machines * RANKS,
                    size_bytes=16 << 30,
                    root=f"{id.step:016x}{rank:016x}",
                )
                for id in kept
                if id not in self._gone
            )
        )

    async def obey(self, reply: ReportReply) -> None:
        now = time.monotonic()
        newest = reply.committed.get(str(Tier.LOCAL))
        for id in reply.commits if newest is None else (*reply.commits, newest):
            self.seen.setdefault(id.step, now)
        if new := set(reply.retire) - self._gone:
            self._gone |= new
            self._steps = [one for one in self._steps if StepId(EPOCH, one) not in self._gone]
            self.changes.ring()

    async def measure(self) -> tuple[()]:
        return ()

    def tasks(self, channel: OwnChannel | LinkChannel) -> list[asyncio.Task[None]]:
        look = Look(
            measure=self.measure,
            report=lambda _, sequence: self.report(sequence),
            urgent=lambda: False,
        )
        operator = OperatorLink(self.changes, present=True)
        reporter = Reporter(channel, look, operator=operator, obey=self.obey, changes=self.changes)
        return [asyncio.create_task(one) for one in (reporter.run(), self.live())]

    def options(self, life: str) -> dict[str, Any]:
        return {
            "life": life,
            "nodes": self._clock.machines,
            "changes": self.changes,
            "epoch": lambda: EPOCH,
            "pins": Pins(),
        }


class _Link(Link):
    """From an address of its own, as a machine has one."""

    def __init__(self, node_rank: int, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._own = f"127.1.{node_rank // 200}.{1 + node_rank % 200}"

    def _socket(self, family: int) -> socket.socket:
        plain = super()._socket(family)
        plain.bind((self._own, 0))
        return plain


# --- the leader's process ------------------------------------------------------------------------


def lead(clock: Clock, port: int, told: Connection) -> None:
    """Lead until killed. Each message on `told` is answered with the figures since the last."""
    logging.disable(logging.CRITICAL)
    asyncio.run(_lead(clock, port, told))


async def _lead(clock: Clock, port: int, told: Connection) -> None:
    began, life = time.monotonic(), os.urandom(8).hex()
    alone_mib = _rss_mib()
    credentials = SecretCredentials(SECRET, "bench", 0)
    leader = Leader(
        life=life, nodes=clock.machines, keep=Retention(last=2), beyond=(Tier.PEER,), replicas=1
    )
    machine = Machine(clock, 0)
    host = Host(leader, machine.changes)
    hub = Hub(host.take, host.gone, nodes=clock.machines)
    host.connect(hub)
    server = Server(f"127.0.0.1:{port}", credentials, lambda _: None, join=hub.join)  # type: ignore[arg-type, return-value]
    server.start()
    link = Link(
        f"127.0.0.1:{port}",
        credentials,
        take=lambda frame: channel.take(frame),
        changed=machine.changes.ring,
    )
    channel = OwnChannel(host, link, **machine.options(life))
    tasks = machine.tasks(channel)
    known_at = 0.0
    cpu_s, since = time.process_time(), time.monotonic()
    while not any(one.done() for one in tasks):
        await asyncio.sleep(0.05)
        if leader.all_here and not known_at:
            known_at = time.monotonic()
        if told.poll():
            told.recv()
            now = time.monotonic()
            figures = {
                "cores": (time.process_time() - cpu_s) / (now - since),
                "mib": _rss_mib() - alone_mib,
                "known_s": known_at - began if known_at else -1.0,
                "connected": len(leader.connected),
            }
            told.send((figures, machine.seen))
            cpu_s, since = time.process_time(), now
    for one in tasks:
        if one.done():
            one.result()


def _rss_mib() -> float:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize() / 2**20


class LeaderProcess:
    """A process that leads; killed at the end."""

    def __init__(self, clock: Clock, port: int) -> None:
        fork = multiprocessing.get_context("spawn")
        self._told, there = fork.Pipe()
        self._process = fork.Process(target=lead, args=(clock, port, there), daemon=True)
        self._process.start()

    async def figures(self) -> tuple[dict[str, float], dict[int, float]]:
        self._told.send("figures")
        while not self._told.poll():
            if not self._process.is_alive():
                raise RuntimeError("the leader's process has ended")
            await asyncio.sleep(0.05)
        found: tuple[dict[str, float], dict[int, float]] = self._told.recv()
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
        credentials = SecretCredentials(SECRET, "bench", node_rank)
        link = _Link(
            node_rank,
            f"127.0.0.1:{port}",
            credentials,
            take=lambda frame, at=node_rank: channels[at].take(frame),
            changed=machine.changes.ring,
        )
        channels[node_rank] = LinkChannel(link, **machine.options(os.urandom(8).hex()))
        tasks += machine.tasks(channels[node_rank])
        machines.append(machine)
    try:
        yield machines
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


channels: dict[int, LinkChannel] = {}


async def measure(machines: int, every_s: float, seconds: float) -> dict[str, float]:
    """The figures of a run of this size."""
    port = _free_port()
    clock = Clock(machines, time.monotonic() + 2.0, every_s)
    leader = LeaderProcess(clock, port)
    try:
        async with _others(clock, port) as others:
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
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    options = parser.parse_args()
    logging.disable(logging.CRITICAL)
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    sizes = ((64, 1.0), (2048, 5.0))
    if options.machines:
        sizes = ((options.machines, options.every),)
    for machines, every_s in sizes:
        figures = asyncio.run(measure(machines, every_s, options.seconds))
        if options.json:
            print(json.dumps({"machines": machines, "every_s": every_s, **figures}), flush=True)
        else:
            show(machines, figures)


if __name__ == "__main__":
    main()
