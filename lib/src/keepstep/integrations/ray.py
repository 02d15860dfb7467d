"""Ray Train's `TorchTrainer`: one line in the function that each worker runs.

    from keepstep.integrations.ray import checkpointer

    def train(config):
        model, optimizer = ...
        kept = checkpointer({"model": model, "optimizer": optimizer}, dir="/local/keepstep")
        at = kept.restore()

Ray ends all workers when one of them fails (`FailureConfig`), and starts new ones, perhaps others
in number and on other nodes. The sidecar of each node is no child of a worker, so it stays, and a
new worker goes on from memory. Nodes know each other by what Ray says of them.
"""

from __future__ import annotations

import os
import secrets
import zlib
from collections.abc import Mapping
from typing import Any, NamedTuple

import ray
import ray.train
from torch import distributed

from keepstep.checkpointer import Checkpointer
from keepstep.steps import run_name

_LINGER = "15m"
"""Longer than it takes Ray to find a node for a worker, most times."""
_PORTS = range(20_000, 30_000)
"""Below those that Linux gives to connections, and Ray to its workers."""


class _Place(NamedTuple):
    """Where a worker runs. `address`: of its node. `secret`: that of rank 0 is the run's."""

    node_rank: int
    address: str
    secret: str


def checkpointer(
    components: Mapping[str, Any] | None = None,
    *,
    dir: str | os.PathLike[str],
    run: str | None = None,
    **options: Any,
) -> Checkpointer:
    """A `Checkpointer` whose steps survive the workers of Ray Train. Every worker calls it.

    `dir`: a directory on a drive of each node, below which the run is kept. `run`: its name, by
    default that of the experiment (`RunConfig(name=...)`). `options`, and further components: see
    `Checkpointer`. With several nodes, each keeps copies of another one's shards; the environment
    holds further settings (KEEPSTEP_ARCHIVE, KEEPSTEP_PEER_REPLICAS; see `keepstep start --help`).

    Raises UsageError for components that cannot be kept, and where no sidecar starts; RuntimeError
    (Ray's) outside of a worker.
    """
    context = ray.train.get_context()
    name = run or run_name(context.get_experiment_name())
    mine = _Place(context.get_node_rank(), ray.util.get_node_ip_address(), secrets.token_hex(32))
    os.environ.setdefault("KEEPSTEP_LINGER", _LINGER)
    os.environ.update(_settings(name, mine, _everywhere(mine)))
    return Checkpointer(components, dir=dir, run=name, **options)


def _everywhere(mine: _Place) -> list[_Place]:
    """The places of all workers, by rank."""
    if not distributed.is_initialized():
        return [mine]
    found: list[Any] = [None] * distributed.get_world_size()
    distributed.all_gather_object(found, mine)
    return found


def _settings(run: str, mine: _Place, places: list[_Place]) -> dict[str, str]:
    """The settings of the sidecar on this node, as variables of the environment.

    A node may have several trainings. So the port follows from the run's name.
    """
    addresses = {place.node_rank: place.address for place in places}
    if len(addresses) == 1:
        return {}
    port = _PORTS[zlib.crc32(run.encode()) % len(_PORTS)]
    return {
        "KEEPSTEP_NODES": str(len(addresses)),
        "KEEPSTEP_NODE_RANK": str(mine.node_rank),
        "KEEPSTEP_LEADER": f"{addresses[0]}:{port}",
        "KEEPSTEP_PEER_LISTEN": f"{mine.address}:{port}",
        "KEEPSTEP_SECRET": places[0].secret,
    }
