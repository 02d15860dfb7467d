"""Objects and reports as JSON, and what a reconciler makes of objects that it is shown."""

from __future__ import annotations

import asyncio
import inspect
import itertools
import json
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec

from keepstep_operator.api.pod import Injected
from keepstep_operator.api.run import RunStatus
from keepstep_operator.kube import Client
from keepstep_operator.reconcile.main import Reconciler
from tests.operator.reconcile.pod_bodies import pod_body

Body = dict[str, Any]

NAMESPACE = "team"
SYSTEM = "keepstep-system"
RUN = "gpt-1a2b3c4d"
PREFIX = "/mnt/nvme0"
GROUP = "/apis/keepstep.dev/v1alpha1"
HELPERS = (
    "--host-path", PREFIX, "--helper-image", "keepstep/sidecar:0.1.0", "--helper-account",
    "helpers", "--reports-url", "https://reports", "--helper-namespace", SYSTEM,
)  # fmt: skip
"""Options with which reconcile makes helper pods."""
_sequence = itertools.count(1)


async def promised(
    condition: Callable[[], Any], what: str | Callable[[], str], *, within_s: float = 3.0
) -> None:
    """What a test is about: AssertionError when it does not come true. What must be true before is
    waited for with `tests.harness.until`, whose failure is no broken promise but a broken test."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + within_s
    while True:
        value = condition()
        if await value if inspect.isawaitable(value) else value:
            return
        if loop.time() > deadline:
            raise AssertionError(
                f"not within {within_s} s: {what if isinstance(what, str) else what()}"
            )
        await asyncio.sleep(0.02)


# --- what is there and what is said ---------------------------------------------------------------


def pod(
    node_rank: int = 0,
    *,
    run: str = RUN,
    namespace: str = NAMESPACE,
    life: int = 1,
    node: str = "",
    job: Body | None = None,
) -> Body:
    """An injected pod as the API server has it. A new `life` is a new pod of that place."""
    body = pod_body(node_rank)
    metadata = body["metadata"]
    metadata["namespace"] = namespace
    metadata["uid"] = f"{namespace}-{run}-{node_rank}-{life}"
    metadata["name"] = f"{run}-worker-{node_rank}" + (f"-{life}" if life > 1 else "")
    metadata["creationTimestamp"] = f"2026-11-21T07:{life:02d}:00Z"
    metadata["labels"]["keepstep.dev/run-key"] = run
    told = json.loads(metadata["annotations"]["keepstep.dev/status"])
    told["job"] = job or {**told["job"], "name": run, "uid": f"job-{run}"}
    metadata["annotations"]["keepstep.dev/status"] = json.dumps(told)
    body["spec"]["nodeName"] = node or f"node-{node_rank}"
    return body


def policy(namespace: str = NAMESPACE, **spec: Any) -> tuple[str, Body]:
    """Path and body of the CheckpointPolicy that these pods name."""
    body = {
        "metadata": {"name": "default", "namespace": namespace, "uid": "p", "generation": 1},
        "spec": {
            "memory": {"limit": "1Gi", "slots": 4},
            "volumes": [{"name": "nvme0", "hostPath": {"path": PREFIX}}],
            **spec,
        },
    }
    return f"{GROUP}/namespaces/{namespace}/checkpointpolicies/default", body


def epoch(number: int = 1, nonce: str = "aaaaaaaa") -> Body:
    return {"number": number, "nonce": nonce}


def held(step: int, world: int, *, of: Body | None = None, root: str = "") -> Body:
    """One image of a report."""
    found: Body = {"id": {"epoch": of or epoch(), "step": step}, "world": world}
    return {**found, "root": root} if root else found


def rank(
    number: int = 0,
    world: int = 1,
    *,
    memory: tuple[int, ...] = (),
    local: tuple[int, ...] = (),
    archive: tuple[int, ...] | None = None,
) -> Body:
    """One rank of a report, with steps by tier."""

    def at_rest(steps: tuple[int, ...]) -> list[Body]:
        return [held(one, world, root=f"{one}/{number}") for one in steps]

    told: Body = {
        "rank": number,
        "world": world,
        "alive": True,
        "memory": [held(one, world) for one in memory],
        "memory_answer": "steps" if memory else "none",
        "local": at_rest(local),
        "local_answer": "steps" if local else "none",
    }
    if archive is not None:
        told |= {"archive": at_rest(archive), "archive_answer": "steps" if archive else "none"}
    return told


def report(*ranks: Body, **more: Any) -> Body:
    """What a sidecar sends; each one is newer than those before."""
    return {
        "sidecar": "0.1.0",
        "started_at": 1.0,
        "sequence": next(_sequence),
        "sent_at": 1.0,
        "ready": True,
        "library": "0.1.0",
        "epochs": [{"id": epoch()}],
        "ranks": list(ranks),
        **more,
    }


SAID_OF_A_POD = tuple(Injected.__dataclass_fields__)
"""Fields of the annotation keepstep.dev/status."""
SAID_OF_A_RUN = RunStatus.__struct_encode_fields__
"""Fields of CheckpointRun.status."""


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

        await promised(ticked, lambda: f"written: {client.written}", within_s=20.0)
        for task in tasks:
            task.cancel()
        parts.stop()
    return found
