"""`keepstep ui` as a process: its URL, its end, what it costs who does not use it."""

from __future__ import annotations

import signal
import stat
import subprocess
import urllib.error
import urllib.request
from collections.abc import Callable
from http.cookiejar import CookieJar
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psutil
import pytest

from keepstep_sidecar.cli.commands.ui import opened as started
from tests import warm
from tests.cli.conftest import TRAIN, Keepstep
from tests.harness import eventually

Started = Callable[[], tuple[subprocess.Popen[str], str]]


def _browser(url: str) -> tuple[Callable[[str], str], Callable[[str], Any]]:
    """Reads and opens routes, as a browser that has opened the URL."""
    jar = CookieJar()
    opener = urllib.request.build_opener(urllib.request.HTTPCookieProcessor(jar))
    base = url.partition("/?")[0]

    def open_(route: str) -> Any:
        return opener.open(base + route, timeout=30)

    def read(route: str) -> str:
        with open_(route) as answer:
            return str(answer.read().decode())

    read(url.removeprefix(base))
    return read, open_


def test_the_ui_command_listens_only_on_localhost_and_exits_cleanly_on_ctrl_c(
    keepstep: Keepstep, opened: Started
) -> None:
    process, url = opened()
    sockets = psutil.net_connections(kind="inet")
    listening = [socket.laddr for socket in sockets if socket.status == psutil.CONN_LISTEN]
    assert [address.ip for address in listening if address.port == urlsplit(url).port] == [
        "127.0.0.1"
    ]
    with pytest.raises(urllib.error.HTTPError, match="403"):
        urllib.request.urlopen(url.partition("?")[0], timeout=30)
    read, open_ = _browser(url)
    assert "No run is kept" in read("/")
    with open_("/changes"):  # a viewer
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=30)
    assert process.returncode == 0
    assert "Traceback" not in err


def test_a_run_without_a_sidecar_is_shown_from_its_volumes_until_it_is_removed(
    keepstep: Keepstep, opened: Started
) -> None:
    keepstep("run", "--", warm.python(), keepstep.script("train.py", TRAIN), "6", "-1")
    read, _ = _browser(opened()[1])
    page = read("/runs/train")
    assert "No sidecar runs" in page
    assert 'id="committed">step 5 of epoch 1' in page
    keepstep("rm", "5", "--yes")
    eventually(lambda: 'id="committed">step 4 of epoch 1' in read("/runs/train"))


def test_the_token_url_does_not_appear_in_the_arguments_of_the_browser(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    words, seen = tmp_path / "words", tmp_path / "seen"
    browser = tmp_path / "browser"
    browser.write_text(f'#!/bin/sh\necho "$@" > {words}\ncp -p "${{1#file://}}" {seen}\n')
    browser.chmod(0o755)
    monkeypatch.setenv("BROWSER", f"{browser} %s")
    with started("http://127.0.0.1:1/?token=secret"):
        pass
    assert "secret" not in words.read_text()
    assert "token=secret" in seen.read_text()
    assert stat.S_IMODE(seen.stat().st_mode) == 0o600
    assert not Path(words.read_text().strip().removeprefix("file://")).exists()
