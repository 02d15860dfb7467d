"""The containers that injection adds, and what it adds to the training container.

The sidecar gets all settings through its environment, so its arguments can never contradict them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Final

from keepstep.compile_cache import DIRECTORY_ENV
from keepstep.wire import run_reports
from keepstep_operator.api.leader_service import leader_address
from keepstep_operator.api.pod import Placement
from keepstep_operator.api.policy import Policy
from keepstep_operator.injection.chart_defaults import InjectionDefaults
from keepstep_operator.injection.namespace_limits import NamespaceLimits
from keepstep_operator.injection.ports import Ports
from keepstep_operator.injection.remote_tiers import Settings, environment_of, make_environment
from keepstep_operator.injection.resources import SidecarCost, resources_of
from keepstep_operator.injection.volumes import (
    cache_arguments,
    compile_cache_mounts,
    host_mounts,
    memory_mounts,
    paths_of,
    prepared_paths,
    sidecar_mounts,
)
from keepstep_operator.names import (
    COMPILE_CACHE_PATH,
    GROUP_ID,
    HUGE_PATH,
    MEMORY_PATH,
    NODE_ENV,
    POD_ENV,
    RESTORE_TIMEOUT_ENV,
    SIDECAR_CONTAINER,
    SOCKET_ENV,
    SOCKET_PATH,
    TOKEN_PATH,
    TRUST_PATH,
    UI_PORT_ENV,
    UI_SECRET_ENV,
    USER_ID,
    VOLUMES_CONTAINER,
)
from keepstep_operator.object_body import Body

_PROGRAM: Final = "keepstep-sidecar"
_START: Final = "120s"
_COPIED = re.compile(
    r"^(RANK|WORLD_SIZE|LOCAL_WORLD_SIZE|NODE_RANK|JOB_COMPLETION_INDEX|PET_[A-Z0-9_]+)$"
)
"""Variables that job controllers set on the containers that they know. They do not know the
sidecar."""


def sidecar_container(
    policy: Policy,
    placement: Placement,
    defaults: InjectionDefaults,
    *,
    training: Body,
    cost: SidecarCost,
    ports: Ports,
    storage: str | None = None,
    host_network: bool = False,
    restore_from: str | None = None,
) -> Body:
    """The native sidecar: it starts first, ends last, and never keeps a finished job alive.

    It has no readiness probe, which would keep the pod out of the Service through which ranks find
    each other. It has no startup probe: the kubelet runs one once a second, while the trainer
    starts as soon as a postStart hook ends. In either case the trainer starts once the sidecar
    answers, not before. The hook never fails: if there is no answer in time, training begins all
    the same, and its restore says what is wrong.

    `training`: the container whose ranks it serves. `storage`: the ephemeral storage that it
    requests; None for no limit. `host_network`: no port is declared, since it would be a port of
    the node, and two pods would not fit on one node. `restore_from`: the value of the pod's
    annotation. If it is wrong, the sidecar says so: a pod without a sidecar would begin at step 0.
    """
    resources = resources_of(cost)
    if storage is not None:
        for kind in resources.values():
            kind["ephemeral-storage"] = storage
    declared = [] if host_network else [*_declared(ports)]
    settings = {
        **_settings(policy, placement, defaults, ports),
        "KEEPSTEP_RESTORE_FROM": _other_run(restore_from, own=placement.run_key),
    }
    return {
        "name": SIDECAR_CONTAINER,
        "image": defaults.sidecar_image,
        "imagePullPolicy": defaults.sidecar_pull_policy,
        "restartPolicy": "Always",
        "env": [
            *make_environment(settings),
            *environment_of(policy, ports),
            {"name": NODE_ENV, "valueFrom": {"fieldRef": {"fieldPath": "spec.nodeName"}}},
            {"name": POD_ENV, "valueFrom": {"fieldRef": {"fieldPath": "metadata.uid"}}},
            *_page(ports),
            *_copied(training.get("env") or []),
        ],
        **({"ports": declared} if declared else {}),
        "resources": resources,
        "volumeMounts": sidecar_mounts(policy, placement),
        "lifecycle": {
            "postStart": {
                "exec": {"command": [_PROGRAM, "probe", "--started", "--timeout", _START]}
            },
            "preStop": {"exec": {"command": [_PROGRAM, "flush"]}},
        },
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "securityContext": confined_security_context(user=USER_ID, group=GROUP_ID),
    }


def directories_container(
    policy: Policy,
    placement: Placement,
    defaults: InjectionDefaults,
    *,
    cost: SidecarCost,
    room: NamespaceLimits,
) -> Body | None:
    """The init container that makes the pod's directory below each hostPath; None if there is no
    hostPath.

    It runs as root, because a hostPath belongs to root, with only the capabilities to give a
    directory away. It ends before the sidecar starts. `cost` is the sidecar's, so its CPU adds
    nothing to the pod's.
    """
    if not policy.host_paths:
        return None
    security = confined_security_context(user=0, group=0)
    security["capabilities"]["add"] = ["CHOWN", "DAC_OVERRIDE", "FOWNER"]
    return {
        "name": VOLUMES_CONTAINER,
        "image": defaults.root_image or defaults.sidecar_image,
        "imagePullPolicy": defaults.sidecar_pull_policy,
        "command": [
            _PROGRAM,
            "prepare",
            *prepared_paths(policy, placement),
            *cache_arguments(policy, placement),
        ],
        "resources": resources_of(
            replace(cost, memory_bytes=128 << 20, spare_bytes=0, huge_bytes=0).clamp_to_limits(room)
        ),
        "volumeMounts": host_mounts(policy),
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "securityContext": security,
    }


def training_container_with_mounts(container: Body, policy: Policy, placement: Placement) -> Body:
    """The training container plus the mounts of the shared memory and of the compile caches, and
    variables for the sidecar's socket, the restore timeout and these caches. Variables of the same
    name that its owner set stay. torch's own are set by the library, which sees those of the image,
    too."""
    cache = compile_cache_mounts(policy, placement)
    mounts = [*(container.get("volumeMounts") or []), *memory_mounts(policy), *cache]
    environment = container.get("env") or []
    ours = {SOCKET_ENV: SOCKET_PATH, RESTORE_TIMEOUT_ENV: str(policy.restore_timeout_s)}
    if cache:
        ours[DIRECTORY_ENV] = COMPILE_CACHE_PATH
    theirs = {variable.get("name") for variable in environment}
    added = [{"name": name, "value": value} for name, value in ours.items() if name not in theirs]
    return {**container, "volumeMounts": mounts, "env": [*environment, *added]}


def _declared(ports: Ports) -> Iterator[Body]:
    """The ports for metrics and for other pods of the run. The chart's PodMonitor finds the one for
    metrics by its name."""
    for name, port in (("keepstep", ports.metrics), ("keepstep-peer", ports.peer)):
        if port is not None:
            yield {"name": name, "containerPort": port, "protocol": "TCP"}


def _page(ports: Ports) -> list[Body]:
    """The variables of the page. What it asks for is the pod's UID: those who may read the pod know
    it, and other users of its network do not."""
    if ports.ui is None:
        return []
    secret = {"fieldRef": {"fieldPath": "metadata.uid"}}
    return [
        {"name": UI_PORT_ENV, "value": str(ports.ui)},
        {"name": UI_SECRET_ENV, "valueFrom": secret},
    ]


def _other_run(text: str | None, *, own: str) -> str | None:
    """The setting for a step of another run. A step of the run itself must be asked for in its
    CheckpointRun, because an annotation of the pod template would hold for every restart. It
    becomes `./<step>`, which names no run, so the sidecar refuses it and says so."""
    if text is None:
        return None
    step = text.removeprefix(f"{own}/").replace("$(", "$$(")  # must not be expanded
    return step if "/" in step else f"./{step}"


def _settings(
    policy: Policy, placement: Placement, defaults: InjectionDefaults, ports: Ports
) -> Settings:
    """The variables that `keepstep-sidecar` reads."""
    return {
        "KEEPSTEP_RUN": placement.run_key,
        "KEEPSTEP_NODE_RANK": placement.node_rank,
        "KEEPSTEP_LEADER": leader_address(policy.namespace, placement.run_key, ports.peer),
        "KEEPSTEP_MEMORY_DIR": MEMORY_PATH,
        "KEEPSTEP_HUGE_PAGES_DIR": HUGE_PATH if policy.huge_bytes else None,
        "KEEPSTEP_VOLUMES": " ".join(paths_of(policy)),
        "KEEPSTEP_SLOTS": policy.slots,
        "KEEPSTEP_MEMORY_LIMIT": policy.memory_limit_bytes,
        "KEEPSTEP_STAGE_EVERY": policy.stage_every or "auto",
        "KEEPSTEP_PERSIST_EVERY": policy.persist_every,
        "KEEPSTEP_DRIVE_WRITES_PER_DAY": policy.drive_writes_per_day,
        "KEEPSTEP_KEEP": policy.keep.last,
        "KEEPSTEP_KEEP_EVERY": policy.keep.kept_interval_text,
        "KEEPSTEP_CAPACITY": policy.volume_limit_bytes,
        "KEEPSTEP_IO_THREADS": policy.io_threads,
        "KEEPSTEP_BYTES_PER_SECOND": policy.bytes_per_second,
        "KEEPSTEP_FLUSH_TIMEOUT": policy.flush_timeout_s,
        "KEEPSTEP_ON_LOSS": "restart" if policy.starts_fresh_after_loss else None,
        "KEEPSTEP_REPORT_URL": f"{defaults.reports_url}{run_reports.PATH}",
        "KEEPSTEP_REPORT_CA": defaults.reports_ca,
        "KEEPSTEP_REPORT_CA_FILE": f"{TRUST_PATH}/ca.crt",
        "KEEPSTEP_REPORT_TOKEN_FILE": f"{TOKEN_PATH}/token",
        "KEEPSTEP_METRICS_PORT": ports.metrics,
    }


def _copied(environment: list[Body]) -> list[Body]:
    """The variables that tell ranks apart, if they have a literal value or come from a field of the
    pod; never from a Secret."""
    return [
        dict(variable)
        for variable in environment
        if _COPIED.match(variable.get("name", "")) and _plain(variable)
    ]


def _plain(variable: Body) -> bool:
    """Whether the variable can be copied. `$(OTHER)` could not be expanded in the sidecar, where
    OTHER is not set."""
    source = variable.get("valueFrom")
    return "fieldRef" in source if source else "$(" not in variable.get("value", "")


def confined_security_context(*, user: int, group: int) -> Body:
    """A security context that meets Pod Security "restricted", except for root."""
    return {
        "runAsNonRoot": user != 0,
        "runAsUser": user,
        "runAsGroup": group,
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
        "seccompProfile": {"type": "RuntimeDefault"},
    }
