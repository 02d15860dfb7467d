"""Measures a restart of thousands of ranks, part by part, and how its costs grow.

    python -m bench.scale                              all parts for 256, 1,024, 4,096, 16,384 ranks
    python -m bench.scale --worlds 256 1024 --parts vote gossip
    python -m bench.scale --parts ledger --write       the result into bench/results

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
import json
import math
import os
import pickle
import resource
import signal
import subprocess
import sys
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple, TypeVar

import msgspec

from bench import machine
from keepstep.core.commit_rule import ReportedTier
from keepstep.core.ledger import Ledger, Reported
from keepstep.core.shard import NOBODY, Ranks, Shard
from keepstep.core.vote import Candidate, Candidates, Offer
from keepstep.image import Layout, Parameters, Section, TensorSpec
from keepstep.restore.collective import Agreed, Collective
from keepstep.restore.plan import Box, IndexBuilder, Plan, Want, make
from keepstep.state.sharding import Bulk, Topology, agree, chunk, cut
from keepstep.steps import Answer, Epoch, EpochId, StepId, Tier
from keepstep.wire.trainer import LeaseGranted, Source, Sources, from_json, to_json
from keepstep_sidecar.commit.inventory import Copies, LocalShards, RemoteInventory
from keepstep_sidecar.tiers.peer.members import Directory, Known
from keepstep_sidecar.tiers.peer.protocol import Listed, Listing
from keepstep_sidecar.tiers.tier import RemoteTier

T = TypeVar("T")

WORLDS = (256, 1024, 4096, 16384)
NODE = 8
LAYERS, WIDTH, WORDS = 32, 4096, 50304
_LIMIT_S, _LIMIT_BYTES = 900, 8 << 30
_PARSED = 64
"""How many headers are read. The time for all is extrapolated, because all are read alike."""
_RESULTS = Path(__file__).parent / "results"

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


def _tensors() -> Iterator[tuple[str, tuple[int, ...], Section]]:
    """Name, shape and section of each tensor of model and optimizer, in the order of names. Step
    counters are scalars."""
    found = []
    for name, shape in parameters():
        found.append((name, shape, Section.PARAMS))
        state = {"exp_avg": shape, "exp_avg_sq": shape, "step": ()}
        for key, its in state.items():
            found.append((f"optimizer.state.{name}.{key}", its, Section.OPTIMIZER))
    yield from sorted(found)


def _rows(kind: str, world: int) -> list[Callable[[int], tuple[int, int]]]:
    """For each tensor, a function from a rank to the first row and the number of rows that the rank
    stages."""
    shapes = [shape for _, shape, _ in _tensors()]
    if kind == "fsdp":
        return [
            lambda rank, rows=shape[0] if shape else 1: chunk(rows, world, rank) for shape in shapes
        ]
    cuts = iter(cut(tuple(Bulk(shape, 4) for shape in shapes if shape), NODE))
    rows = [next(cuts) if shape else None for shape in shapes]

    def part(at: tuple[int, ...] | None, rank: int) -> tuple[int, int]:
        place = rank % NODE
        return (0, 1) if at is None else (at[place], at[place + 1] - at[place])

    return [partial(part, at) for at in rows]


def twins_of(kind: str, rank: int, world: int) -> tuple[int, ...]:
    """The twins of a rank, as `Topology.twins` finds them."""
    same = range(rank % NODE, world, NODE) if kind == "ddp" else ()
    return tuple(one for one in same if one != rank)


def alike_of(kind: str, rank: int, world: int) -> Ranks:
    """The rank and its twins; `NOBODY` if it has no twins."""
    alike = kind == "ddp" and world > NODE
    return Ranks.of(range(rank % NODE, world, NODE)) if alike else NOBODY


class Model:
    """The images of all ranks, one at a time."""

    def __init__(self, kind: str, world: int) -> None:
        self.kind, self.world = kind, world
        self.tensors = list(_tensors())
        self._rows = _rows(kind, world)
        self._parameters = parameters()
        names = [name for name, _, _ in self.tensors]
        self._skeleton = json.dumps(["d", [[name, ["t", name]] for name in names]])

    def box(self, number: int, rank: int) -> Box:
        """The box of a tensor that a rank stages."""
        shape = self.tensors[number][1]
        begin, size = self._rows[number](rank)
        return Box((begin, *(0,) * len(shape[1:])), (size, *shape[1:])) if shape else Box((), ())

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
        answer=Answer.STEPS,
        candidates=tuple(Candidate(id=id, tier=tier, world=world) for id, tier in tiers.items()),
        highest_epoch=_EPOCH.number,
        plan=NEWEST,
        offers=tuple(Offer(id=id, tier=tier, world=world) for id, tier in tiers.items()),
    )


def vote(kind: str, world: int) -> dict[str, float]:
    """Exchange all that the ranks tell each other in one restore, as one rank receives it: leases,
    ballots, claims, four stages. Then find the rank's twins."""
    measured, shared = Measured(), tuple(range(world))
    text = to_json(candidates(world))
    with measured.timed("candidates_read_s"):
        mine = from_json(Candidates, text)
    session: Any = SimpleNamespace(lease="lease", rank=0, call=lambda *_, **__: mine)
    granted = LeaseGranted(lease="lease", run="gpt")
    restoring: Any = SimpleNamespace(stages=(lambda _: None,) * 4, tier=Tier.MEMORY)
    everyone = _Everyone(session, rank=0, world=world)
    agreed: list[Topology] = []

    def meet(gather: Callable[[Any], list[Any]]) -> None:
        claims = [(name, shared) for name, _ in parameters()]
        with measured.timed("claims_s"):
            agreed.append(
                agree(
                    lambda: claims, gather, rank=0, world=world, node="node-0:/run/sidecar.sock",
                    spread=False,
                )
            )  # fmt: skip

    with measured.timed("restore_s"):
        found = everyone.restore(
            lambda: granted, lambda _: restoring, meet=meet, begin_anew=lambda _: None
        )
    assert isinstance(found, Agreed)
    assert found.epoch.parent == NEWEST
    nodes = tuple(rank // NODE for rank in range(world))
    topology = replace(agreed[0], nodes=nodes)
    replicas = shared if kind == "ddp" else (0,)
    with measured.timed("twins_s"):
        twins = topology.twins([replicas] * len(parameters()))
    assert twins == twins_of(kind, 0, world)
    return measured.found | {"heard_bytes": everyone.gathered_bytes}


def plan(kind: str, world: int) -> dict[str, float]:
    """Make one rank's plan from its own image at the same world, and then from the saved images at
    half that world."""
    measured, model = Measured(), Model(kind, world)
    _own_plan(measured, model)
    needed = _needed(kind, world)
    measured.found["images"] = len(needed)
    sources = Sources(
        id=NEWEST,
        world=world,
        sources=tuple(
            Source(
                rank=rank, tier=Tier.PEER, bytes=1 << 34, extras_bytes=8000,
                twins=twins_of(kind, rank, world),
            )
            for rank in needed
        ),
        left_out=tuple({*range(world)}.difference(needed)),
    )  # fmt: skip
    text = to_json(sources)
    measured.found["sources_bytes"] = len(text)
    with measured.timed("sources_read_s"):
        from_json(Sources, text)
    del text
    _headers(measured, model, needed)
    builder = IndexBuilder(world)
    before = _rss_bytes()
    began = made_s = 0.0
    like = Layout.parse(model.header(0))
    for rank in needed:
        layout = _as_of(like, model, rank)
        began = time.process_time()
        builder.add(layout)
        made_s += time.process_time() - began
    index = builder.build(sources.left_out)
    measured.found["index_s"] = made_s
    measured.found["index_mib"] = (_rss_bytes() - before) / (1 << 20)
    running = max(1, world // 2)
    after = Model(kind, running)
    wants = [
        Want(name, Box((0,) * len(shape), shape) if kind == "ddp" else after.box(number, 1))
        for number, (name, shape, _) in enumerate(model.tensors)
    ]
    with measured.timed("plan_s"):
        made = make(wants, index, rank=1, nearness=[3] * world, reader=0)
    measured.found["pieces"] = sum(1 for _ in made.pieces())
    return measured.found


def _needed(kind: str, world: int) -> list[int]:
    """The saved ranks whose images a sidecar with empty memory offers to a node's trainers. It
    reads the bytes at rest of each image once."""
    shards = {
        rank: [_Copy(Tier.PEER, Shard(step_id=NEWEST, rank=rank, world=world, alike=alike))]
        for rank in range(world)
        for alike in [alike_of(kind, rank, world)]
    }
    pool: Any = SimpleNamespace(ranks={}, of=lambda _: shards, index=0)
    return Copies(LocalShards(pool, pool), pool, pool).one_of_twins(NEWEST, range(world), known=())


def _own_plan(measured: Measured, model: Model) -> Plan:
    header = model.header(1)
    with measured.timed("own_plan_s"):
        layout = Layout.parse(header)
        builder = IndexBuilder(model.world)
        builder.add(layout)
        wants = [Want(name, model.box(at, 1)) for at, (name, _, _) in enumerate(model.tensors)]
        near = [0] * model.world
        return make(wants, builder.build(), rank=1, nearness=near, reader=0)


def _headers(measured: Measured, model: Model, needed: Sequence[int]) -> None:
    """Read what a rank needs of these images before it can plan. Only some headers are read; the
    figures are scaled to all."""
    texts = [model.header(rank) for rank in needed[:: max(1, len(needed) // _PARSED)]]
    packed = [base64.b64encode(zlib.compress(one, 1)) for one in texts]
    share = len(needed) / len(texts)
    with measured.timed("headers_s"):
        for one in packed:
            Layout.parse(zlib.decompress(base64.b64decode(one)))
    measured.found["headers_s"] *= share
    measured.found["headers_bytes"] = sum(map(len, packed)) * share
    measured.found["headers_at_rest_bytes"] = sum(map(len, texts)) * share


def _as_of(like: Layout, model: Model, rank: int) -> Layout:
    """The layout of another rank, correct in all that an index reads."""
    entries = {}
    for number, (name, shape, _) in enumerate(model.tensors):
        one, box = like.entries[name], model.box(number, rank)
        spec = one.spec._replace(shape=box.sizes, offsets=box.offsets, global_shape=shape)
        entries[name] = one._replace(spec=spec)
    return replace(like, rank=rank, entries=entries)


# --- what a sidecar does -------------------------------------------------------------------------


def _listing(kind: str, node: int, world: int) -> bytes:
    """What a pod says that it holds: its own shards on drives, and copies for the previous pod."""
    pods = world // NODE
    shards = [
        Listed(
            rank=rank, step_id=StepId(_EPOCH, step), world=world, root=f"{step:016x}{rank:016x}",
            params_digest=f"{step:016x}{rank:016x}", written_at=1.79e9, size_bytes=1 << 34,
            alike=alike_of(kind, rank, world), copy=owner != node,
        )
        for owner in dict.fromkeys((node, (node - 1) % pods))
        for rank in range(owner * NODE, owner * NODE + NODE)
        for step in _LOCAL
    ]  # fmt: skip
    return msgspec.json.encode(Listing(run="gpt", epochs=(Epoch(_EPOCH),), shards=tuple(shards)))


class _Copy(NamedTuple):
    """A source that is never read."""

    tier: Tier
    shard: Shard


class _Peers(RemoteTier):
    """The peer tier, without its connections."""

    tier = Tier.PEER

    def __init__(self, directory: Directory) -> None:
        super().__init__()
        self._directory = directory

    async def look(self) -> Any:
        return self._directory.inventory(())

    def sources(self, shard: Any) -> list[Any]:
        return [_Copy(Tier.PEER, shard) for _ in shard.key]


def gossip(kind: str, world: int) -> dict[str, float]:
    """One sidecar receives what all others hold, and finds what it can offer to its ranks."""
    measured, directory = Measured(), Directory(complete=True)
    decode = msgspec.json.Decoder(Listing).decode
    heard_bytes, read_s, pods = 0, 0.0, world // NODE
    for node in range(1, pods):
        text, address = _listing(kind, node, world), f"10.0.{node >> 8}.{node & 255}:9443"
        directory.known[address] = Known(address=address, node_rank=node)
        heard_bytes += len(text)
        began = time.process_time()
        directory.heard(address, decode(text))
        read_s += time.process_time() - began
    remotes = RemoteInventory(_Peers(directory))
    with measured.timed("inventory_s"):
        asyncio.run(remotes.look())
    ledger = Ledger()
    with measured.timed("ledger_s"):
        told = {rank: remotes.report(rank) for rank in sorted(remotes.ranks)}
        ledger.apply(Reported(node_rank=0, ranks=told, epochs=remotes.epochs, sequence=1))
        whole = ledger.whole()
    pool: Any = SimpleNamespace(ranks={})
    locator = Copies(LocalShards(pool, pool), pool, remotes)
    with measured.timed("offers_s"):
        offers = locator.offers(whole)
    assert len(offers) == len(_LOCAL)
    return measured.found | {"listings_bytes": heard_bytes, "listings_read_s": read_s}


# --- what the host of the ledger does ------------------------------------------------------------


def ledger(kind: str, world: int) -> dict[str, float]:
    """The ledger of a run takes in the first report of every node, then one more step of each, and
    names what is committed after each report. A node also has copies for the previous node."""
    measured, run = Measured(), Ledger()
    pods = world // NODE
    first = [_reported(kind, node, world, _LOCAL, sequence=1) for node in range(pods)]
    with measured.timed("first_reports_s"):
        for report in first:
            run.apply(report)
            run.committed(Tier.LOCAL)
    assert len(run.committed(Tier.LOCAL)) == len(_LOCAL)
    later = (*_LOCAL[1:], _LOCAL[-1] + 2)
    changes = [_reported(kind, node, world, later, sequence=2) for node in range(pods)]
    with measured.timed("next_step_s"):
        for report in changes:
            run.apply(report)
            run.committed(Tier.LOCAL)
    assert run.committed(Tier.LOCAL)[-1].step == later[-1]
    return measured.found


def _reported(kind: str, node: int, world: int, steps: Sequence[int], *, sequence: int) -> Reported:
    """What a node reports: shards of its own ranks, and copies of the previous node's."""
    ranks = {}
    for owner in dict.fromkeys((node, (node - 1) % (world // NODE))):
        place = Tier.LOCAL if owner == node else Tier.PEER
        for rank in range(owner * NODE, owner * NODE + NODE):
            shards = tuple(
                Shard(
                    step_id=StepId(_EPOCH, step), rank=rank, world=world,
                    root=f"{step:016x}{rank:016x}", alike=alike_of(kind, rank, world),
                )
                for step in steps
            )  # fmt: skip
            ranks[rank] = {place: ReportedTier.of(shards)}
    return Reported(node_rank=node, ranks=ranks, epochs=(Epoch(_EPOCH),), sequence=sequence)


# --- all of it -----------------------------------------------------------------------------------

PARTS: dict[str, Callable[[str, int], dict[str, float]]] = {
    "vote": vote,
    "gossip": gossip,
    "plan": plan,
    "ledger": ledger,
}
KINDS = ("ddp", "fsdp")


def run_one(part: str, kind: str, world: int) -> dict[str, float]:
    """The figures of one part, run in this process. `peak_mib`: how much the peak grew."""
    before = _peak_mib()
    found = PARTS[part](kind, world)
    return found | {"peak_mib": _peak_mib() - before}


def apart(part: str, kind: str, world: int) -> dict[str, float] | str:
    """The figures of one part, run in another process; or why there are none."""
    command = [sys.executable, "-m", "bench.scale", "--one", part, kind, str(world)]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as child:
        try:
            told, complaint = child.communicate(timeout=_LIMIT_S)
        except subprocess.TimeoutExpired:
            os.killpg(child.pid, signal.SIGKILL)  # with the processes that it started
            return f"not within {_LIMIT_S} s"
    if child.returncode:
        return (complaint.strip().splitlines() or ["it was killed"])[-1]
    found: dict[str, float] = json.loads(told.splitlines()[-1])
    return found


def exponent(points: Sequence[tuple[int, float]]) -> float:
    """The exponent of the power of the world that fits best; NaN for fewer than two points."""
    logs = [(math.log(world), math.log(value)) for world, value in points if value > 0]
    if len(logs) < 2:
        return math.nan
    x, y = (sum(one) / len(logs) for one in zip(*logs, strict=True))
    over = sum((a - x) * (b - y) for a, b in logs)
    return over / sum((a - x) ** 2 for a, _ in logs)


def table(results: dict[tuple[str, str, int], dict[str, float] | str], worlds: list[int]) -> str:
    """A table of the figures by part and kind of state, with a column for each world, and how each
    figure grows."""
    rows = [f"| part | state | figure | {' | '.join(f'{one:,}' for one in worlds)} | grows as |"]
    rows.append("| --- " * (4 + len(worlds)) + "|")
    for part, kind in dict.fromkeys((part, kind) for part, kind, _ in results):
        each = {world: results.get((part, kind, world), "-") for world in worlds}
        names = dict.fromkeys(
            name for one in each.values() if isinstance(one, dict) for name in one
        )
        for name in names:
            told = [one.get(name) if isinstance(one, dict) else one for one in each.values()]
            points = [
                (w, v) for w, v in zip(worlds, told, strict=True) if isinstance(v, float | int)
            ]
            power = exponent(points)
            shown = " | ".join(_shown(name, one) for one in told)
            grows = "-" if math.isnan(power) else f"n^{power:.1f}"
            rows.append(f"| {part} | {kind} | {name} | {shown} | {grows} |")
    return "\n".join(rows)


def _shown(name: str, value: float | str | None) -> str:
    if value is None or isinstance(value, str):
        return value or "-"
    if name.endswith("_bytes"):
        return f"{value / 1e6:,.3g} MB" if value < 1e9 else f"{value / 1e9:,.3g} GB"
    unit = "s" if name.endswith("_s") else "MiB" if name.endswith("_mib") else ""
    return f"{value:,.3g} {unit}".strip() if value < 1000 else f"{value:,.0f} {unit}".strip()


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
    parser.add_argument("--write", action="store_true", help="the result into bench/results")
    parser.add_argument("--one", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        resource.setrlimit(resource.RLIMIT_AS, (_LIMIT_BYTES, _LIMIT_BYTES))
        part, kind, world = options.one
        print(json.dumps(run_one(part, kind, int(world))))
        return
    results = {}
    for part in options.parts:
        for kind in options.kinds:
            for world in options.worlds:
                found = results[part, kind, world] = apart(part, kind, world)
                print(part, kind, world, found, flush=True)
    print(text := table(results, options.worlds))
    if options.write:
        about = "; ".join(
            f"{name}: {told}" for name, told in machine.describe(Path("/tmp")).items()
        )
        command = f"python -m bench.scale {' '.join(sys.argv[1:])}"
        (_RESULTS / f"{machine.slug()}-scale.md").write_text(
            f"# A restart of thousands of ranks\n\n{about}\n\n{text}\n\n    {command}\n"
        )


if __name__ == "__main__":
    main()
