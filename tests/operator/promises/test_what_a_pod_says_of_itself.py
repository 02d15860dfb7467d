"""Labels and annotations that users write lead the operator nowhere beyond their namespace."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from tests.harness import until
from tests.operator.promises.surface import (
    HELPERS,
    RUN,
    Body,
    Cluster,
    pod,
    policy,
    reconciler,
)

_JOB = {"api_version": "batch/v1", "kind": "Job", "name": "x", "uid": "u"}
PATHS: list[dict[str, Any]] = [
    {"name": "../../../../../api/v1/namespaces/victim/pods/p"},
    {"api_version": "../api/v1/namespaces/victim/pods/p?", "name": "x"},
    {"name": "x?watch=true"},
    {"name": "x/log"},
]
_IN_ITS_OWN = re.compile(
    r"/apis/batch/v1/namespaces/evil/jobs/[^/?]+"
    r"|/apis/kubeflow\.org/v1/namespaces/evil/pytorchjobs/[^/?]+"
    r"|/api/v1/namespaces/evil/pods/[^/?]+"
    r"|/apis/keepstep\.dev/v1alpha1/namespaces/evil/checkpoints\?limit=500&labelSelector="
    r"keepstep\.dev/run-key%3Devil-[a-z0-9-]+%2C[^&?]+"
)
"""The job; where no object can be that, what owns the pod, or the pod; and the run's steps."""
_OF_A_RUN = re.compile(r"/host/\d+/[a-z0-9-]+/[a-z0-9]([-a-z0-9]*[a-z0-9])?")


async def test_a_job_is_looked_up_nowhere_else(tmp_path: Path) -> None:
    cluster = Cluster()
    pods = [
        pod(0, run=f"evil-{number}", namespace="evil", job=_JOB | change)
        for number, change in enumerate(PATHS)
    ]
    pods += [
        _owned(pod(0, run=f"evil-owned-{number}", namespace="evil", job=_JOB | change), change)
        for number, change in enumerate(PATHS)
    ]
    good = pod(0)
    for one in (*pods, good):
        cluster.bind(one)
    runs = len(pods) + 1
    async with reconciler(cluster, tmp_path) as operator:
        await until(lambda: operator.knows(runs), what="all pods")
        # a run that has neither pods nor an object is nothing that anybody asks about
        await until(lambda: len(cluster.made("checkpointruns")) >= runs, what="all runs' objects")
        for one in (*pods, good):  # the good one last: when its job was asked for, all were
            cluster.drop(one)
        await until(lambda: cluster.asked("GET", f"/pytorchjobs/{RUN}"), what="the good run's job")
    elsewhere = [one for one in cluster.targets if "/victim/" in one]
    named = [one for one in cluster.targets if "/namespaces/evil/" in one]
    beside = [one for one in named if not _IN_ITS_OWN.fullmatch(one)]
    assert not elsewhere
    assert not beside


def _owned(body: Body, change: dict[str, Any]) -> Body:
    """With the same written of its owner."""
    (owner,) = body["metadata"]["ownerReferences"]
    owner["name"] = change["name"]
    owner["apiVersion"] = change.get("api_version", owner["apiVersion"])
    return body


@pytest.mark.parametrize("key", ["", "A..b"])
async def test_a_label_that_is_no_name_of_a_run_sends_out_no_cleaner(
    tmp_path: Path, key: str
) -> None:
    evil, good = pod(0, run=key, namespace="evil"), pod(0, namespace="zood")
    cluster = Cluster(objects=dict([policy("evil"), policy("zood")]))
    for one in (evil, good):
        cluster.bind(one)
    async with reconciler(cluster, tmp_path, *HELPERS, "--clean-after", "0") as operator:
        await until(lambda: operator.knows(1), what="the pods")
        await until(lambda: cluster.run(namespace="zood"), what="the good run's object")
        for one in (evil, good):
            cluster.drop(one)
        for path in [path for path in cluster.objects if "/checkpointruns/" in path]:
            cluster.remove(path)
        await until(lambda: any("/zood/" in one for one in _cleaned(cluster)), what="its cleaner")
    assert [one for one in _cleaned(cluster) if not _OF_A_RUN.fullmatch(one)] == []


def _cleaned(cluster: Cluster) -> list[str]:
    """Directories that cleaning pods were made for."""
    commands = [_command(one) for one in cluster.made("pods")]
    return [path for one in commands if "clean" in one for path in one if path.startswith("/")]


def _command(made: Body) -> list[str]:
    found: list[str] = made["spec"]["containers"][0]["command"]
    return found[1:]
