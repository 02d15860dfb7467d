"""The CA bundle with which sidecars check the reports API: one ConfigMap, read now and then.

Each sidecar gets, in its environment, the bundle that is current when its pod is created.
"""

from __future__ import annotations

import asyncio
from typing import Final

from keepstep_operator.journal import say, warn
from keepstep_operator.kube import CONFIG_MAPS, Client, KubeError

_KEY: Final = "ca.crt"
_KNOWN_S: Final = 20.0
_UNKNOWN_S: Final = 1.0


class ReportsAuthority:
    """The bundle. `pem` is '' until the ConfigMap exists, and stays if the ConfigMap is deleted."""

    def __init__(self, client: Client, *, namespace: str, name: str) -> None:
        self._client = client
        self._namespace = namespace
        self._name = name
        self._failure = ""
        self.pem = ""

    async def run(self) -> None:
        """Read it for ever; often while it is not known. A watch would need the right to list."""
        while True:
            await self.look()
            await asyncio.sleep(_KNOWN_S if self.pem else _UNKNOWN_S)

    async def look(self) -> None:
        """Read it once. The same failure is logged only once in a row."""
        try:
            body = await self._client.get(CONFIG_MAPS, self._name, namespace=self._namespace)
            self._learn((body.get("data") or {}).get(_KEY, ""))
            self._failure = ""
        except KubeError as error:
            if str(error) != self._failure:
                warn("reports CA not known", configmap=self._name, reason=str(error))
            self._failure = str(error)

    def _learn(self, pem: str) -> None:
        if pem and pem != self.pem:
            say("reports CA known", configmap=self._name, certificates=pem.count("BEGIN CERT"))
            self.pem = pem
