"""The page of a run: a viewer's own right to forward a port, and no token of the cluster's to
anybody."""

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

from keepstep_sidecar.ui.pages import STATIC
from tests.e2e import runs
from tests.e2e.cluster import Cluster
from tests.e2e.kubectl import Kubectl

_CLI = "from keepstep_operator.kubectl.main import cli; cli()"
_SCRIPT = "uplot/uPlot.iife.min.js"
_ROLE = {
    "apiVersion": "rbac.authorization.k8s.io/v1",
    "kind": "Role",
    "metadata": {"name": "pages"},
    "rules": [
        {"apiGroups": [""], "resources": ["pods"], "verbs": ["list"]},
        {"apiGroups": [""], "resources": ["pods/portforward"], "verbs": ["get", "create"]},
    ],
}

Browser = Callable[[str], Any]


def test_the_right_to_forward_ports_suffices_to_view_the_page_of_a_run(
    cluster: Cluster, training: Kubectl, tmp_path: Path
) -> None:
    training("create", "serviceaccount", "viewer")
    viewer = f"--serviceaccount={training.namespace}:viewer"
    config = _kubeconfig(cluster, training("create", "token", "viewer").strip(), tmp_path)
    name = runs.the_run(training)["metadata"]["name"]
    words = (name, "-n", training.namespace)

    with pytest.raises(RuntimeError, match="forbidden"), _page(config, *words):
        pass
    training("create", "rolebinding", "list", "--clusterrole=view", viewer)
    identity = f"--as=system:serviceaccount:{training.namespace}:viewer"
    # the API server's authorizer sees a binding a moment later
    training.eventually(lambda: training("auth", "can-i", "list", "pods", identity), what="view")
    refused = pytest.raises(RuntimeError, match="get and create of pods/portforward")
    with refused, _page(config, *words):
        pass
    training.apply(_ROLE)
    training("create", "rolebinding", "pages", "--role=pages", viewer)
    forwards = ("auth", "can-i", "create", "pods", "--subresource=portforward", identity)
    training.eventually(lambda: training(*forwards), what="the role is there")
    with _page(config, *words) as browse:
        status, text = _read(browse, f"/runs/{name}")
        assert status == 200
        assert "Training: 1 of 2 ranks are connected." in text
        assert _read(browse, f"/static/{_SCRIPT}")[1] == (STATIC / _SCRIPT).read_text()
        before = _committed(browse, name)
        training.eventually(lambda: _committed(browse, name) != before, what="a newer step")

    # a container of the pod reaches the port, and is shown nothing
    probe = (
        "import urllib.request as r, urllib.error as e\n"
        "try: r.urlopen('http://127.0.0.1:26742/')\n"
        "except e.HTTPError as error: print(error.code)\n"
    )
    output = training("exec", "gpt-master-0", "-c", "pytorch", "--", "python", "-c", probe)
    assert output.strip() == "403"


def _kubeconfig(cluster: Cluster, token: str, directory: Path) -> Path:
    """Of a user with this token and nothing else."""
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
        [sys.executable, "-c", _CLI, "ui", *words],
        env={**os.environ, "KUBECONFIG": str(config)},
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        assert process.stdout is not None
        found = re.search(r"(http://[^/]+)/runs/\S+", process.stdout.readline())
        if found is None:
            raise RuntimeError(process.communicate(timeout=60)[1])
        opener = urllib.request.build_opener(urllib.request.HTTPCookieProcessor(CookieJar()))
        opener.open(found[0], timeout=60).close()
        yield lambda route: opener.open(found[1] + route, timeout=60)
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


def _committed(browse: Browser, run: str) -> str:
    """The committed step on a page that stays open, as it asks for it."""
    facts = json.loads(_read(browse, f"/runs/{run}/changes")[1])["sections"]["facts"]
    found = re.search(r'<dd id="committed">step (\d+)', facts)
    return found[1] if found else ""
