"""The page of the cluster: a viewer's own token, their own rights, and the way through the API
server to a port that nobody else reaches."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.cookiejar import CookieJar
from pathlib import Path
from typing import Any

import pytest
import yaml

from keepstep_page.pages import STATIC
from tests.e2e import runs
from tests.e2e.cluster import NAMESPACE, Cluster
from tests.e2e.kubectl import Kubectl

_CLI = "from keepstep_operator.kubectl.main import cli; cli()"
_SCRIPT = "uplot/uPlot.iife.min.js"

Browser = Callable[[str], Any]


def test_the_page_shows_a_viewer_what_they_may_read(
    cluster: Cluster, training: Kubectl, tmp_path: Path
) -> None:
    training("create", "serviceaccount", "viewer")
    viewer = f"--serviceaccount={training.namespace}:viewer"
    config = _kubeconfig(cluster, training("create", "token", "viewer").strip(), tmp_path)
    words = ("-n", training.namespace)

    refused = pytest.raises(RuntimeError, match=r"keepstep-ui-0.*forbidden.*ui\.viewers")
    with refused, _page(config, *words):
        pass
    system, role = cluster.kubectl.namespaced(NAMESPACE), "keepstep-ui-viewers"
    system("create", "rolebinding", training.namespace, f"--role={role}", viewer)
    try:
        # the API server's authorizer hears of a binding a moment later
        forwards = ("auth", "can-i", "create", "pods/keepstep-ui-0", "--subresource=portforward")
        identity = f"--as=system:serviceaccount:{training.namespace}:viewer"
        training.eventually(lambda: system(*forwards, identity), what="the role is there")
        with _page(config, *words) as browse:
            status, text = _read(browse, "/")
            assert status == 403
            may_not = "viewer may not list checkpointruns and checkpoints in namespace"
            assert f"{may_not} {training.namespace}" in text
            command = re.search(r"<code>kubectl (create rolebinding [^<]*)</code>", text)
            assert command is not None
            cluster.kubectl(*command[1].split())  # what the page says helps
            training.eventually(lambda: _read(browse, "/")[0] == 200, what="the role is there")

            name = runs.the_run(training)["metadata"]["name"]
            status, text = _read(browse, "/")
            assert name in text
            assert "Running" in text
            assert "It trains." in _read(browse, f"/runs/{name}")[1]
            assert _read(browse, f"/static/{_SCRIPT}")[1] == (STATIC / _SCRIPT).read_text()
            assert len(set(_committed(browse, name, changes=2))) == 2  # by themselves
    finally:
        system("delete", "rolebinding", training.namespace)

    # kind's own user has a certificate alone, and shows the token of somebody else
    with _page(cluster.kubeconfig, *words, "--service-account", "viewer") as browse:
        assert name in _read(browse, "/")[1]


def _kubeconfig(cluster: Cluster, token: str, directory: Path) -> Path:
    """Of who has this token and nothing else."""
    config = yaml.safe_load(cluster.kubeconfig.read_text())
    (user,) = config["users"]
    user["user"] = {"token": token}
    path = directory / "kubeconfig"
    path.write_text(yaml.safe_dump(config))
    return path


@contextmanager
def _page(config: Path, *words: str) -> Iterator[Browser]:
    """`kubectl keepstep ui` of the checkout that is tested, and a browser that has opened its URL:
    opens a route. Raises RuntimeError with what the command says."""
    process = subprocess.Popen(
        [sys.executable, "-c", _CLI, "ui", "--no-open", *words],
        env={**os.environ, "KUBECONFIG": str(config)},
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        assert process.stdout is not None
        found = re.search(r"http://\S+", process.stdout.readline())
        if found is None:
            raise RuntimeError(process.communicate(timeout=60)[1])
        base = found[0].partition("/?")[0]
        opener = urllib.request.build_opener(urllib.request.HTTPCookieProcessor(CookieJar()))
        opener.open(found[0], timeout=60).close()
        yield lambda route: opener.open(base + route, timeout=60)
    finally:
        process.terminate()
        process.communicate(timeout=60)


def _read(browse: Browser, route: str) -> tuple[int, str]:
    try:
        with browse(route) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


def _committed(browse: Browser, run: str, *, changes: int) -> list[str]:
    """The committed step, as often as it changes on a page that stays open."""
    seen: list[str] = []
    with browse(f"/runs/{run}/changes") as stream:
        for line in stream:
            if not line.startswith(b"data: "):
                continue
            facts = json.loads(line.removeprefix(b"data: "))["sections"].get("facts", "")
            found = re.search(r'<dd id="committed">step (\d+)', facts)
            if found and found[1] not in seen:
                seen.append(found[1])
            if len(seen) == changes:
                return seen
    raise AssertionError(f"the page ended after {seen}")
