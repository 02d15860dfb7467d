"""The policy that a pod asks for, read when it is needed and remembered for a second.

`kubectl apply -f` of one file may create the job before its policy. So a missing policy is waited
for a moment, within the webhook's deadline. For each name this is done only once in a while, so
that a wrong name does not delay every pod of its job.
"""

from __future__ import annotations

import asyncio
import time
from typing import Final

from cachetools import TTLCache

from keepstep.errors import UsageError
from keepstep_operator.api.fields import PolicyError
from keepstep_operator.api.job_kinds import is_object_name
from keepstep_operator.api.policy import Policy, parse_policy
from keepstep_operator.api.run_status import cut_text
from keepstep_operator.kube.client import KubeClient
from keepstep_operator.kube.errors import NotFound
from keepstep_operator.kube.resources import POLICIES

_REMEMBERED_S: Final = 1.0
_PATIENCE_S: Final = 1.5
_AGAIN_S: Final = 0.25
_PATIENT_AGAIN_S: Final = 60.0
_MOST_NAMES: Final = 1000

_Key = tuple[str, str]


class PolicyAbsent(UsageError):
    """No policy of that name appeared in time. The message names no other: who asked may be a
    stranger to the namespace."""


class Policies:
    """Reads policies through `client`. `patience_s`: how long a missing one is waited for."""

    def __init__(self, client: KubeClient, *, patience_s: float = _PATIENCE_S) -> None:
        self._client = client
        self._patience_s = patience_s
        self._known: TTLCache[_Key, Policy | PolicyError] = TTLCache(_MOST_NAMES, _REMEMBERED_S)
        self._missed: TTLCache[_Key, bool] = TTLCache(_MOST_NAMES, _PATIENT_AGAIN_S)

    async def get(self, namespace: str, name: str) -> Policy:
        """The policy of this name. Raises PolicyError, PolicyAbsent, or KubeError if the API server
        does not answer."""
        key = (namespace, name)
        found = self._known.get(key) or await self._asked(key)
        if found is None:
            message = (
                f"namespace {namespace} has no CheckpointPolicy {cut_text(name, longest=253)!r}"
            )
            raise PolicyAbsent(message)
        if isinstance(found, PolicyError):
            raise found
        return found

    async def _asked(self, key: _Key) -> Policy | PolicyError | None:
        """What the API server has; None if it does not appear in time."""
        if not is_object_name(key[1]):
            return None
        until = time.monotonic() + (0.0 if key in self._missed else self._patience_s)
        while (found := await self._read(key)) is None:
            if time.monotonic() >= until:
                self._missed[key] = True
                return None
            await asyncio.sleep(_AGAIN_S)
        self._known[key] = found
        return found

    async def _read(self, key: _Key) -> Policy | PolicyError | None:
        namespace, name = key
        try:
            return parse_policy(await self._client.get(POLICIES, name, namespace=namespace))
        except NotFound:
            return None
        except PolicyError as error:  # remembered like a policy
            return error
