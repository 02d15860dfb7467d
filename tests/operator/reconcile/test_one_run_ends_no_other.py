"""A run that is not as expected costs itself what it costs, and nobody else anything."""

from __future__ import annotations

import asyncio
import copy
import itertools
import json
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec
import pytest

from keepstep_operator.kube import Client
from keepstep_operator.reconcile.main import Reconciler
from tests.harness import until
from tests.operator.reconcile.samples import pod_body

Body = dict[str, Any]
NAMESPACE, PREFIX = "team", "/mnt/nvme0"
GROUP = "/apis/keepstep.dev/v1alpha1"


class _Taking(Client):
    """Of an API server that takes whatever is JSON, and has nothing."""

    def __init__(self) -> None:
        self.written: list[tuple[str, Any]] = []

    async def _call(self, method: str, path: str, **options: Any) -> Body:
        body = json.loads(msgspec.json.encode(options.get("body")))
        self.written.append((path, body))
        return body if isinstance(body, dict) else {}


class _Crashes(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.told: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.told.append(self.format(record))


@dataclass
class Shown:
    """What became of objects that a reconciler was shown. `written`: path and body. `crashes`: with
    a traceback, where it failed at something, and left that out."""

    written: list[tuple[str, Any]]
    crashes: list[str]

    def status(self, run: str) -> Body:
        """As it was written last; empty when it was not."""
        path = f"{GROUP}/namespaces/{NAMESPACE}/checkpointruns/{run}/status"
        found = [body[0]["value"] for at, body in self.written if at == path]
        return found[-1] if found else {}

    def events(self, run: str) -> list[Body]:
        """On the CheckpointRun, or on its job, which has the same name."""
        found = [body for at, body in self.written if at.endswith("/events")]
        return [one for one in found if one["regarding"]["name"] == run]


def shown(*objects: tuple[str, Body], tells: Callable[[Shown], bool]) -> Shown:
    """A reconciler is shown objects, each by the feed of this name, until it `tells` what it must.
    AssertionError when it does not, or when an object ends it, as it would end the process."""
    handler, log = _Crashes(), logging.getLogger("keepstep.operator")
    log.addHandler(handler)
    try:
        return asyncio.run(_shown(objects, tells, handler.told))
    except Exception as error:
        raise AssertionError(f"the process ended: {getattr(error, 'exceptions', error)}") from error
    finally:
        log.removeHandler(handler)


async def _shown(
    objects: tuple[tuple[str, Body], ...], tells: Callable[[Shown], bool], crashes: list[str]
) -> Shown:
    """Its time passes as often as it asks for it, so nothing is waited for."""
    client, seconds = _Taking(), itertools.count(1_790_000_000.0)
    found = Shown(client.written, crashes)
    async with asyncio.TaskGroup() as group:
        options: Any = {"host_paths": (PREFIX,), "clock": lambda: next(seconds)}
        parts = Reconciler(client, group=group, **options)
        writers = [parts.writer.run(), parts.event_writer.run()]
        tasks = [group.create_task(one) for one in writers]
        feeds = {one.name: one for one in (*parts.objects, parts.pods)}
        for name, body in objects:
            feeds[name].take("ADDED", body)

        def ticked() -> bool:
            parts.errands.carry_out(parts.registry.tick(at=next(seconds)))
            return tells(found)

        await until(ticked, within_s=20.0, what="what is to be told")
        for task in tasks:
            task.cancel()
        parts.stop()
    return found


COMMITTED = {"step": 5, "id": "0001.aaaaaaaa-000000005", "time": "2026-11-21T07:00:00Z"}


def _with(body: Body, **metadata: Body) -> tuple[Body, Body]:
    """The pod of these labels or annotations, and one beside it that has no sidecar, of which
    people are told by an Event."""
    body = copy.deepcopy(body)
    for name, values in metadata.items():
        body["metadata"][name] |= values
    bare = copy.deepcopy(body)
    bare["metadata"]["uid"] += "-bare"
    bare["metadata"]["name"] += "-bare"
    bare["spec"]["initContainers"] = []
    return body, bare


def pod(*, run: str) -> Body:
    """An injected pod of this run, whose job has its name."""
    body = pod_body()
    metadata = body["metadata"]
    metadata |= {"name": f"{run}-worker-0", "uid": f"pod-of-{run}"}
    metadata["labels"]["keepstep.dev/run-key"] = run
    told = json.loads(metadata["annotations"]["keepstep.dev/status"])
    told["job"] |= {"name": run, "uid": f"job-{run}"}
    metadata["annotations"]["keepstep.dev/status"] = json.dumps(told)
    return body


POLICY: Body = {
    "metadata": {"name": "default", "namespace": NAMESPACE, "uid": "p", "generation": 1},
    "spec": {
        "memory": {"limit": "1Gi", "slots": 4},
        "volumes": [{"name": "nvme0", "hostPath": {"path": PREFIX}}],
    },
}


def _run(name: str, **parts: Any) -> Body:
    annotations = parts.pop("annotations", {})
    metadata = {"name": name, "namespace": NAMESPACE, "uid": f"uid-of-{name}", "generation": 1}
    return {"metadata": {**metadata, "annotations": annotations}, "spec": {}, **parts}


def _ends_no_other(*evil: tuple[str, Body]) -> None:
    """Shown beside a good run of its namespace, of which all is told that there is to tell: also
    what changes after the evil one was seen."""
    good = [("pods", one) for one in _with(pod(run="good"))]

    def told(found: Shown) -> bool:
        return bool(found.status("good").get("policy") and found.events("good"))

    found = shown(*evil, *good, ("policies", POLICY), tells=told)
    assert found.crashes == []


@pytest.mark.parametrize(
    "said",
    [
        {"job": {"name": 5}},
        {"job": {"uid": ["u"]}},
        {"job": "gpt"},
        {"policy": ["default"]},
        {"image": "\ud800"},
        {"warnings": {"a": [10**40]}, "volumes": -1.5, "container": None},
    ],
)
def test_what_a_pod_says_of_itself_ends_no_other_run(said: Body) -> None:
    body = pod(run="evil")
    before = json.loads(body["metadata"]["annotations"]["keepstep.dev/status"])
    if isinstance(said.get("job"), dict):
        said = said | {"job": before["job"] | said["job"]}
    annotation = {"keepstep.dev/status": json.dumps(before | said)}
    _ends_no_other(
        ("runs", _run("evil")), *(("pods", one) for one in _with(body, annotations=annotation))
    )


@pytest.mark.parametrize(
    "metadata",
    [
        *(
            {"annotations": {"keepstep.dev/status": text}}
            for text in ("[" * 100_000, '{"policy":' * 100_000, "{", "5", '"\ud800"')
        ),
        {"labels": {"keepstep.dev/node-rank": "9" * 5000, "keepstep.dev/run-key": "a..b"}},
        {"labels": {"jobset.sigs.k8s.io/jobset-name": "x" * 254, "keepstep.dev/run": "../../x"}},
        {"annotations": {"keepstep.dev/restore-from": "x\n", "keepstep.dev/container": "\0"}},
    ],
    ids=str,
)
def test_labels_and_annotations_of_a_pod_end_no_other_run(metadata: dict[str, Body]) -> None:
    both = _with(pod(run="evil"), **metadata)
    _ends_no_other(*(("pods", one) for one in both))


@pytest.mark.parametrize(
    "parts",
    [
        {
            "status": {
                "committed": COMMITTED,
                "holders": [{"node": "a", "nodeRanks": "\u00b2", "copies": "0-999999999"}],
            }
        },
        {"status": {"policy": {"name": "p", "generation": [1]}, "job": {"name": 5}}},
        {"status": {"restoreFrom": {"step": "newest", "since": {}}, "recent": [{"step": 1.5}]}},
        {"spec": ["restoreFrom"], "status": "Finished"},
        {"spec": {"restoreFrom": "x?watch=true", "pins": {"a": 1}, "paused": "no"}},
        {"annotations": {"keepstep.dev/fresh-start": "\u0663"}, "status": {"step": 2**63}},
    ],
)
def test_a_run_that_somebody_edited_ends_no_other_run(parts: Body) -> None:
    _ends_no_other(
        ("runs", _run("evil", **parts)), *(("pods", one) for one in _with(pod(run="evil")))
    )
