"""Finds replicas that differ: tensors that several ranks should hold alike, as under DDP.

A rank stages only its part of a replicated tensor. So a restore of replicas that have diverged
(`no_sync()`, local SGD, a processor that computes wrongly) would mix them. At the first saves of a
life and then at one in `_EVERY`, each rank samples the whole of these tensors and digests the
samples. The lowest rank of each group compares the digests.

They go through torch.distributed's store: it spans nodes, every run with several ranks has one, and
no sidecar has to know the others. A thread of its own does this, because a call may wait for the
store's server. It makes only short calls, on a connection of its own: another thread may hold the
first one for as long as its `wait` lasts. Keys are deleted.

In a run of several nodes this also finds a rank that does not save the steps that the others save:
its digest never comes. (On one node its sidecar finds that sooner:
`core.schedule.RankStepComparison`.)

Nothing here may fail a save or hold up the training thread. Where there is no store, or it is gone,
nothing is compared.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import json
import logging
import queue
import threading
import time
import zlib
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from keepstep import processes
from keepstep.errors import few
from keepstep.save.mutation_guard import Fingerprint, can_detect_changes
from keepstep.state import accelerator
from keepstep.state.taken_state import TakenState, TensorLeaf
from keepstep.steps import EpochId

log = logging.getLogger("keepstep")

_FIRST = (0, 1, 2, 4, 7)
"""The first saves at which to compare, counted in a life."""

_EVERY = 31
"""No multiple of the periods at which replicas are averaged, after which they are equal."""

_WITHIN_S = 60.0
_SLACK_S = 5.0
_SHORTEST_S, _LONGEST_S = 0.005, 0.5
_WAITING = 4
_VERDICTS_KEPT = 4
_RANKS_NAMED = 8

Group = tuple[int, ...]
"""The ranks that hold the same box of a tensor."""


def differing_ranks(digests: Mapping[int, bytes]) -> tuple[int, ...]:
    """The ranks whose digest is not that of most ranks; all ranks, if there is no majority."""
    (digest, count), *_ = Counter(digests.values()).most_common(1)
    if 2 * count <= len(digests):
        return tuple(sorted(digests))
    return tuple(sorted(rank for rank, chunk in digests.items() if chunk != digest))


def describe_differing_ranks(ranks: Sequence[int], *, group: Group, step: int) -> str:
    """What to tell the user about replicas that differ."""
    named = few(list(map(str, ranks)), _RANKS_NAMED)
    whose = f"ranks {named} hold" if len(ranks) > 1 else f"rank {named} holds"
    return (
        f"{whose} other values than the ranks with the same replica (first seen at step {step}, of"
        f" {len(group)} ranks): each rank keeps only its part of a replica, so a restore mixes"
        " these values. Average them before save() (after no_sync(), local SGD), or do not wrap"
        " the model in DistributedDataParallel; if it is not meant, suspect that rank's processor"
    )


def describe_absent(ranks: Sequence[int], *, saving: int, step: int) -> str:
    """What to tell the user about ranks that do not save what the others save."""
    named = few(list(map(str, ranks)), _RANKS_NAMED)
    whose = f"ranks {named} have" if len(ranks) > 1 else f"rank {named} has"
    return (
        f"{whose} not saved step {step}, which rank {saving} saved a minute ago, nor an earlier"
        " step that was compared. A step is committed only if every rank saves it: call save(step)"
        " on every rank, with the same steps"
    )


@dataclass(frozen=True)
class _Sample:
    """The samples of one step: by group, memory of the host that is filled once `flags` is."""

    step: int
    groups: Mapping[Group, list[Tensor]]
    flags: tuple[Tensor, ...]


class ReplicaCheck:
    """The comparisons of one rank. `difference`: what was found, '' if nothing was."""

    def __init__(
        self, *, rank: int, epoch: EpochId, warn: Callable[[str], None], world: int = 0
    ) -> None:
        """`warn`: tells this rank's user; called from another thread, once for each kind of
        finding. `world`: the number of ranks, if they are on several nodes; else 0."""
        self.difference = ""
        self._everybody: Group = tuple(range(world))
        self._absent: frozenset[int] = frozenset()
        self._missed = False
        self._rank, self._prefix, self._warn = rank, f"keepstep/{epoch}", warn
        self._saves = 0
        self._samples = queue.SimpleQueue[_Sample | None]()
        self._verdicts: deque[str] = deque()
        self._thread: threading.Thread | None = None
        self._closed = False

    # --- called by the training thread -------------------------------------------------------

    def sample_replicas(self, taken: TakenState, step: int) -> None:
        """Sample the replicas, if this save is one at which they are compared. Raises nothing."""
        number, self._saves = self._saves, self._saves + 1
        if self._closed or (number not in _FIRST and number % _EVERY):
            return
        with contextlib.suppress(Exception):
            if (
                self._samples.qsize() < _WAITING
                and not accelerator.current_accelerator().is_capturing()
            ):
                self._begin(taken, step)

    def _begin(self, taken: TakenState, step: int) -> None:
        if "replicas" not in taken.cache:
            taken.cache["replicas"] = _fingerprints(taken.tensors)
        prints: dict[Group, Fingerprint] = taken.cache["replicas"]
        if not prints and not self._everybody:
            return
        flags: dict[torch.device, Tensor] = {}
        groups = {
            group: [_to_host(samples, flags) for samples in fingerprint.sample_tensors()]
            for group, fingerprint in prints.items()
        }
        for device in flags:
            ones = accelerator.current_accelerator().zeros(1, device) + 1
            flags[device] = accelerator.current_accelerator().enqueue_host_flag(ones)
        if self._everybody:
            groups.setdefault(self._everybody, [])
        self._samples.put(_Sample(step, groups, tuple(flags.values())))
        if self._thread is None:
            self._thread = threading.Thread(
                target=self._work, name="keepstep-replicas", daemon=True
            )
            self._thread.start()

    def close(self, *, timeout_s: float = 2.0) -> None:
        """End the thread, which otherwise might be inside the store when the interpreter ends."""
        self._closed = True
        self._samples.put(None)
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(timeout_s)

    # --- the thread --------------------------------------------------------------------------

    def _work(self) -> None:
        try:
            with processes.no_fork():
                store = _store()
            while not self._closed and (sample := self._samples.get()) is not None:
                for group, samples in sorted(sample.groups.items()):
                    await_flag = accelerator.current_accelerator().await_flag
                    if all(await_flag(tensor, lambda: self._closed) for tensor in sample.flags):
                        with processes.no_fork():
                            digest = _digest(samples)
                        self._compare(store, group, sample.step, digest)
        except Exception as error:  # the store's server ends with rank 0
            log.debug("keepstep: replicas are not compared any more: %s", error)

    def _compare(self, store: Any, group: Group, step: int, digest: bytes) -> None:
        place = f"{self._prefix}/{step}/{group[0]}.{len(group)}.{zlib.crc32(repr(group).encode())}"
        verdict = f"{place}/differ"
        store.set(f"{place}/{self._rank}", digest)
        if self._rank == group[0]:
            keys = [f"{place}/{rank}" for rank in group]
            complete = self._await(store, keys, _WITHIN_S)
            there = keys if complete else [key for key in keys if store.check([key])]
            found = {int(key.rpartition("/")[2]): store.get(key) for key in there}
            absent = self._absent_again(group, found)
            store.set(verdict, json.dumps([differing_ranks(found), absent]))
            self._verdicts.append(verdict)
            old = [self._verdicts.popleft()] if len(self._verdicts) > _VERDICTS_KEPT else []
            for key in (*there, *old):
                store.delete_key(key)
        if self._await(store, [verdict], _WITHIN_S + _SLACK_S):
            differ, absent = json.loads(store.get(verdict))
            if differ:
                self._report(describe_differing_ranks(differ, group=group, step=step))
            if absent and not self._missed:
                self._missed = True
                self._warn(describe_absent(absent, saving=group[0], step=step))

    def _absent_again(self, group: Group, found: Mapping[int, bytes]) -> list[int]:
        """The ranks of the run that have sent nothing for two comparisons in a row."""
        if group != self._everybody or self._closed:
            return []
        absent = frozenset(group) - found.keys()
        again, self._absent = absent & self._absent, absent
        return sorted(again)

    def _await(self, store: Any, keys: list[str], timeout_s: float) -> bool:
        """Whether all keys are there in time."""
        deadline, pause_s = time.monotonic() + timeout_s, _SHORTEST_S
        while not store.check(keys):
            if self._closed or time.monotonic() > deadline:
                return False
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_S)
        return True

    def _report(self, text: str) -> None:
        if not self.difference:
            self.difference = text
            self._warn(text)


def _store() -> Any:
    """The store of the default process group, on a connection of its own where torch can make
    one."""
    store = torch.distributed.distributed_c10d._get_default_store()
    return store.clone() if hasattr(store, "clone") else store


def _digest(samples: Sequence[Tensor]) -> bytes:
    digest = hashlib.blake2b(digest_size=16)
    for sample in samples:
        digest.update(ctypes.string_at(sample.data_ptr(), sample.numel() * sample.element_size()))
    return digest.digest().hex().encode()


def _fingerprints(leaves: Sequence[TensorLeaf]) -> dict[Group, Fingerprint]:
    """By group, what to sample: the whole replicas, as a rank's own part says nothing about the
    others. In the order of the names, because ranks may number their parameters differently."""
    found: dict[Group, list[Tensor]] = {}
    for leaf in sorted(leaves, key=lambda leaf: leaf.name):
        sharing = leaf.sharing
        if sharing is not None and len(sharing.replicas) > 1 and can_detect_changes(leaf.whole):
            found.setdefault(tuple(sharing.replicas), []).append(leaf.whole)
    return {group: Fingerprint(many) for group, many in found.items()}


def _to_host(samples: Tensor, flags: dict[torch.device, Tensor]) -> Tensor:
    """A copy of the samples in memory of the host. That of a device's is not waited for: then the
    device is noted in `flags`."""
    device = accelerator.current_accelerator().device_of(samples)
    if device is None:
        return samples
    flags[device] = samples
    host = accelerator.current_accelerator().pinned_zeros_like(samples)
    return host.copy_(samples, non_blocking=True)
