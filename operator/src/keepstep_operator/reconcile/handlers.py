"""kopf's handlers: what happens when objects of the cluster change. All are level-triggered, and
asynchronous: kopf would run others in threads.

Pods are selected by the label that admission sets on all pods that it was asked about: "true" if it
gave them a sidecar, "refused" if it did not. kopf keeps watches going, and tries again by itself.
"""

from __future__ import annotations

import os
from typing import Any, Final

import kopf

from keepstep_operator import names
from keepstep_operator.api.cluster_objects import RunKey
from keepstep_operator.object_body import Body
from keepstep_operator.reconcile.parsing import (
    asks_for_keepstep,
    parse_node,
    parse_pod_record,
    parse_policy_record,
    parse_run_object,
)
from keepstep_operator.reconcile.render import policy_status
from keepstep_operator.reconcile.run_transitions import Run

_OURS: Final = (names.GROUP, names.VERSION)


def handler_registry(*, watch_nodes: bool) -> kopf.OperatorRegistry:
    """The handlers. Their memo has `operator` (an Operator), `writer` (an ObjectWriter), and
    `host_paths`, the directories of nodes that policies may use."""
    handlers = kopf.OperatorRegistry()

    @kopf.on.login(registry=handlers)
    def login(**kwargs: Any) -> kopf.ConnectionInfo | None:
        outside = "KUBECONFIG" in os.environ
        found = kopf.login_with_kubeconfig if outside else kopf.login_with_service_account
        return found(**kwargs)

    @kopf.on.event("", "v1", "pods", registry=handlers)
    async def pod(event: kopf.RawEvent, uid: str, memo: kopf.Memo, **_: Any) -> None:
        body: Body = dict(event["object"])
        if event["type"] == "DELETED":
            memo.registry.pod_gone(uid)
        elif asks_for_keepstep(body) and (record := parse_pod_record(body)) is not None:
            memo.registry.pod_seen(record)

    @kopf.on.event(*_OURS, "checkpointruns", registry=handlers)
    async def checkpoint_run(
        event: kopf.RawEvent, namespace: str | None, name: str, memo: kopf.Memo, **_: Any
    ) -> None:
        run: Run | None = memo.registry.runs.get(RunKey(namespace or "", name))
        known = run is not None and run.object is not None
        target = parse_run_object(dict(event["object"]), with_status=not known)
        if event["type"] == "DELETED":
            memo.registry.run_object_gone(target.key)
        else:
            memo.writer.record_observed_status(target.key, event["object"].get("status") or {})
            memo.registry.run_object_seen(target)

    @kopf.on.event(*_OURS, "checkpointpolicies", registry=handlers)
    async def checkpoint_policy(
        event: kopf.RawEvent, patch: kopf.Patch, memo: kopf.Memo, **_: Any
    ) -> None:
        body: Body = dict(event["object"])
        policy = parse_policy_record(body, allowed_paths=memo.host_paths)
        if event["type"] == "DELETED":
            memo.registry.policy_gone(policy.namespace, policy.name)
            return
        if (verdict := memo.registry.policy_seen(policy)) is not None:
            memo.writer.emit(Run(key=RunKey(policy.namespace, policy.name), since=0.0), verdict)
        before: Body = body.get("status") or {}
        status = policy_status(policy, before, now=memo.registry.clock())
        if status != before:
            patch.status.update(status)

    if watch_nodes:

        @kopf.on.event("", "v1", "nodes", registry=handlers)
        async def node(event: kopf.RawEvent, name: str, memo: kopf.Memo, **_: Any) -> None:
            if event["type"] == "DELETED":
                memo.registry.node_gone(name)
            else:
                memo.registry.node_seen(parse_node(dict(event["object"])))

    return handlers


def kopf_settings() -> kopf.OperatorSettings:
    """kopf's settings: the server selects pods, and may be away for hours."""
    made = kopf.OperatorSettings()
    made.posting.enabled = False
    made.scanning.disabled = True  # the kinds exist by now; needs no right to list CRDs
    made.watching.label_selectors["", "v1", "pods"] = names.INJECTED_LABEL
    made.watching.chunk_size = 500
    # otherwise each object of a first listing waits five seconds in memory
    made.queueing.worker_limit, made.queueing.idle_timeout = 200, 0.1
    made.networking.error_backoffs = (1, 2, 4, 8, *[15] * 1000)
    return made
