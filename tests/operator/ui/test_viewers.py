"""Who sees what on the page of a cluster: those who may list it themselves, and nobody else."""

from __future__ import annotations

import asyncio
import json

import aiohttp
import pytest

from keepstep_operator import names
from keepstep_operator.kube import CHECKPOINTS, RUNS
from keepstep_operator.ui.viewers import KNOWN_S
from tests.operator.apiserver import Body
from tests.operator.ui.conftest import ANNA, STEP, Site, run

ROUTES = ("/", "/runs/gpt", "/changes", "/runs/gpt/changes", "/nothing")


async def test_a_viewer_sees_the_runs_of_a_namespace_and_of_no_other(site: Site) -> None:
    text = await site.get()
    assert "gpt" in text
    assert "namespace n" in text
    assert "secret" not in text
    text = await site.get("/runs/gpt")
    assert "It trains." in text
    assert STEP in text
    assert "No such run" in await site.get("/runs/secret", status=404)
    assert not any("other" in path for path in site.listed())


async def test_without_a_token_that_the_api_server_takes_nothing_is_told(site: Site) -> None:
    site.server.tokens["elsewhere"] = {"authenticated": True, "audiences": ["vault"], "user": ANNA}
    for token in ("", "over", "elsewhere", "x" * 20_000):
        for route in ROUTES:
            text = await site.get(route, status=401, token=token)
            assert "gpt" not in text
            assert "token" in text
    async with site.client.get(site.base) as answer:
        assert answer.status == 400  # not even a namespace
    assert site.listed() == []


async def test_what_a_viewer_may_not_list_is_named_with_whom_to_ask_for_what(site: Site) -> None:
    for route in ROUTES:
        text = await site.get(route, status=403, namespace="other")
        assert "anna may not list checkpointruns and checkpoints in namespace other" in text
        assert (
            "kubectl create rolebinding keepstep-view -n other --clusterrole=view --user=anna"
            in text
        )
    assert site.listed() == []
    site.server.rights.add(("anna", "checkpointruns", "other"))
    text = await site.get(status=403, namespace="other")
    assert "may not list checkpoints in namespace other" in text
    site.server.rights.add(("anna", "checkpoints", "other"))
    assert "secret" in await site.get(namespace="other")  # at once


async def test_a_user_is_reviewed_with_all_that_the_token_says_of_them(site: Site) -> None:
    await site.get()
    asked = site.server.asked("POST", "subjectaccessreviews")
    assert {one.body["spec"]["resourceAttributes"]["resource"] for one in asked} == {
        "checkpointruns",
        "checkpoints",
    }
    for one in asked:
        spec = one.body["spec"]
        assert [spec[name] for name in ("user", "uid", "groups", "extra")] == [*ANNA.values()]
        assert spec["resourceAttributes"]["namespace"] == "n"


async def test_a_name_that_a_shell_would_take_apart_is_quoted(site: Site) -> None:
    user = {"username": "anna; rm -rf ~ <b>"}
    site.server.tokens["annas"] = {"authenticated": True, "user": user}
    text = await site.get(status=403, token="annas")
    assert "&#39;--user=anna; rm -rf ~ &lt;b&gt;&#39;" in text
    account = {"username": "system:serviceaccount:ml:viewer"}
    site.server.tokens["accounts"] = {"authenticated": True, "user": account}
    text = await site.get(status=403, token="accounts")
    assert "--serviceaccount=ml:viewer" in text


@pytest.mark.parametrize(
    "namespace", ["", "../kube-system", "n/../other", "N", "n%2f", "n.", "-n", "a" * 64, "n?x=1"]
)
async def test_what_is_no_namespace_asks_the_api_server_nothing(site: Site, namespace: str) -> None:
    assert "is no namespace" in await site.get(status=400, namespace=namespace)
    assert site.server.requests == []


@pytest.mark.parametrize("name", ["..%2f..%2fother%2fcheckpointruns%2fsecret", "%3Cb%3E", "%2e%2e"])
async def test_a_runs_name_leads_nowhere(site: Site, name: str) -> None:
    url = f"{site.base}/runs/{name}"
    async with site.client.get(_as_it_is(url), headers=site.headers()) as answer:
        text = await answer.text()
        assert answer.status == 404
    assert "<b>" not in text
    ours = f"/apis/{names.API_VERSION}/namespaces/n/"
    assert set(site.listed()) <= {f"{ours}checkpointruns", f"{ours}checkpoints"}


async def test_a_token_for_the_page_alone_is_taken(site: Site) -> None:
    status = {"authenticated": True, "audiences": [names.UI_AUDIENCE], "user": ANNA}
    site.server.tokens["account's"] = status
    assert "gpt" in await site.get(token="account's")
    # by an authenticator that knows no audiences, and was asked without one before
    site.server.tokens["unbound"] = {**status, "audiences": []}
    assert "gpt" in await site.get(token="unbound")


async def test_who_keeps_a_page_open_sees_no_more_when_the_right_is_gone(site: Site) -> None:
    headers = site.headers()
    async with site.client.get(f"{site.base}/changes", headers=headers) as stream:
        assert b"gpt" in await stream.content.readline()
        site.server.rights.clear()
        site.server.put(RUNS, run("before", "n"))
        await _until(stream.content, b"before")  # remembered for a while
        site.clock += KNOWN_S + 1
        site.server.put(RUNS, run("after", "n"))
        rest = await asyncio.wait_for(stream.content.read(), 30)
        assert b"after" not in rest
    await site.get(status=403)


async def test_a_token_that_is_over_is_noticed(site: Site) -> None:
    await site.get()
    site.server.tokens.clear()
    await site.get()
    site.clock += KNOWN_S + 1
    assert "Sign in" in await site.get(status=401)


async def test_while_the_api_server_is_away_the_page_says_so(site: Site) -> None:
    site.server.down = True
    assert "did not answer the page" in await site.get(status=503)
    site.server.down = False
    await site.get()
    site.server.forbidden = "checkpointruns"  # the page's own role
    assert "no role says so" in await site.get(status=503)


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS", "HEAD", "PATCH"])
async def test_only_get_is_answered(site: Site, method: str) -> None:
    for route in (*ROUTES, "/static/page.js"):
        async with site.client.request(method, site.base + route, headers=site.headers()) as one:
            assert one.status == 405
    assert site.server.requests == []


async def test_what_a_run_says_is_text(site: Site) -> None:
    evil = "<script>alert(1)</script>\u202e"
    recent = {"time": "yesterday", "type": evil, "message": evil, "tier": evil}
    condition = {"type": evil, "status": evil, "reason": evil, "message": evil}
    more = {"jobName": evil, "warnings": [evil], "recent": [recent], "conditions": [condition]}
    place = {"nodeRank": 0, "node": evil, "pod": evil, "ranks": evil}
    site.server.put(RUNS, run("gpt", **more, ranks=[place], epoch=evil, origin=evil))
    for route in ("/", "/runs/gpt"):
        text = await site.get(route)
        assert "&lt;script&gt;" in text
        assert "<script>alert" not in text
        assert "\u202e" not in text


async def test_goodput_is_shown_with_where_the_rest_went(site: Site) -> None:
    told = {
        "since": "2026-01-01T00:00:00Z",
        "until": "2026-01-01T01:00:00Z",
        "ratio": "0.925",
        "wallSeconds": 3600,
        "productiveSeconds": 3330,
        "badputSeconds": {"programStartup": 70, "infrastructureRecovery": 200},
    }
    site.server.put(RUNS, run("gpt", goodput=told))
    site.server.put(RUNS, run("odd", goodput=told | {"ratio": "none"}))
    text = await site.get("/runs/gpt")
    assert "92.5 % of 3600 s: 200 s infrastructure recovery, 70 s program startup" in text
    assert "0.0 % of 3600 s" in await site.get("/runs/odd")


async def test_steps_are_drawn_over_time(site: Site) -> None:
    begun = 1767225600.0  # 2026-01-01
    site.server.put(CHECKPOINTS, _checkpoint("gpt-a", 20, ["local", "archive"], minute=2))
    site.server.put(CHECKPOINTS, _checkpoint("gpt-b", 10, ["archive"], minute=1))
    recent = [
        {"time": "2026-01-01T00:03:00Z", "type": "Restored", "step": 20, "seconds": 0.4},
        {"time": "2026-01-01T00:04:00Z", "type": "CommitStalled", "step": 39},
    ]
    site.server.put(RUNS, run("gpt", recent=recent))
    async with site.client.get(f"{site.base}/runs/gpt/changes", headers=site.headers()) as stream:
        assert (await _steps_drawn(stream.content)) == {
            "committed": [[begun], [40]],
            "local": [[begun + 120], [20]],
            "peer": [[], []],
            "archive": [[begun + 60, begun + 120], [10, 20]],
            "restored": [[begun + 180], [20]],
        }
        committed = {"step": 41, "id": STEP, "time": "2026-01-01T00:05:00Z"}
        site.server.put(RUNS, run("gpt", committed=committed))
        drawn = await _steps_drawn(stream.content)
        assert drawn["committed"] == [[begun, begun + 300], [40, 41]]


def _checkpoint(name: str, step: int, tiers: list[str], *, minute: int) -> Body:
    made = f"2026-01-01T00:{minute:02}:00Z"
    return {
        "metadata": {"name": name, "namespace": "n", "creationTimestamp": made},
        "spec": {"run": "gpt", "step": f"0002.bbbbbbbb-{step:09}", "ranks": 1},
        "status": {"tiers": tiers},
    }


async def _steps_drawn(stream: aiohttp.StreamReader) -> Body:
    """The chart of steps, when it comes next."""
    async with asyncio.timeout(30):
        async for line in stream:
            sent = json.loads(line.removeprefix(b"data: ")) if line.startswith(b"data: ") else {}
            if steps := sent.get("charts", {}).get("steps"):
                return steps
    raise AssertionError("the page has ended")


async def test_a_run_whose_status_makes_no_sense_is_said_to_be_so(site: Site) -> None:
    site.server.put(RUNS, run("bad", watermarks={"memory": "no step"}))
    assert "unreadable" in await site.get()
    assert "makes no sense" in await site.get("/runs/bad")
    assert "It trains." in await site.get("/runs/gpt")


async def _until(content: asyncio.StreamReader, text: bytes) -> None:
    async with asyncio.timeout(30):
        while text not in await content.readline():
            pass


def _as_it_is(url: str) -> object:
    from yarl import URL

    return URL(url, encoded=True)
