"""What the CheckpointRun of a pod that is about to be created says: which nodes hold its shards,
and with which policy and sidecar image the run's other pods started.

It is read live, with a short timeout, and remembered for a few seconds, since all pods of a job
come at once. If the API server does not answer, the pod gets no preference and today's policy and
image; it never waits.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import starmap
from typing import Final

from cachetools import TTLCache

from keepstep.spans import is_in_spans
from keepstep.wire.run_reports import NodeHoldings
from keepstep_operator.api.policy import Policy, parse_status_policy
from keepstep_operator.api.run_status import read_status
from keepstep_operator.injection import NearNode
from keepstep_operator.kube.client import KubeClient
from keepstep_operator.kube.errors import KubeError
from keepstep_operator.kube.resources import RUNS
from keepstep_operator.object_body import Body

OWN: Final = 100
COPIES: Final = 50
_TIMEOUT_S: Final = 0.5
_REMEMBERED_S: Final = 5.0
_MOST_RUNS: Final = 1000
_MOST_NODES: Final = 4
_READ: Final = ("holders", "policy", "start")
"""The fields of its status: the others are many, and none of them keeps these from being read."""


@dataclass(frozen=True, kw_only=True)
class ExistingRun:
    """The record of one run. `policy`, `image`, `version`: those of the run's existing pods; None
    and '' if the next pod is the first one, or may not have the same."""

    holders: tuple[NodeHoldings, ...] = ()
    policy: Policy | None = None
    image: str = ""
    version: str = ""

    def list_preferred_nodes(self, node_rank: int) -> tuple[NearNode, ...]:
        """The nodes to prefer for this place: first those with its own shards, then those with
        copies."""
        own = {held.node: OWN for held in self.holders if is_in_spans(held.node_ranks, node_rank)}
        copies = {held.node: COPIES for held in self.holders if is_in_spans(held.copies, node_rank)}
        weights = {**own, **copies, **own}  # own ones first, and with their own weight
        return tuple(starmap(NearNode, weights.items()))[:_MOST_NODES]


class ExistingRunReader:
    """Reads the records through `client`."""

    def __init__(self, client: KubeClient) -> None:
        self._client = client
        self._known: TTLCache[tuple[str, str], ExistingRun] = TTLCache(_MOST_RUNS, _REMEMBERED_S)

    async def get(self, namespace: str, name: str) -> ExistingRun:
        """The record of this run; empty if the API server does not answer. Never raises."""
        key = namespace, name
        if (known := self._known.get(key)) is not None:
            return known
        try:
            body = await self._client.get(RUNS, name, namespace=namespace, timeout_s=_TIMEOUT_S)
        except KubeError:
            body = {}
        found = self._known[key] = read_existing_run(body, namespace)
        return found


def read_existing_run(run: Body, namespace: str) -> ExistingRun:
    """The record in a CheckpointRun; empty if its status cannot be read."""
    written = run.get("status") or {}
    status = read_status({name: written[name] for name in _READ if name in written})
    if status.start is None:
        return ExistingRun(holders=status.holders)
    return ExistingRun(
        holders=status.holders,
        policy=parse_status_policy(status.policy, namespace),
        image=status.start.image,
        version=status.start.version,
    )
