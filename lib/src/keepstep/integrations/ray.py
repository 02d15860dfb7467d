"""Ray Train's `TorchTrainer`: one line in the function that each worker runs.

    from keepstep.integrations.ray import checkpointer

    def train(config):
        model, optimizer = ...
        kept = checkpointer({"model": model, "optimizer": optimizer}, dir="/local/keepstep")
        at = kept.restore()
        ...
        kept.report({"loss": ...})  # ray.train.report, with the newest committed step

Ray ends all workers when one of them fails (`FailureConfig`), and starts new ones, perhaps others
in number and on other nodes. The sidecar of each node is no child of a worker, so it stays, and a
new worker goes on from memory. Nodes know each other by what Ray says of them.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import shutil
import threading
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import ray
import ray.train
from torch import distributed

from keepstep.checkpointer import Checkpointer
from keepstep.client.session import SidecarClient
from keepstep.errors import SidecarError, UsageError
from keepstep.steps import StepId, sanitize_run_name
from keepstep.wire.trainer import SOCKET_ENV, Flushed, FlushRequest

log = logging.getLogger("keepstep")

T = TypeVar("T")

_LINGER = "15m"
"""Longer than it takes Ray to find a node for a worker, most times."""
_PORTS = range(20_000, 30_000)
"""Below those that Linux gives to connections, and Ray to its workers."""
_PREEMPTION_POLL_S = 2.0
"""How often a worker looks whether its node is to go. Ray itself looks every 5 s."""
_GONE = "the step was retired meanwhile"


class _Place(NamedTuple):
    """Where a worker runs. `address`: of its node. `secret`: that of rank 0 is the run's."""

    node_rank: int
    address: str
    secret: str


class RayCheckpointer(Checkpointer):
    """The `Checkpointer` of a worker of Ray Train, which `checkpointer` makes."""

    _home, _archived, _reported, _warned = Path(), False, "", ""

    def report(self, metrics: Mapping[str, Any]) -> None:
        """`ray.train.report(metrics)`, with the newest committed step of this life as checkpoint,
        unless it was reported before. Every worker calls it, as often as the others.

        The step's files get second names (hard links), which live as long as Ray keeps them; see
        docs/frameworks.md. Where they cannot have any, Ray gets the metrics alone, with a warning.
        """
        context = ray.train.get_context()
        storage = context.get_storage()
        step, checkpoint = self._unreported(), None
        if step is not None:
            place = Path(storage.experiment_fs_path, f"checkpoint_{step}")
            failed = ""
            if storage.storage_filesystem.type_name != "local":
                failed = "storage_path is no directory"
            elif self._rank == 0 if self._archived else context.get_local_rank() == 0:
                failed = _link(self._home / str(step), place)
            failed = next(filter(None, _gathered(failed)), "")
            self._reported = str(step)  # a later one is tried next time
            if self._rank == 0 and not failed and len([*place.glob("rank-*")]) != self._world:
                failed = "storage_path is not one directory that all nodes share"
            if self._rank == 0 and not failed:
                checkpoint = ray.train.Checkpoint(str(place), storage.storage_filesystem)
            elif self._rank == 0:
                shutil.rmtree(place, ignore_errors=True)
                self._warn(failed)
        mode = ray.train.CheckpointUploadMode.NO_UPLOAD
        ray.train.report(dict(metrics), checkpoint, checkpoint_upload_mode=mode)

    def _unreported(self) -> StepId | None:
        """The newest step of this life that is committed on all nodes, unless it was reported."""
        here: set[StepId] = set()
        with contextlib.suppress(OSError):
            for path in self._home.iterdir():
                # a step of the archive is whole once it has this file, one of a drive by its name
                if not self._archived or (path / "step.json").exists():
                    with contextlib.suppress(ValueError):
                        here.add(StepId.parse(path.name))
        common = set.intersection(*_gathered(here))
        epoch = None if self._epoch is None else self._epoch.id
        newest = max((step_id for step_id in common if step_id.epoch == epoch), default=None)
        return None if newest is None or str(newest) == self._reported else newest

    def _warn(self, failed: str) -> None:
        if failed not in (_GONE, self._warned):
            self._warned = failed
            log.warning(
                "keepstep: Ray gets no checkpoint, as it cannot hold hard links to files of %s:"
                " %s; training goes on, and keepstep keeps each step [ray.checkpoint_not_reported]",
                *(self._home, failed),
            )


def checkpointer(
    components: Mapping[str, Any] | None = None,
    *,
    dir: str | os.PathLike[str],
    run: str | None = None,
    **options: Any,
) -> RayCheckpointer:
    """A `Checkpointer` whose steps survive the workers of Ray Train. Every worker calls it.

    `dir`: a directory on a drive of each node, below which the run is kept. `run`: its name, by
    default that of the experiment (`RunConfig(name=...)`). `options`, and further components: see
    `Checkpointer`. With several nodes, each keeps copies of another one's shards; the environment
    holds further settings (KEEPSTEP_ARCHIVE, KEEPSTEP_PEER_REPLICAS; see `keepstep start --help`).
    In a pod into which keepstep's operator injected a sidecar, that one keeps the run instead.

    Once Ray says that a node is to go (`ray.train.get_preemption_info`), the steps of the node are
    made durable every few seconds, for as long as it trains.

    Raises UsageError, on every rank, for components that cannot be kept, and where no sidecar
    starts on some node, which it names; RuntimeError (Ray's) outside of a worker.
    """
    context = ray.train.get_context()
    name = run or sanitize_run_name(context.get_experiment_name())
    mine = _Place(context.get_node_rank(), ray.util.get_node_ip_address(), secrets.token_hex(32))
    injected = bool(os.environ.get(SOCKET_ENV))
    places = _gathered(mine)
    if not injected:
        os.environ.setdefault("KEEPSTEP_LINGER", _LINGER)
        os.environ.update(_settings(name, mine, places))
    kept, failed = None, ""
    try:
        kept = RayCheckpointer(components, dir=dir, run=None if injected else name, **options)
    except UsageError as error:
        failed = str(error)
    # the others would only see that this one is gone
    reasons = dict.fromkeys(
        f"on node {place.address}: {reason}"
        for place, reason in zip(places, _gathered(failed), strict=True)
        if reason
    )
    if kept is None or reasons:
        raise UsageError("; ".join(reasons))
    archive = Path(os.environ.get("KEEPSTEP_ARCHIVE", "").removeprefix("file://"))
    kept._archived = archive.is_absolute()
    kept._home = (archive if kept._archived else Path(os.path.abspath(dir))) / name
    if kept._socket and context.get_local_rank() == 0:
        watched = (kept._socket, context.get_world_rank())
        threading.Thread(target=_watch_preemption, args=watched, daemon=True).start()
    return kept


def _gathered(mine: T) -> list[T]:
    """What each worker has to say, by rank."""
    if not distributed.is_initialized():
        return [mine]
    found: list[Any] = [None] * distributed.get_world_size()
    distributed.all_gather_object(found, mine)
    return found


def _link(source: Path, place: Path) -> str:
    """Give the files of a step second names in `place`. Returns why that is not possible, or ''.

    A shard with a second name is never written over (ADR 15).
    """
    try:
        place.mkdir(parents=True, exist_ok=True)
        for file in source.iterdir():
            (place / file.name).hardlink_to(file)
    except FileNotFoundError:
        return _GONE
    except OSError as error:
        return error.strerror or type(error).__name__
    return ""


def _watch_preemption(socket: str, rank: int) -> None:
    """Make the newest steps durable, again and again, from when Ray says that this node is to go.

    `ray.train.get_preemption_info` makes all workers wait for each other, so a thread must not call
    it; this is where it looks.
    """
    end = threading.Event()
    try:
        from ray.train.v2._internal.execution.context import get_train_context

        notice = get_train_context().preemption_context
        while not end.wait(_PREEMPTION_POLL_S):
            if notice.preemption_info and rank in notice.preemption_info.preempted_ranks:
                with (
                    contextlib.suppress(SidecarError),
                    contextlib.closing(SidecarClient(socket)) as client,
                ):
                    client.call("/v1/flush", FlushRequest(), Flushed, timeout_s=30.0)
    except (ImportError, AttributeError, RuntimeError):
        log.info(
            "keepstep: this version of Ray does not tell of preemptions: no flush comes before one"
            " [ray.preemption_unknown]"
        )


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
