"""The client of the Kubernetes API: access, and what errors become."""

from __future__ import annotations

import pytest

from keepstep_operator.kube.client import KubeClient
from keepstep_operator.kube.errors import (
    Conflict,
    Denied,
    KubeError,
    NotFound,
    Rejected,
    Unavailable,
    error_of,
)
from keepstep_operator.kube.resources import PODS, SECRETS
from tests.operator.apiserver import ApiServer


@pytest.mark.parametrize(
    ("status", "kind"),
    [(400, Rejected), (401, Denied), (403, Denied), (404, NotFound), (409, Conflict),
     (410, Unavailable), (422, Rejected), (429, Unavailable), (500, Unavailable),
     (504, Unavailable)],
)  # fmt: skip
def test_each_http_status_maps_to_its_exception_class(status: int, kind: type[KubeError]) -> None:
    assert type(error_of(status, "")) is kind


async def test_objects_are_created_read_and_replaced_but_never_over_a_newer_version() -> None:
    async with ApiServer().running() as server, KubeClient(server.access) as client:
        body = {"metadata": {"name": "a"}, "data": {"x": "1"}}
        made = await client.create(SECRETS, body, namespace="n")
        with pytest.raises(Conflict):
            await client.create(SECRETS, body, namespace="n")
        await client.replace(SECRETS, {**made, "data": {"x": "2"}}, namespace="n")
        with pytest.raises(Conflict) as caught:
            await client.replace(SECRETS, {**made, "data": {"x": "3"}}, namespace="n")
        assert (caught.value.status, caught.value.reason) == (409, "Conflict")
        assert (await client.get(SECRETS, "a", namespace="n"))["data"] == {"x": "2"}
        with pytest.raises(NotFound):
            await client.get(SECRETS, "b", namespace="n")


async def test_an_unreachable_or_slow_api_server_raises_unavailable() -> None:
    async with ApiServer().running() as server, KubeClient(server.access) as client:
        server.delay_s = 5
        with pytest.raises(Unavailable, match="did not answer in time"):
            await client.get(PODS, "p", namespace="n", timeout_s=0.05)
    async with KubeClient(server.access) as client:
        with pytest.raises(Unavailable, match="cannot be reached"):
            await client.get(PODS, "p", namespace="n")
