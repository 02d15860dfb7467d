"""Measures a restart of thousands of ranks, part by part, and how its costs grow.

    python -m bench.scale                              all parts for 256, 1,024, 4,096, 16,384 ranks
    python -m bench.scale --worlds 256 1024 --parts vote gossip

Each part runs the product's own code for one process of the restart, in a process of its own. What
the other processes would send is made beforehand and not timed. There is no network: bytes are
counted instead of sent. A node has 8 ranks. The model has 195 parameters and AdamW's state.

`ddp`: each rank has the whole model, and each node keeps it once, in 8 parts. `fsdp`: each rank has
one slice of each tensor, which is empty for some ranks if there are more ranks than rows.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import itertools
import json
import math
import multiprocessing
import pickle
import resource
import statistics
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple, TypeVar

import msgspec

from bench.report import table
from keepstep.core.ledger import Ledger, Reported
from keepstep.core.restore_vote import Candidate, Candidates, Offer
from keepstep.core.shard import NO_RANKS, Ranks, Shard
from keepstep.image import Layout, Parameters, TensorRole, TensorSpec
from keepstep.restore.collective import AgreedEpoch, Collective
from keepstep.restore.fill_plan import Box, IndexBuilder, TensorRequest, make_fill_plan
from keepstep.state.sharding import (
    ReplicatedTensorSize,
    agree_on_topology,
    compute_row_partitions,
    find_chunk_begin_and_length,
)
from keepstep.steps import Epoch, EpochId, StepId, Tier, TierAnswer
from keepstep.wire.trainer import LeaseGranted
from keepstep_sidecar.commit.reachable_copies import LocalShards, ReachableCopies, RemoteInventory
from keepstep_sidecar.tiers.peer.peer_list import KnownPeer, PeerList
from keepstep_sidecar.tiers.peer.protocol import ListedShard, PodShardListing
from keepstep_sidecar.tiers.remote_tier import RemoteTier

T = TypeVar("T")

WORLDS = (256, 1024, 4096, 16384)
NODE = 8
LAYERS, WIDTH, WORDS = 32, 4096, 50304
_EPOCH = EpochId(3, "1f9c2d7a")
_MEMORY, _LOCAL = range(1_000_007, 1_000_011), range(1_000_004, 1_000_010, 2)
_ARCHIVED = range(1000, 101_000, 1000)
NEWEST = StepId(_EPOCH, _MEMORY[-1])


@dataclass
class Measured:
    """Figures by name, whose ending is the unit. `_s` is CPU seconds of this process, because other
    processes share the cores; `_bytes` and `_mib` are bytes and MiB."""

    found: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        began = time.process_time()
        yield
        self.found[name] = time.process_time() - began


# --- the model -----------------------------------------------------------------------------------


def parameters() -> Parameters:
    """The name and shape of each parameter of a GPT with 6.6 billion weights."""
    layer = {
        "ln_1.weight": (WIDTH,), "attn.qkv.weight": (3 * WIDTH, WIDTH),
        "attn.proj.weight": (WIDTH, WIDTH), "ln_2.weight": (WIDTH,),
        "mlp.fc.weight": (4 * WIDTH, WIDTH), "mlp.proj.weight": (WIDTH, 4 * WIDTH),
    }  # fmt: skip
    found: list[tuple[str, tuple[int, ...]]] = [("model.wte.weight", (WORDS, WIDTH))]
    for number in range(LAYERS):
        found += [(f"model.h.{number}.{name}", shape) for name, shape in layer.items()]
    return (*found, ("model.ln_f.weight", (WIDTH,)), ("model.lm_head.weight", (WORDS, WIDTH)))


def _tensors() -> Iterator[tuple[str, tuple[int, ...], TensorRole]]:
    """Name, shape and section of each tensor of model and optimizer, in the order of names. Step
    counters are scalars."""
    found = []
    for name, shape in parameters():
        found.append((name, shape, TensorRole.PARAMS))
        state = {"exp_avg": shape, "exp_avg_sq": shape, "step": ()}
        for key, its in state.items():
            found.append((f"optimizer.state.{name}.{key}", its, TensorRole.OPTIMIZER))
    yield from sorted(found)


def twins_of(kind: str, rank: int, world: int) -> tuple[int, ...]:
    """The twins of a rank, as `Topology.twins` finds them."""
    same = range(rank % NODE, world, NODE) if kind == "ddp" else ()
    return tuple(twin for twin in same if twin != rank)


def alike_of(kind: str, rank: int, world: int) -> Ranks:
    """The rank and its twins; `NO_RANKS` if it has no twins."""
    alike = kind == "ddp" and world > NODE
    return Ranks.of(range(rank % NODE, world, NODE)) if alike else NO_RANKS


class Model:
    """The images of all ranks, one at a time."""

    def __init__(self, kind: str, world: int) -> None:
        self.kind, self.world = kind, world
        self.tensors = list(_tensors())
        large = [(name, shape) for name, shape, _ in self.tensors if shape]
        cuts = compute_row_partitions(
            tuple(ReplicatedTensorSize(shape, 4) for _, shape in large), NODE
        )
        self._cuts = {name: rows for (name, _), rows in zip(large, cuts, strict=True)}
        self._parameters = parameters()
        names = [name for name, _, _ in self.tensors]
        self._skeleton = json.dumps(["d", [[name, ["t", name]] for name in names]])

    def box(self, number: int, rank: int) -> Box:
        """The box of a tensor that a rank stages."""
        name, shape, _ = self.tensors[number]
        if not shape:
            return Box((), ())
        if self.kind == "fsdp":
            begin, size = find_chunk_begin_and_length(shape[0], self.world, rank)
        else:
            begin, end = self._cuts[name][rank % NODE :][:2]
            size = end - begin
        return Box((begin, *(0,) * len(shape[1:])), (size, *shape[1:]))

    def header(self, rank: int) -> bytes:
        """The header of the rank's image."""
        specs = []
        for number, (name, shape, section) in enumerate(self.tensors):
            box = self.box(number, rank)
            whole = box.sizes == shape
            specs.append(
                TensorSpec(
                    name, "F32", box.sizes, section, () if whole else box.offsets,
                    None if whole else shape,
                )
            )  # fmt: skip
        return Layout.build(
            specs, rank=rank, world=self.world, skeleton=self._skeleton,
            twins=twins_of(self.kind, rank, self.world),
            parameters={"optimizer": self._parameters},
        ).header  # fmt: skip


# --- what a trainer does -------------------------------------------------------------------------


class _Everyone(Collective):
    """A collective in which all other ranks send what this rank sends. As in `all_gather_object`,
    each value is pickled once, and this rank unpickles one for each rank."""

    gathered_bytes = 0

    def _gather(self, mine: T) -> list[T]:
        data = pickle.dumps(mine)
        self.gathered_bytes += len(data) * self._world
        return [pickle.loads(data) for _ in range(self._world)]


def candidates(world: int) -> Candidates:
    """The candidates of a rank with four steps in memory, three on local, and a hundred in the
    archive."""
    tiers = {StepId(_EPOCH, step): Tier.ARCHIVE for step in _ARCHIVED}
    tiers |= {StepId(_EPOCH, step): Tier.LOCAL for step in _LOCAL}
    tiers |= {StepId(_EPOCH, step): Tier.MEMORY for step in _MEMORY}
    return Candidates(
        answer=TierAnswer.STEPS,
        candidates=tuple(
            Candidate(id=step_id, tier=tier, world=world) for step_id, tier in tiers.items()
        ),
        highest_epoch=_EPOCH.number,
        plan=NEWEST,
        offers=tuple(Offer(id=step_id, tier=tier, world=world) for step_id, tier in tiers.items()),
    )


def vote(kind: str, world: int) -> dict[str, float]:
    """Exchange all that the ranks tell each other in one restore, as one rank receives it: leases,
    ballots, claims, four stages."""
    measured, shared = Measured(), tuple(range(world))
    mine = candidates(world)
    session: Any = SimpleNamespace(lease="lease", rank=0, call_apart=lambda *_, **__: mine)
    granted = LeaseGranted(lease="lease", run="gpt")
    restoring: Any = SimpleNamespace(stage_functions=(lambda _: None,) * 4, tier=Tier.MEMORY)
    everyone = _Everyone(session, rank=0, world=world)
    node = "node-0:/run/sidecar.sock"
    claims = [(name, shared) for name, _ in parameters()]

    def meet(gather: Callable[[Any], list[Any]]) -> None:
        agree_on_topology(lambda: claims, gather, rank=0, world=world, node=node, spread=False)

    with measured.timed("restore_s"):
        found = everyone.restore(
            lambda: granted, lambda _: restoring, meet=meet, begin_fresh=lambda _: None
        )
    assert isinstance(found, AgreedEpoch)
    assert found.epoch.parent == NEWEST
    return measured.found | {"heard_bytes": everyone.gathered_bytes}


def plan(kind: str, world: int) -> dict[str, float]:
    """Make one rank's plan from its own image at the same world, and then from the saved images at
    half that world. `headers_s`: reading what a rank needs of these images before it can plan."""
    measured, model = Measured(), Model(kind, world)
    header = model.header(1)
    with measured.timed("own_plan_s"):
        own = IndexBuilder(world)
        own.add_image(Layout.parse(header))
        requests = [
            TensorRequest(name, model.box(at, 1)) for at, (name, _, _) in enumerate(model.tensors)
        ]
        make_fill_plan(requests, own.build(), rank=1, nearness=[0] * world, reader=0)
    # a node's trainers are offered one of twins
    needed = range(NODE if kind == "ddp" else world)
    builder = IndexBuilder(world)
    before = _rss_bytes()
    headers_bytes = read_s = made_s = 0.0
    for rank in needed:
        packed = base64.b64encode(zlib.compress(model.header(rank), 1))
        began = time.process_time()
        layout = Layout.parse(zlib.decompress(base64.b64decode(packed)))
        read = time.process_time()
        builder.add_image(layout)
        headers_bytes += len(packed)
        read_s += read - began
        made_s += time.process_time() - read
    index = builder.build(tuple(range(len(needed), world)))
    measured.found |= {"headers_bytes": headers_bytes, "headers_s": read_s, "index_s": made_s}
    measured.found["index_mib"] = (_rss_bytes() - before) / (1 << 20)
    after = Model(kind, world // 2)
    requests = [
        TensorRequest(
            name, Box((0,) * len(shape), shape) if kind == "ddp" else after.box(number, 1)
        )
        for number, (name, shape, _) in enumerate(model.tensors)
    ]
    with measured.timed("plan_s"):
        made = make_fill_plan(requests, index, rank=1, nearness=[3] * world, reader=0)
    measured.found["pieces"] = sum(1 for _ in made.pieces())
    return measured.found


# --- what a sidecar does -------------------------------------------------------------------------


def _listing(kind: str, node: int, world: int) -> bytes:
    """What a pod says that it holds: its own shards on drives, and copies for the previous pod."""
    pods = world // NODE
    shards = [
        ListedShard(
            rank=rank, step_id=StepId(_EPOCH, step), world=world, root=f"{step:016x}{rank:016x}",
            params_digest=f"{step:016x}{rank:016x}", written_at=1.79e9, size_bytes=1 << 34,
            alike=alike_of(kind, rank, world), copy=owner != node,
        )
        for owner in dict.fromkeys((node, (node - 1) % pods))
        for rank in range(owner * NODE, owner * NODE + NODE)
        for step in _LOCAL
    ]  # fmt: skip
    return msgspec.json.encode(
        PodShardListing(run="gpt", epochs=(Epoch(_EPOCH),), shards=tuple(shards))
    )


class _Copy(NamedTuple):
    """A source that is never read."""

    tier: Tier
    shard: Shard


class _Peers(RemoteTier):
    """The peer tier, without its connections."""

    tier = Tier.PEER

    def __init__(self, directory: PeerList) -> None:
        super().__init__()
        self._directory = directory

    async def scan(self) -> Any:
        return self._directory.combine_inventories(())

    def sources(self, shard: Any) -> list[Any]:
        return [_Copy(Tier.PEER, shard) for _ in shard.key]


def gossip(kind: str, world: int) -> dict[str, float]:
    """One sidecar receives what all others hold, and finds what it can offer to its ranks."""
    measured, directory = Measured(), PeerList(complete=True)
    decode = msgspec.json.Decoder(PodShardListing).decode
    received_bytes, read_s, pods = 0, 0.0, world // NODE
    for node in range(1, pods):
        text, address = _listing(kind, node, world), f"10.0.{node >> 8}.{node & 255}:9443"
        directory.known[address] = KnownPeer(address=address, node_rank=node)
        received_bytes += len(text)
        began = time.process_time()
        directory.record_pod_answer(address, decode(text))
        read_s += time.process_time() - began
    remotes = RemoteInventory(_Peers(directory))
    with measured.timed("inventory_s"):
        asyncio.run(remotes.scan())
    ledger = Ledger()
    with measured.timed("ledger_s"):
        reports = {rank: remotes.build_rank_report(rank) for rank in sorted(remotes.ranks)}
        ledger.apply(Reported(node_rank=0, ranks=reports, epochs=remotes.epochs, sequence=1))
        whole = ledger.list_reachable_steps()
    pool: Any = SimpleNamespace(ranks={}, find_slots_by_rank=lambda step_id: {})
    locator = ReachableCopies(LocalShards(pool, pool), pool, remotes)
    with measured.timed("offers_s"):
        offers = locator.offers(whole)
    assert len(offers) == len(_LOCAL)
    return measured.found | {"listings_bytes": received_bytes, "listings_read_s": read_s}


# --- all of it -----------------------------------------------------------------------------------

PARTS: dict[str, Callable[[str, int], dict[str, float]]]
PARTS = {"vote": vote, "gossip": gossip, "plan": plan}
KINDS = ("ddp", "fsdp")


def run_one(part: str, kind: str, world: int) -> dict[str, float]:
    """The figures of one part, run in this process. `peak_mib`: how much the peak grew."""
    before = _peak_mib()
    found = PARTS[part](kind, world)
    return found | {"peak_mib": _peak_mib() - before}


def exponent(points: Sequence[tuple[int, float]]) -> float:
    """The exponent of the power of the world that fits best; NaN for fewer than two points."""
    logs = [(math.log(world), math.log(value)) for world, value in points if value > 0]
    if len(logs) < 2:
        return math.nan
    return statistics.linear_regression(*zip(*logs, strict=True)).slope


def rows(
    results: dict[tuple[str, str], list[dict[str, float]]], worlds: list[int]
) -> Iterator[list[str]]:
    """Each figure by part and kind of state, in each world, and how it grows."""
    for (part, kind), found in results.items():
        for name in found[0]:
            values = [row[name] for row in found]
            power = exponent(list(zip(worlds, values, strict=True)))
            yield [part, kind, name, *(_shown(name, value) for value in values), f"n^{power:.1f}"]


def _shown(name: str, value: float) -> str:
    if name.endswith("_bytes"):
        return f"{value / 1e6:,.3g} MB"
    unit = " s" if name.endswith("_s") else " MiB" if name.endswith("_mib") else ""
    return f"{value:,.3g}{unit}"


def _peak_mib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def _rss_bytes() -> int:
    pages = Path("/proc/self/statm").read_text().split()[1]
    return int(pages) * resource.getpagesize()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--worlds", type=int, nargs="+", default=list(WORLDS), help="ranks")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    options = parser.parse_args()
    results: dict[tuple[str, str], list[dict[str, float]]] = {}
    # each in a process of its own, whose peak of memory is its own
    with multiprocessing.get_context("spawn").Pool(1, maxtasksperchild=1) as pool:
        for part, kind, world in itertools.product(options.parts, options.kinds, options.worlds):
            found = pool.apply(run_one, (part, kind, world))
            print(part, kind, world, found, flush=True)
            results.setdefault((part, kind), []).append(found)
    head = ("part", "state", "figure", *(f"{world:,}" for world in options.worlds), "grows as")
    print(table(head, rows(results, options.worlds)))


if __name__ == "__main__":
    main()
