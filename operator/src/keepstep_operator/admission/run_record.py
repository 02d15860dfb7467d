"""What a pod's run was recorded to be, for a pod that is about to be created: which nodes hold its
shards, and with which policy and sidecar image its other pods began.

Asked live, for a moment only, and remembered for a few seconds: the pods of a job come all at once.
No answer means no preference and today's policy and image, never a pod that waits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import msgspec
from cachetools import TTLCache

from keepstep_operator.api.fields import PolicyError
from keepstep_operator.api.policy import Policy, parse_policy
from keepstep_operator.bodies import Body
from keepstep_operator.injection import CONTRACT, Near
from keepstep_operator.kube import RUNS, Client, KubeError
from keepstep_operator.spans import within

OWN: Final = 100
COPIES: Final = 50
_TIMEOUT_S: Final = 0.5
_REMEMBERED_S: Final = 5.0
_MOST_RUNS: Final = 1000
_MOST_NODES: Final = 4


class Holder(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """One entry of CheckpointRun.status.holders: what lies on a node. Sets of node ranks."""

    node: str
    node_ranks: str = ""
    copies: str = ""


class _Policy(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    generation: int = 0
    spec: dict[str, Any] = {}


class _Start(msgspec.Struct, frozen=True, kw_only=True):
    image: str = ""
    version: str = ""
    contract: int = 0


class _Status(msgspec.Struct, frozen=True, kw_only=True):
    holders: tuple[Holder, ...] = ()
    policy: _Policy | None = None
    start: _Start | None = None


@dataclass(frozen=True, kw_only=True)
class RunRecord:
    """`policy`, `image`, `version`: of the run's pods that are there; None and '' where the next
    pod is the first one, or may not have theirs."""

    holders: tuple[Holder, ...] = ()
    policy: Policy | None = None
    image: str = ""
    version: str = ""

    def near(self, node_rank: int) -> tuple[Near, ...]:
        """First the node with this place's own shards, then those that keep copies of them."""
        own = [Near(one.node, OWN) for one in self.holders if within(one.node_ranks, node_rank)]
        kept = [Near(one.node, COPIES) for one in self.holders if within(one.copies, node_rank)]
        there = {one.node for one in own}
        return (*own, *(one for one in kept if one.node not in there))[:_MOST_NODES]


class RunRecords:
    """Asks the API server through `client`."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._known: TTLCache[tuple[str, str], RunRecord] = TTLCache(_MOST_RUNS, _REMEMBERED_S)

    async def get(self, namespace: str, name: str) -> RunRecord:
        """Never raises."""
        key = namespace, name
        if (known := self._known.get(key)) is not None:
            return known
        try:
            body = await self._client.get(RUNS, name, namespace=namespace, timeout_s=_TIMEOUT_S)
        except KubeError:
            body = {}
        found = self._known[key] = read(body, namespace)
        return found


def read(run: Body, namespace: str) -> RunRecord:
    """As the CheckpointRun has it; nothing where it cannot be read."""
    try:
        status = msgspec.convert(run.get("status") or {}, _Status)
    except msgspec.ValidationError:
        return RunRecord()
    if status.start is None:
        return RunRecord(holders=status.holders)
    # an image that older admission chose may not know the arguments that this one gives
    known = status.start.contract == CONTRACT
    return RunRecord(
        holders=status.holders,
        policy=_parsed(status.policy, namespace),
        image=status.start.image if known else "",
        version=status.start.version if known else "",
    )


def _parsed(written: _Policy | None, namespace: str) -> Policy | None:
    if written is None:
        return None
    metadata = {"namespace": namespace, "name": written.name, "generation": written.generation}
    try:
        return parse_policy({"metadata": metadata, "spec": written.spec})
    except PolicyError:  # written by a release that took what this one does not
        return None
