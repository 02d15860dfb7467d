"""Which nodes hold shards for a pod that is about to be created, as its run's record says.

Asked live, for a moment only, and remembered for a few seconds: the pods of a job come all at once.
No answer means no preference, never a pod that waits.
"""

from __future__ import annotations

import asyncio
from typing import Any, Final

import msgspec

from keepstep_operator.api.pod import Placement
from keepstep_operator.api.policy import Policy
from keepstep_operator.bodies import Body
from keepstep_operator.injection import Near
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


class Holders:
    """Asks the API server through `client`."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._known: dict[tuple[str, str], tuple[float, tuple[Holder, ...]]] = {}

    async def near(self, policy: Policy, place: Placement) -> tuple[Near, ...]:
        """Nodes that this place of the run should rather be on, best first. Never raises."""
        if not policy.host_paths and policy.peers is None:
            return ()
        return near(await self._ask((policy.namespace, place.run_key)), place.node_rank)

    async def _ask(self, key: tuple[str, str]) -> tuple[Holder, ...]:
        now = asyncio.get_running_loop().time()
        at, known = self._known.get(key, (now - _REMEMBERED_S, ()))
        if now - at < _REMEMBERED_S:
            return known
        namespace, name = key
        try:
            body = await self._client.get(RUNS, name, namespace=namespace, timeout_s=_TIMEOUT_S)
        except KubeError:
            body = {}
        if len(self._known) >= _MOST_RUNS:
            self._known.clear()
        found = read(body)
        self._known[key] = now, found
        return found


def read(run: Body) -> tuple[Holder, ...]:
    """Holders as the CheckpointRun has them; none where it cannot be read."""
    listed: Any = (run.get("status") or {}).get("holders") or []
    try:
        return msgspec.convert(listed, tuple[Holder, ...])
    except msgspec.ValidationError:
        return ()


def near(holders: tuple[Holder, ...], node_rank: int) -> tuple[Near, ...]:
    """First the node with this place's own shards, then those that keep copies of them."""
    own = [Near(one.node, OWN) for one in holders if within(one.node_ranks, node_rank)]
    kept = [Near(one.node, COPIES) for one in holders if within(one.copies, node_rank)]
    there = {one.node for one in own}
    return (*own, *(one for one in kept if one.node not in there))[:_MOST_NODES]
