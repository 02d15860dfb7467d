"""The page of a cluster before the stand-in of an API server, and what its viewers may do."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest

from keepstep_operator import names
from keepstep_operator.kube import CHECKPOINTS, RUNS, Client
from keepstep_operator.ui.server import page
from keepstep_operator.ui.viewers import Viewers
from keepstep_page.server import on_loopback
from tests.operator.apiserver import TOKEN, ApiServer, Body

STEP = "0002.bbbbbbbb-000000040"
ANNA = {
    "username": "anna",
    "uid": "77",
    "groups": ["ml", "system:authenticated"],
    "extra": {"scopes.example.com/of": ["all"]},
}
POD = "/api/v1/namespaces/keepstep-system/pods/keepstep-ui-0"


def run(name: str, namespace: str = "n", **status: Any) -> Body:
    known = {
        "phase": "Running",
        "jobName": f"job-{name}",
        "step": 41,
        "committed": {"step": 40, "id": STEP, "time": "2026-01-01T00:00:00Z"},
        "watermarks": {"memory": STEP, "local": STEP},
        "protected": "True",
    }
    return {"metadata": {"name": name, "namespace": namespace}, "status": {**known, **status}}


class Site:
    """The page, `server` before it; `clock`: of what it remembers, moved by tests."""

    def __init__(self, server: ApiServer, client: aiohttp.ClientSession) -> None:
        self.server, self.client = server, client
        self.base, self.clock = "", 0.0

    def headers(self, token: str = TOKEN, namespace: str = "n") -> dict[str, str]:
        return {"Authorization": f"Bearer {token}", names.UI_NAMESPACE_HEADER: namespace}

    async def get(
        self, route: str = "/", *, status: int = 200, token: str = TOKEN, namespace: str = "n"
    ) -> str:
        headers = self.headers(token, namespace)
        async with self.client.get(self.base + route, headers=headers) as answer:
            assert answer.status == status, await answer.text()
            return await answer.text()

    def listed(self) -> list[str]:
        """Paths that the page has asked for."""
        return [one.path for one in self.server.requests if one.method == "GET"]


@pytest.fixture
async def site() -> AsyncIterator[Site]:
    """Runs in two namespaces, and a viewer, anna, who may read one of them."""
    async with ApiServer().running() as server, aiohttp.ClientSession() as session:
        server.put(RUNS, run("gpt"))
        server.put(RUNS, run("secret", "other"))
        server.tokens[TOKEN] = {"authenticated": True, "user": ANNA}
        server.rights |= {("anna", one.plural, "n") for one in (RUNS, CHECKPOINTS)}
        made = Site(server, session)
        async with Client(server.access) as client:
            served = page(client, Viewers(client, clock=lambda: made.clock))
            async with on_loopback(served, 0) as port:
                made.base = f"http://127.0.0.1:{port}"
                server.forwards[POD] = port
                yield made
