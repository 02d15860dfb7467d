"""`kubectl keepstep ui`: the page of a cluster on the viewer's machine, through the API server."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import aiohttp
import pytest
import yaml
from selenium import webdriver
from selenium.webdriver.common.by import By

from keepstep_operator import names
from keepstep_operator.kube import RUNS
from tests.operator.apiserver import TOKEN
from tests.operator.ui.conftest import ANNA, POD, Site, run
from tests.ui.test_browser import Seen, browser

__all__ = ["browser"]  # a fixture

Plugin = Callable[..., Awaitable[asyncio.subprocess.Process]]
_CLI = "from keepstep_operator.kubectl.main import cli; cli()"


@pytest.fixture
async def plugin(site: Site, tmp_path: Path) -> AsyncIterator[Plugin]:
    """Starts `kubectl keepstep ui`, with anna's kubeconfig."""
    config = site.server.kubeconfig(tmp_path)
    begun: list[asyncio.subprocess.Process] = []

    async def start(*words: str) -> asyncio.subprocess.Process:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-c", _CLI, "ui", "--no-open", *words,
            env={**os.environ, "KUBECONFIG": str(config)},
            stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
        )  # fmt: skip
        begun.append(process)
        return process

    yield start
    for process in begun:
        if process.returncode is None:
            process.kill()
        await process.communicate()


async def _url(process: asyncio.subprocess.Process) -> str:
    assert process.stdout is not None
    line = (await process.stdout.readline()).decode()
    found = re.fullmatch(r"runs in namespace n: (http://\S+)\n", line)
    assert found is not None, line
    return found[1]


async def _said(process: asyncio.subprocess.Process) -> str:
    _, said = await process.communicate()
    return said.decode()


def _client() -> aiohttp.ClientSession:
    return aiohttp.ClientSession(cookie_jar=aiohttp.CookieJar(unsafe=True))


async def test_the_viewers_own_token_shows_them_what_they_may_see(
    site: Site, plugin: Plugin
) -> None:
    process = await plugin()
    url = await _url(process)
    base = url.partition("/?")[0]
    async with _client() as client:
        async with client.get(url) as answer:
            (cookie,) = answer.cookies.values()
            assert cookie.key == f"keepstep-ui-{base.rpartition(':')[2]}"
            assert TOKEN not in str(answer.headers) + await answer.text()
        async with client.get(base) as answer:
            text = await answer.text()
            assert "gpt" in text
            assert TOKEN not in str(answer.headers)
            assert "default-src 'none'" in answer.headers["Content-Security-Policy"]
        async with client.get(f"{base}/static/page.js") as answer:
            assert answer.content_type.endswith("/javascript")
            assert int(answer.headers["Content-Length"]) == len(await answer.read())
        async with client.get(f"{base}/changes") as stream:
            assert b"gpt" in await stream.content.readline()
            site.server.put(RUNS, run("second"))
            async with asyncio.timeout(30):
                while b"second" not in await stream.content.readline():
                    pass
    (asked,) = {one.body["spec"]["token"] for one in site.server.asked("POST", "tokenreviews")}
    assert asked == TOKEN
    targets = " ".join(one.target for one in site.server.requests)
    assert not re.search(rf"[=/]{TOKEN}\b", targets)
    process.send_signal(signal.SIGINT)
    assert await asyncio.wait_for(process.wait(), 30) == 0


async def test_nothing_is_asked_for_who_is_not_let_in(site: Site, plugin: Plugin) -> None:
    url = await _url(await plugin())
    base, before = url.partition("/?")[0], len(site.server.requests)
    async with _client() as client:
        for route in ("/", "/?token=wrong", "/runs/gpt", "/static/page.js"):
            async with client.get(base + route) as answer:
                assert answer.status == 403
                assert "kubectl keepstep ui" in await answer.text()
        async with client.get(url) as answer:
            assert answer.status == 200
        for headers, status in (
            ({"Host": "evil.example"}, 421),
            ({"Host": f"127.0.0.1.evil.example:{base.rpartition(':')[2]}"}, 421),
            ({"Origin": "http://evil.example"}, 403),
            ({"Origin": "null"}, 403),
        ):
            async with client.get(base, headers=headers) as answer:
                assert answer.status == status
        async with client.post(base) as answer:
            assert answer.status == 405
    assert len(site.server.requests) == before


async def test_who_has_no_right_is_told_on_the_page(site: Site, plugin: Plugin) -> None:
    site.server.rights.clear()
    url = await _url(await plugin())
    base = url.partition("/?")[0]
    async with _client() as client, client.get(url), client.get(base) as answer:
        assert answer.status == 403
        assert "anna may not list checkpointruns and checkpoints" in await answer.text()


@pytest.mark.parametrize(
    ("words", "code", "told"),
    [
        (("--page", "keepstep-system"), 2, "NAMESPACE/POD"),
        (("--page", "keepstep-system/other-0"), 1, "ui.enabled=true"),
        (("--port", "70000"), 2, "65535"),
    ],
)
async def test_what_cannot_be_shown_is_said_with_what_to_do(
    plugin: Plugin, words: tuple[str, ...], code: int, told: str
) -> None:
    process = await plugin(*words)
    assert told in await _said(process)
    assert process.returncode == code


async def test_who_may_not_forward_a_port_is_told_which_value_gives_it(
    site: Site, plugin: Plugin
) -> None:
    site.server.forbidden = "/portforward"
    process = await plugin()
    said = await _said(process)
    assert "no role says so" in said
    assert "ui.viewers" in said
    assert process.returncode == 1


async def test_without_a_token_of_ones_own_a_service_account_is_named(
    site: Site, plugin: Plugin, tmp_path: Path
) -> None:
    path = tmp_path / "kubeconfig"
    config = yaml.safe_load(path.read_text())
    path.write_text(yaml.safe_dump({**config, "users": [{"name": "u", "user": {}}]}))
    process = await plugin()
    assert "--service-account NAME" in await _said(process)
    assert process.returncode == 2
    assert site.server.requests == []


async def test_a_service_accounts_token_is_made_for_the_page_alone(
    site: Site, plugin: Plugin
) -> None:
    account = "/api/v1/namespaces/n/serviceaccounts/viewer/token"
    site.server.rights = {(account, plural, "n") for _, plural, _ in site.server.rights}
    url = await _url(await plugin("--service-account", "viewer"))
    base = url.partition("/?")[0]
    async with _client() as client, client.get(url), client.get(base) as answer:
        assert answer.status == 200
        assert "gpt" in await answer.text()
    (made,) = site.server.asked("POST", "/serviceaccounts/viewer/token")
    assert made.body["spec"]["audiences"] == [names.UI_AUDIENCE]
    reviewed = {one.body["spec"]["token"] for one in site.server.asked("POST", "tokenreviews")}
    assert reviewed == {account}


async def test_while_the_page_is_away_that_is_said_and_then_it_is_there_again(
    site: Site, plugin: Plugin
) -> None:
    url = await _url(await plugin())
    base = url.partition("/?")[0]
    async with _client() as client, client.get(url):
        port = site.server.forwards.pop(POD)
        async with client.get(base) as answer:
            assert answer.status == 502
            assert "no way to the page in pod keepstep-system/keepstep-ui-0" in await answer.text()
        site.server.forwards[POD] = port
        async with client.get(base) as answer:
            assert answer.status == 200


async def test_in_a_browser_a_change_is_seen_by_itself(
    site: Site, plugin: Plugin, browser: webdriver.Chrome
) -> None:
    url = await _url(await plugin())
    page = Seen(browser)
    await asyncio.to_thread(page.opens, url)
    await asyncio.to_thread(page.shows, "runs", "Running")
    site.server.put(RUNS, run("second", phase="Waiting"))
    await asyncio.to_thread(page.shows, "runs", "second")
    await asyncio.to_thread(lambda: browser.find_element(By.LINK_TEXT, "gpt").click())
    await asyncio.to_thread(page.shows, "state", "It trains.")
    await asyncio.to_thread(page.shows, "committed", "step 40")
    await asyncio.to_thread(page.draws, "steps")
    recent = [{"time": "2026-01-01T00:00:00Z", "type": "Restored", "step": 40, "tier": "peer"}]
    status = {"phase": "Restoring", "recent": recent, "warnings": ["only one copy"]}
    site.server.put(RUNS, run("gpt", **status))
    await asyncio.to_thread(page.shows, "state", "Ranks come back")
    await asyncio.to_thread(page.shows, "recent", "peer")
    await asyncio.to_thread(page.shows, "problems", "only one copy")
    assert await asyncio.to_thread(page.complaints) == []
    # in another namespace nothing was asked, and no token of anna's is in the browser
    assert json.dumps(ANNA["username"]) not in await asyncio.to_thread(lambda: browser.page_source)
    assert TOKEN not in (await asyncio.to_thread(lambda: str(browser.get_cookies())))
