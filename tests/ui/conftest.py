"""The page served in this process, of runs that a test makes up; and `keepstep ui` itself."""

from __future__ import annotations

import contextlib
import re
import subprocess
from collections.abc import AsyncIterator, Callable, Iterator

import aiohttp
import pytest

from keepstep_sidecar.cli.output import printable
from keepstep_sidecar.ui.run_figures import RunPage
from keepstep_sidecar.ui.server import PageAccess, listen_on_loopback, serve_page
from tests.cli.conftest import Keepstep


class Site:
    """The page, and who may look. `views`: what is read, by name; a test changes it."""

    def __init__(self, url: str, views: dict[str, RunPage], client: aiohttp.ClientSession) -> None:
        self.url, self.views, self.client = url, views, client
        self.base = url.partition("/?")[0]

    async def enter(self) -> None:
        """As a browser does that opens the printed URL."""
        async with self.client.get(self.url) as answer:
            assert answer.status == 200

    async def text(self, route: str, *, status: int = 200) -> str:
        async with self.client.get(self.base + route) as answer:
            assert answer.status == status
            return await answer.text()


@contextlib.asynccontextmanager
async def site_of(views: dict[str, RunPage], *, secret: str = "") -> AsyncIterator[Site]:
    access, listening = PageAccess("keepstep ui", secret=secret), listen_on_loopback(0)
    url = access.url(listening.getsockname()[1])

    def read(name: str) -> RunPage:
        return views[name]

    # an unsafe jar: cookies for an address, not a name
    async with (
        serve_page(
            listening,
            access,
            place="/kept",
            names=lambda: sorted(views),
            read=read,
            text=printable,
        ),
        aiohttp.ClientSession(cookie_jar=aiohttp.CookieJar(unsafe=True)) as client,
    ):
        yield Site(url, views, client)


@pytest.fixture
def opened(keepstep: Keepstep) -> Iterator[Callable[[], tuple[subprocess.Popen[str], str]]]:
    """Starts `keepstep ui`: its process and the URL that it prints."""
    begun: list[subprocess.Popen[str]] = []

    def start() -> tuple[subprocess.Popen[str], str]:
        process = keepstep.start("ui", "--no-open")
        begun.append(process)
        assert process.stdout is not None
        found = re.fullmatch(r"runs in .*: (http://\S+)\n", process.stdout.readline())
        assert found is not None
        return process, found[1]

    yield start
    for process in begun:
        process.kill()
        process.communicate()
