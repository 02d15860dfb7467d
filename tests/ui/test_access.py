"""Who may read the page, and what a browser is allowed to do with it."""

from __future__ import annotations

import asyncio
import re

import aiohttp
import pytest
from yarl import URL

from keepstep_sidecar.ui.run_figures import RunPage
from keepstep_sidecar.ui.server import ENTRY_ROUTE
from tests.ui.conftest import site_of

ROUTES = ("/", "/runs/a", "/changes", "/runs/a/changes", "/static/page.js", "/nothing")


async def test_every_route_without_the_token_returns_403() -> None:
    async with site_of({"a": RunPage(name="a")}) as site:
        for route in (*ROUTES, "/?token=", "/?token=wrong", "/?token=%ff", "/runs/a?token=x"):
            text = await site.text(route, status=403)
            assert "open the URL that `keepstep ui` printed" in text
        headers = {"Cookie": f"keepstep-ui-{site.base.rpartition(':')[2]}=wrong"}
        async with site.client.get(site.base, headers=headers) as answer:
            assert answer.status == 403


async def test_the_token_becomes_a_cookie_that_no_script_and_no_other_site_has() -> None:
    async with site_of({"a": RunPage(name="a")}) as site:
        async with site.client.get(site.url) as answer:
            (cookie,) = answer.cookies.values()
            assert cookie.key == f"keepstep-ui-{site.base.rpartition(':')[2]}"
            assert cookie["httponly"] is True
            assert cookie["samesite"] == "Strict"
            assert cookie["domain"] == ""
            assert len(cookie.value) >= 32
            assert cookie.value not in site.url
            # followed from another site, too: what leads on is a page of this one
            assert 'http-equiv="refresh"' in await answer.text()
        assert "Runs" in await site.text("/")


async def test_a_token_grants_access_to_one_browser_once() -> None:
    async with site_of({"a": RunPage(name="a")}) as site:
        await site.enter()
        async with aiohttp.ClientSession() as other, other.get(site.url) as answer:
            assert answer.status == 403
            assert "once" in await answer.text()
        assert "Runs" in await site.text("/")


@pytest.mark.parametrize("path", ["//evil.example", "/%22%3E%3Cb%3E", "/runs/a"])
async def test_a_url_with_a_token_redirects_only_to_its_own_path(path: str) -> None:
    async with site_of({"a": RunPage(name="a")}) as site:
        url = URL(site.base + path + "?" + site.url.partition("?")[2], encoded=True)
        async with site.client.get(url) as answer:
            text = await answer.text()
        (found,) = re.findall(r'url=([^"]*)"', text)
        assert found == "/" + path.lstrip("/")
        assert "<b>" not in text


async def test_a_token_is_issued_only_to_clients_with_the_secret_of_the_page() -> None:
    async with site_of({"a": RunPage(name="a")}, secret="the-uid") as site:
        for words in ("", "Bearer", "Bearer ", "Bearer wrong", "Bearer \udcff", "the-uid"):
            async with site.client.get(
                site.base + ENTRY_ROUTE, headers={"Authorization": words} if words else {}
            ) as answer:
                assert answer.status == 403
                assert "another pod" in await answer.text()
        headers = {"Authorization": "Bearer the-uid"}
        async with site.client.get(site.base + ENTRY_ROUTE, headers=headers) as answer:
            token = (await answer.content.readline()).decode().strip()
            assert not answer.cookies
        assert await site.text("/", status=403)  # the secret itself is no way in
        async with site.client.get(f"{site.base}/?token={token}") as answer:
            assert answer.status == 200
        assert "Runs" in await site.text("/")
    async with site_of({}) as site:  # a page without a secret has no such route
        await site.text(ENTRY_ROUTE, status=403)


async def test_connections_without_the_cookie_are_limited_and_cannot_block_a_viewer() -> None:
    async with site_of({"a": RunPage(name="a")}) as site:
        port = int(site.base.rpartition(":")[2])
        async with site.client.get(site.url):
            pass
        async with site.client.get(f"{site.base}/changes") as kept:
            assert kept.status == 200
            idle = [await asyncio.open_connection("127.0.0.1", port) for _ in range(200)]
            try:
                ended = await asyncio.gather(*(_has_ended(reader) for reader, _ in idle[:160]))
                assert all(ended)  # newer ones took their places
                async with (
                    aiohttp.ClientSession(cookie_jar=site.client.cookie_jar) as client,
                    client.get(site.base) as answer,
                ):
                    assert answer.status == 200
                last = await asyncio.gather(*(_has_ended(reader) for reader, _ in idle))
                assert all(last)  # their time is over
                async with site.client.get(f"{site.base}/changes") as still:
                    assert still.status == 200
            finally:
                for _, writer in idle:
                    writer.close()


async def _has_ended(reader: asyncio.StreamReader) -> bool:
    try:
        return await asyncio.wait_for(reader.read(), 20) == b""
    except ConnectionError:
        return True


@pytest.mark.parametrize("host", ["evil.example", "evil.example:80", "127.0.0.1.evil.example", ""])
async def test_a_request_with_another_host_header_is_refused(host: str) -> None:
    async with site_of({"a": RunPage(name="a")}) as site:
        await site.enter()
        async with site.client.get(site.base, headers={"Host": host}) as answer:
            assert answer.status == 421
            assert "127.0.0.1" in await answer.text()


@pytest.mark.parametrize("host", ["localhost:9", "127.0.0.1", "LOCALHOST", "[::1]:5000"])
async def test_a_host_header_with_a_forwarded_port_is_accepted(host: str) -> None:
    async with site_of({"a": RunPage(name="a")}) as site:
        for url in (site.url, site.base):
            async with site.client.get(url, headers={"Host": host}) as answer:
                assert answer.status == 200


@pytest.mark.parametrize("origin", ["http://evil.example", "null", "http://127.0.0.1:1", ""])
async def test_a_page_of_another_origin_is_refused_even_with_the_cookie(origin: str) -> None:
    async with site_of({"a": RunPage(name="a")}) as site:
        await site.enter()
        for route in ROUTES:
            async with site.client.get(site.base + route, headers={"Origin": origin}) as answer:
                assert answer.status == 403
        async with site.client.get(site.base, headers={"Origin": site.base}) as answer:
            assert answer.status == 200


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS", "HEAD", "PATCH"])
async def test_every_method_except_get_is_refused(method: str) -> None:
    async with site_of({"a": RunPage(name="a")}) as site:
        await site.enter()
        for route in ROUTES:
            async with site.client.request(method, site.base + route) as answer:
                assert answer.status == 405
                assert answer.headers["Allow"] == "GET"


async def test_every_response_has_headers_that_forbid_foreign_scripts_frames_and_readers() -> None:
    async with site_of({"a": RunPage(name="a")}) as site:
        refused = [await _headers(site.client, site.base + "/", 403)]
        await site.enter()
        routes = (*ROUTES[:2], *ROUTES[4:])
        answers = [
            await _headers(site.client, site.base + route, 404 if route == "/nothing" else 200)
            for route in routes
        ]
        for headers in refused + answers:
            policy = headers["Content-Security-Policy"]
            assert "default-src 'none'" in policy
            assert "frame-ancestors 'none'" in policy
            assert "unsafe" not in policy
            assert headers["X-Content-Type-Options"] == "nosniff"
            assert headers["Referrer-Policy"] == "no-referrer"
            assert headers["Cross-Origin-Resource-Policy"] == "same-origin"
            assert headers["Cache-Control"] == "no-store"
            assert not [name for name in headers if name.startswith("Access-Control")]
            assert "Server" not in headers


async def test_only_the_static_files_of_the_page_are_served() -> None:
    async with site_of({}) as site:
        await site.enter()
        for route in ("/static/../pages.py", "/static/%2e%2e/pages.py", "/static/", "/static//etc"):
            async with site.client.get(site.base + route, allow_redirects=False) as answer:
                assert answer.status in (403, 404)


async def _headers(client: object, url: str, status: int) -> dict[str, str]:
    async with client.get(url) as answer:  # type: ignore[attr-defined]
        assert answer.status == status
        return dict(answer.headers)
