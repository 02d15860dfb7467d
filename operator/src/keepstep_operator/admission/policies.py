"""The policies of the whole cluster, in memory. A watch keeps them; a missing one is asked for
live.

`kubectl apply -f` of one file may create the job before its policy. So a missing policy is waited
for a moment, within the webhook's deadline. For each name this is done only once in a while, so
that a wrong name does not delay every pod of its job.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

from cachetools import TTLCache

from keepstep.errors import UsageError
from keepstep_operator.api.fields import PolicyError
from keepstep_operator.api.job_kinds import is_name
from keepstep_operator.api.policy import Policy, parse_policy
from keepstep_operator.api.run import cut
from keepstep_operator.bodies import Body
from keepstep_operator.kube import (
    POLICIES,
    Client,
    Feed,
    NotFound,
    follow,
)

_LIVE_S: Final = 1.0
_PATIENCE_S: Final = 1.5
_PATIENT_AGAIN_S: Final = 60.0
_MOST_NAMES: Final = 1000

Key = tuple[str, str]


class PolicyAbsent(UsageError):
    """No policy of that name appeared in time. The message names no other: who asked may be a
    stranger to the namespace."""


class PolicyCache:
    """The policies that `run` has seen. `get` also works while `run` does not."""

    def __init__(
        self,
        client: Client,
        *,
        patience_s: float = _PATIENCE_S,
        counted: Callable[[int], None] = lambda count: None,
    ) -> None:
        self._client = client
        self._patience_s = patience_s
        self._counted = counted
        self._known: dict[Key, Policy | PolicyError] = {}
        self._missed: TTLCache[Key, bool] = TTLCache(_MOST_NAMES, _PATIENT_AGAIN_S)
        self._changed = asyncio.Event()
        self._feed = Feed[Key](
            name="policies", resource=POLICIES, key_of=_key, seen=self._seen, gone=self._gone
        )

    @property
    def synced(self) -> bool:
        """Whether all policies were seen once. This stays true when the API server goes away."""
        return self._feed.loaded.is_set()

    async def run(self) -> None:
        """Watch the policies for ever."""
        await follow(self._client, [self._feed])

    def _seen(self, body: Body) -> None:
        self._known[_key(body)] = _parsed(body)
        self._tell()

    def _gone(self, key: Key) -> None:
        self._known.pop(key, None)
        self._tell()

    def _tell(self) -> None:
        self._counted(len(self._known))
        self._changed.set()
        self._changed = asyncio.Event()

    async def get(self, namespace: str, name: str) -> Policy:
        """The policy of this name. Raises PolicyError, PolicyAbsent, or KubeError if the API server
        does not answer."""
        key = (namespace, name)
        found = self._known.get(key) or await self._ask(key)
        if isinstance(found, PolicyError):
            raise found
        return found

    async def _ask(self, key: Key) -> Policy | PolicyError:
        namespace, name = key
        absent = PolicyAbsent(
            f"namespace {namespace} has no CheckpointPolicy {cut(name, longest=253)!r}"
        )
        if not is_name(name):
            raise absent
        try:
            body = await self._client.get(POLICIES, name, namespace=namespace, timeout_s=_LIVE_S)
        except NotFound as error:
            if found := await self._appears(key):
                return found
            raise absent from error
        return _parsed(body)

    async def _appears(self, key: Key) -> Policy | PolicyError | None:
        if key in self._missed:
            return None
        try:
            async with asyncio.timeout(self._patience_s):
                while key not in self._known:
                    await self._changed.wait()
        except TimeoutError:
            self._missed[key] = True
        return self._known.get(key)


def _key(body: Body) -> Key:
    return body["metadata"]["namespace"], body["metadata"]["name"]


def _parsed(body: Body) -> Policy | PolicyError:
    """The policy, or the error to remember in its place."""
    try:
        return parse_policy(body)
    except PolicyError as error:
        return error
