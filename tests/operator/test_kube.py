"""The client of the Kubernetes API: access, pages, watches, and what errors become."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from keepstep_operator.kube import (
    CONFIG_MAPS,
    NODES,
    PODS,
    POLICIES,
    Client,
    Conflict,
    Denied,
    Feed,
    KubeError,
    NotFound,
    Rejected,
    Unavailable,
    error_of,
    follow,
)
from tests.harness import until
from tests.operator.apiserver import ApiServer
from tests.operator.injection.pods import NAMESPACE, policy_body


@pytest.mark.parametrize(
    ("status", "kind"),
    [(400, Rejected), (401, Denied), (403, Denied), (404, NotFound), (409, Conflict),
     (410, Unavailable), (422, Rejected), (429, Unavailable), (500, Unavailable),
     (504, Unavailable)],
)  # fmt: skip
def test_each_status_becomes_what_can_be_done_about_it(status: int, kind: type[KubeError]) -> None:
    assert type(error_of(status, "")) is kind


async def test_objects_are_made_read_replaced_and_never_over_a_later_version() -> None:
    async with ApiServer().running() as server, Client(server.access) as client:
        body = {"metadata": {"name": "a"}, "data": {"x": "1"}}
        made = await client.create(CONFIG_MAPS, body, namespace="n")
        with pytest.raises(Conflict):
            await client.create(CONFIG_MAPS, body, namespace="n")
        await client.replace(CONFIG_MAPS, {**made, "data": {"x": "2"}}, namespace="n")
        with pytest.raises(Conflict) as caught:
            await client.replace(CONFIG_MAPS, {**made, "data": {"x": "3"}}, namespace="n")
        assert (caught.value.status, caught.value.reason) == (409, "Conflict")
        assert (await client.get(CONFIG_MAPS, "a", namespace="n"))["data"] == {"x": "2"}
        with pytest.raises(NotFound):
            await client.get(CONFIG_MAPS, "b", namespace="n")


async def test_a_server_that_is_not_there_or_too_slow_is_unavailable() -> None:
    async with ApiServer().running() as server, Client(server.access) as client:
        server.delay_s = 5
        with pytest.raises(Unavailable, match="did not answer in time"):
            await client.get(PODS, "p", namespace="n", timeout_s=0.05)
    async with Client(server.access) as client:
        with pytest.raises(Unavailable, match="cannot be reached"):
            await client.get(PODS, "p", namespace="n")


class _Followed:
    """Policies, and what a feed said of them, in order."""

    def __init__(self) -> None:
        self.seen: list[str] = []
        self.feed = Feed[str](
            name="policies",
            resource=POLICIES,
            key_of=lambda body: str(body["metadata"]["name"]),
            seen=lambda body: self.seen.append(body["metadata"]["name"]),
            gone=lambda name: self.seen.append(f"-{name}"),
        )


@asynccontextmanager
async def _followed(*names: str) -> AsyncIterator[tuple[ApiServer, _Followed]]:
    followed = _Followed()
    async with ApiServer().running() as server, Client(server.access) as client:
        for name in names:
            server.put(POLICIES, policy_body(name=name))
        task = asyncio.create_task(follow(client, [followed.feed]))
        try:
            await until(followed.feed.loaded.is_set)
            yield server, followed
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


async def test_a_feed_is_loaded_with_all_there_is_and_goes_on_through_errors() -> None:
    async with _followed("a", "b") as (server, followed):
        assert sorted(followed.seen) == ["a", "b"]
        server.put(POLICIES, {**policy_body(name="c"), "padding": "x" * 300_000})
        await until(lambda: followed.seen[-1] == "c")
        server.down = True
        server.expire_watches()
        asked = len(server.requests)
        await until(lambda: len(server.requests) > asked + 1)
        server.down = False
        await until(lambda: server.watches())
        server.put(POLICIES, policy_body(name="d"))
        await until(lambda: "d" in followed.seen)


async def test_what_goes_while_all_is_listed_anew_is_gone() -> None:
    async with _followed("a", "b") as (server, followed):
        with server.unseen():
            server.delete(POLICIES, "a", namespace=NAMESPACE)
        server.expire_watches()
        await until(lambda: "-a" in followed.seen)
        assert followed.feed.known == {"b"}


async def test_a_watch_that_ends_by_an_error_is_begun_anew() -> None:
    async with _followed("a") as (server, followed):
        server.fail_watches()
        server.put(POLICIES, policy_body(name="b"))
        await until(lambda: "b" in followed.seen)


async def test_a_kind_that_may_not_be_read_hinders_no_other() -> None:
    policies = _Followed()
    nodes = Feed[str](
        name="nodes", resource=NODES, key_of=str, seen=lambda body: None, gone=lambda name: None
    )
    async with ApiServer().running() as server, Client(server.access) as client:
        server.forbidden = "/nodes"
        server.put(POLICIES, policy_body(name="a"))
        task = asyncio.create_task(follow(client, [nodes, policies.feed]))
        await until(policies.feed.loaded.is_set)
        server.put(POLICIES, policy_body(name="b"))
        await until(lambda: "b" in policies.seen)
        assert not nodes.loaded.is_set()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
