"""The containers that injection adds, and what the training container gets.

All settings reach the sidecar by environment, so that its arguments can never disagree with them.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Final

from keepstep.wire import reports
from keepstep_operator.api.pod import Placement
from keepstep_operator.api.policy import Policy, Verify
from keepstep_operator.bodies import Body
from keepstep_operator.injection.resources import Cost, resources_of
from keepstep_operator.injection.settings import Defaults
from keepstep_operator.injection.tiers import environment_of, ports_of
from keepstep_operator.injection.volumes import (
    host_mounts,
    memory_mounts,
    mounts_of,
    paths_of,
    prepared_paths,
)
from keepstep_operator.names import (
    GROUP_ID,
    HUGE_PATH,
    MEMORY_PATH,
    RESTORE_TIMEOUT_ENV,
    SIDECAR_CONTAINER,
    SIDECAR_METRICS_PORT,
    SOCKET_ENV,
    SOCKET_PATH,
    TOKEN_PATH,
    TRUST_PATH,
    USER_ID,
    VOLUMES_CONTAINER,
)

_PROGRAM: Final = "keepstep-sidecar"
_START: Final = "120s"
_COPIED = re.compile(
    r"^(RANK|WORLD_SIZE|LOCAL_WORLD_SIZE|NODE_RANK|JOB_COMPLETION_INDEX|PET_[A-Z0-9_]+)$"
)
"""Job controllers set these on the containers that they know, which the sidecar is not."""
_VERIFY: Final = {Verify.FULL: "full", Verify.SEAL: "seal"}


def sidecar(
    policy: Policy,
    placement: Placement,
    defaults: Defaults,
    *,
    training: Body,
    cost: Cost,
    storage: str | None = None,
    host_network: bool = False,
    restore_from: str | None = None,
) -> Body:
    """The native sidecar: starts first, ends last, and never keeps a finished job alive.

    No readiness probe: it would keep the pod out of the Service that ranks meet at. And no startup
    probe: the kubelet looks once a second, while the end of a postStart hook lets the trainer start
    at once; either way it starts when the sidecar answers, not before. The hook never fails:
    without an answer in time training begins nonetheless, and says at its restore what is wrong.
    `training`: the container whose ranks it serves. `storage`: the ephemeral storage it asks for,
    None for no limit. `host_network`: then no port is declared, as it would become the node's, and
    two pods would not fit on one. `restore_from`: as the pod's annotation has it. What is wrong
    with it the sidecar says: a pod that is let through without one would begin at step 0.
    """
    resources = resources_of(cost)
    if storage is not None:
        for kind in resources.values():
            kind["ephemeral-storage"] = storage
    return {
        "name": SIDECAR_CONTAINER,
        "image": defaults.sidecar_image,
        "imagePullPolicy": defaults.sidecar_pull_policy,
        "restartPolicy": "Always",
        "env": _environment(policy, placement, defaults, training, restore_from),
        **({} if host_network else {"ports": [_metrics_port(), *ports_of(policy)]}),
        "resources": resources,
        "volumeMounts": mounts_of(policy, placement),
        "lifecycle": {
            "postStart": {"exec": {"command": [_PROGRAM, "--started", "--probe-timeout", _START]}},
            "preStop": {"exec": {"command": [_PROGRAM, "--flush"]}},
        },
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "securityContext": confined(user=USER_ID, group=GROUP_ID),
    }


def directories(
    policy: Policy, placement: Placement, defaults: Defaults, *, cost: Cost
) -> Body | None:
    """The init container that makes the pod's directory below each hostPath; None without one.

    It is root, as a hostPath is root's, with no more than it takes to give a directory away. It
    ends before the sidecar, of which `cost` is, begins: its CPU adds nothing to the pod's.
    """
    if not policy.host_paths:
        return None
    security = confined(user=0, group=0)
    security["capabilities"]["add"] = ["CHOWN", "DAC_OVERRIDE", "FOWNER"]
    return {
        "name": VOLUMES_CONTAINER,
        "image": defaults.root_image or defaults.sidecar_image,
        "imagePullPolicy": defaults.sidecar_pull_policy,
        "command": [_PROGRAM, "--prepare", *prepared_paths(policy, placement)],
        "resources": resources_of(
            replace(cost, memory_bytes=128 << 20, spare_bytes=0, huge_bytes=0)
        ),
        "volumeMounts": host_mounts(policy),
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "securityContext": security,
    }


def trained(container: Body, policy: Policy) -> Body:
    """The training container with the shared memory and the way to the sidecar's socket. What its
    owner set by the same name stays."""
    mounts = [*(container.get("volumeMounts") or []), *memory_mounts(policy)]
    environment = container.get("env") or []
    ours = {SOCKET_ENV: SOCKET_PATH, RESTORE_TIMEOUT_ENV: str(policy.restore_timeout_s)}
    theirs = {one.get("name") for one in environment}
    added = [{"name": name, "value": one} for name, one in ours.items() if name not in theirs]
    return {**container, "volumeMounts": mounts, "env": [*environment, *added]}


def _metrics_port() -> Body:
    """Its name is what the chart's PodMonitor looks for."""
    return {"name": "keepstep", "containerPort": SIDECAR_METRICS_PORT, "protocol": "TCP"}


def _environment(
    policy: Policy,
    placement: Placement,
    defaults: Defaults,
    training: Body,
    restore_from: str | None,
) -> list[Body]:
    ours = {
        **_settings(policy, placement, defaults),
        "KEEPSTEP_RESTORE_FROM": _other_run(restore_from, own=placement.run_key),
    }
    return [
        *({"name": name, "value": str(value)} for name, value in ours.items() if value is not None),
        *environment_of(policy),
        *_copied(training.get("env") or []),
    ]


def _other_run(text: str | None, *, own: str) -> str | None:
    """A step of the run itself is asked for in its CheckpointRun: an annotation of the template
    would hold for every restart. `./` names no run, so the sidecar refuses it and says so."""
    if text is None:
        return None
    step = text.removeprefix(f"{own}/").replace("$(", "$$(")  # it is not to be expanded
    return step if "/" in step else f"./{step}"


def _settings(
    policy: Policy, placement: Placement, defaults: Defaults
) -> dict[str, str | int | None]:
    """The contract with `keepstep-sidecar`; None is left out."""
    return {
        "KEEPSTEP_RUN": placement.run_key,
        "KEEPSTEP_MEMORY_DIR": MEMORY_PATH,
        "KEEPSTEP_HUGE_PAGES_DIR": HUGE_PATH if policy.huge_bytes else None,
        "KEEPSTEP_VOLUMES": " ".join(paths_of(policy)),
        "KEEPSTEP_SLOTS": policy.slots,
        "KEEPSTEP_MEMORY_LIMIT": policy.memory_limit_bytes,
        "KEEPSTEP_STAGE_EVERY": policy.stage_every,
        "KEEPSTEP_PERSIST_EVERY": policy.persist_every,
        "KEEPSTEP_DRIVE_WRITES_PER_DAY": policy.drive_writes_per_day,
        "KEEPSTEP_KEEP": policy.keep.last,
        "KEEPSTEP_KEEP_EVERY": policy.keep.every,
        "KEEPSTEP_CAPACITY": policy.usable_bytes,
        "KEEPSTEP_IO_THREADS": policy.io_threads,
        "KEEPSTEP_BYTES_PER_SECOND": policy.bytes_per_second,
        "KEEPSTEP_VERIFY": _VERIFY[policy.verify],
        "KEEPSTEP_FLUSH_TIMEOUT": policy.flush_timeout_s,
        "KEEPSTEP_REPORT_URL": f"{defaults.reports_url}{reports.PATH}",
        "KEEPSTEP_REPORT_CA": defaults.reports_ca,
        "KEEPSTEP_REPORT_CA_FILE": f"{TRUST_PATH}/ca.crt",
        "KEEPSTEP_REPORT_TOKEN_FILE": f"{TOKEN_PATH}/token",
        "KEEPSTEP_METRICS_PORT": SIDECAR_METRICS_PORT,
    }


def _copied(environment: list[Body]) -> list[Body]:
    """What tells ranks apart: written out, or from a field of the pod; never a Secret's content."""
    return [dict(one) for one in environment if _COPIED.match(one.get("name", "")) and _plain(one)]


def _plain(variable: Body) -> bool:
    """`$(OTHER)` would expand to nothing in the sidecar, where OTHER is not set."""
    source = variable.get("valueFrom")
    return "fieldRef" in source if source else "$(" not in variable.get("value", "")


def confined(*, user: int, group: int) -> Body:
    """Pod Security "restricted", for everybody but root."""
    return {
        "runAsNonRoot": user != 0,
        "runAsUser": user,
        "runAsGroup": group,
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
        "seccompProfile": {"type": "RuntimeDefault"},
    }
