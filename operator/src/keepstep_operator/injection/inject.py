"""Pod -> Pod. Raises instead of guessing; the caller then lets the pod pass without a sidecar."""

from __future__ import annotations

from collections.abc import Iterator
from copy import deepcopy
from dataclasses import dataclass, replace
from pathlib import PurePosixPath
from typing import Final

from keepstep_operator.api.pod import (
    Injected,
    Placement,
    Pod,
    PodRefusedError,
    asked_node_rank,
    find_root_job,
    injected_of,
    parse_pod,
    parse_run_and_node_rank,
    parse_run_placement,
    training_container,
)
from keepstep_operator.api.policy import Accounting, Policy, require_allowed
from keepstep_operator.injection.affinity import NearNode, affinity_preferring
from keepstep_operator.injection.chart_defaults import InjectionDefaults
from keepstep_operator.injection.containers import (
    directories_container,
    sidecar_container,
    training_container_with_mounts,
)
from keepstep_operator.injection.namespace_limits import NamespaceLimits
from keepstep_operator.injection.ports import Ports, ports_of
from keepstep_operator.injection.resources import (
    SidecarCost,
    carve_resources,
    cost_of,
    storage_limit,
)
from keepstep_operator.injection.volumes import file_system_group, memory_mounts, pod_volumes
from keepstep_operator.names import (
    COMPILE_CACHE_PATH,
    GROUP_ID,
    INJECTED,
    INJECTED_LABEL,
    NODE_RANK_LABEL,
    POD_SECURITY_LABEL,
    RUN_KEY_LABEL,
    SIDECAR_CONTAINER,
    SOCKET_ENV,
    SOCKET_PATH,
    STATUS_ANNOTATION,
    VOLUMES_CONTAINER,
)
from keepstep_operator.object_body import Body

NO_RULES: Final = NamespaceLimits()
_MAKE_ROOM: Final = (
    "The pod starts without keepstep, as the API server might refuse it, or another pod of its job,"
    " with the sidecar. Use accounting: CarveOut with a training container that is large enough, or"
    " raise a limit, or lower memory.limit or sidecar.resources of the policy"
)
_KUBERNETES_GRACE_S: Final = 30
_LONGEST_GRACE_S: Final = 120
_AFTER_FLUSH_S: Final = 10


def inject(
    pod: Body,
    policy: Policy,
    defaults: InjectionDefaults,
    *,
    near: tuple[NearNode, ...] = (),
    room: NamespaceLimits = NO_RULES,
) -> Body:
    """The pod with the sidecar and all that this needs; unchanged if it has the sidecar already.

    `pod` is not modified. `near`: nodes that hold shards for it. `room`: what its namespace's
    LimitRanges and quotas leave. Raises PodRefusedError, or PolicyError if the policy uses a
    hostPath that `defaults` do not allow.
    """
    parsed = parse_pod(pod, namespace=policy.namespace)
    if is_injected(parsed):
        return pod
    require_allowed(policy, defaults.host_paths)
    _require_free(pod, parsed, policy)
    if policy.host_paths and room.forbids_host_path(pod.get("spec") or {}):
        raise PodRefusedError(
            "PodSecurity",
            f"policy {policy.name} has a hostPath, and the namespace enforces Pod Security"
            f" {room.pod_security}, which admits none: use emptyDir or ephemeral, or have the"
            f" namespace labelled {POD_SECURITY_LABEL}: privileged",
        )
    spec, container = pod["spec"], training_container(parsed).name
    ports = ports_of(policy, spec)
    objections: list[str] = []
    for asked in _accountings(policy):
        warnings = [
            f"accounting CarveOut is not possible, Add is used: {objection}"
            for objection in objections
        ]
        made = _Injection(
            pod=parsed,
            policy=asked,
            defaults=defaults,
            place=parse_run_and_node_rank(parsed),
            container=container,
            cost=cost_of(asked, spec, _named(spec["containers"], container), room),
            ports=ports,
            near=near,
            room=room,
            warnings=[*warnings, *ports.warnings],
        )
        if not (objection := made.objection(spec)):
            result = made.apply(pod)
            if not (objection := room.objection(spec, result["spec"])):
                return result
        objections.append(objection)
    raise PodRefusedError("NoRoom", f"{'; '.join(objections)}. {_MAKE_ROOM}")


def _accountings(policy: Policy) -> Iterator[Policy]:
    """The policy as it is; then, where that does not fit, with what remains to be tried."""
    yield policy
    if policy.accounting is Accounting.CARVE_OUT:
        yield replace(policy, accounting=Accounting.ADD)


def is_injected(pod: Pod) -> bool:
    """Whether an earlier call of admission has already injected this pod (webhooks are reinvoked).

    A template that was copied from a pod of another job does not count: its labels name another
    run.
    """
    injected = injected_of(pod)
    if not pod.has_sidecar or injected is None or injected.reason:
        return False
    try:
        return parse_run_placement(pod) == parse_run_and_node_rank(pod)
    except PodRefusedError:
        return False


@dataclass(frozen=True, kw_only=True)
class _Injection:
    """What was decided about one pod. `apply` adds to `warnings`."""

    pod: Pod
    policy: Policy
    defaults: InjectionDefaults
    place: Placement
    container: str
    cost: SidecarCost
    ports: Ports
    near: tuple[NearNode, ...]
    room: NamespaceLimits
    warnings: list[str]

    def objection(self, spec: Body) -> str:
        """Why the training container cannot give what the sidecar needs; ''."""
        if self.policy.accounting is not Accounting.CARVE_OUT:
            return ""
        return carve_resources(
            _named(spec["containers"], self.container).get("resources") or {}, self.cost
        )[1]

    def apply(self, body: Body) -> Body:
        result = deepcopy(body)
        spec = result.setdefault("spec", {})
        for name in ("shareProcessNamespace", "hostPID"):
            if spec.get(name):
                self._warn(
                    f"the pod sets {name}, so its containers see the sidecar's processes: what the"
                    " sidecar may read (its token, its volumes, the archive's credentials) a"
                    " privileged trainer may, too"
                )
        self._warn(_without_names(spec))
        training = _named(spec["containers"], self.container)
        spec["initContainers"] = [*self._first(spec, training), *(spec.get("initContainers") or [])]
        spec["containers"] = [
            self._training(container) if container is training else container
            for container in spec["containers"]
        ]
        spec["securityContext"] = self._security(spec)
        spec["volumes"] = [*(spec.get("volumes") or []), *pod_volumes(self.policy)]
        spec["terminationGracePeriodSeconds"] = self._grace_s(spec)
        apart = self.place.run_key if self.policy.peers is not None else ""
        if (affinity := affinity_preferring(spec, self.near, apart=apart)) is not None:
            spec["affinity"] = affinity
        result["metadata"] = self._metadata(result.get("metadata") or {})
        return result

    def _first(self, spec: Body, training: Body) -> list[Body]:
        """The new init containers, in order: first the one that makes directories, then the
        sidecar, which writes there."""
        storage, warning = storage_limit(self.policy, spec["containers"])
        self._warn(warning)
        prepared = directories_container(
            self.policy, self.place, self.defaults, cost=self.cost, room=self.room
        )
        added = sidecar_container(
            self.policy,
            self.place,
            self.defaults,
            training=training,
            cost=self.cost,
            ports=self.ports,
            storage=storage,
            host_network=bool(spec.get("hostNetwork")),
            restore_from=self.pod.restore_from,
        )
        return [added] if prepared is None else [prepared, added]

    def _training(self, container: Body) -> Body:
        for variable in container.get("env") or []:
            if variable.get("name") == SOCKET_ENV and variable.get("value") != SOCKET_PATH:
                self._warn(f"the pod sets {SOCKET_ENV} itself, so its trainer will not find us")
        result = training_container_with_mounts(container, self.policy, self.place)
        if self.policy.accounting is Accounting.CARVE_OUT:
            left, _ = carve_resources(container.get("resources") or {}, self.cost)
            return {**result, "resources": left}
        return result

    def _security(self, spec: Body) -> Body:
        """The pod's security context. One supplemental group lets a trainer of any user fill slots
        (modes 2770 and 0660)."""
        security = dict(spec.get("securityContext") or {})
        groups = security.get("supplementalGroups") or []
        if GROUP_ID not in groups:
            security["supplementalGroups"] = [*groups, GROUP_ID]
        if (group := file_system_group(self.policy, spec)) is not None:
            security["fsGroup"] = group
        return security

    def _grace_s(self, spec: Body) -> int:
        """The grace period in seconds: raised to what a flush needs, never lowered."""
        own = spec.get("terminationGracePeriodSeconds")
        needed = min(self.policy.flush_timeout_s + _AFTER_FLUSH_S, _LONGEST_GRACE_S)
        return max(_KUBERNETES_GRACE_S if own is None else own, needed)

    def _metadata(self, metadata: Body) -> Body:
        labels = {
            INJECTED_LABEL: INJECTED,
            RUN_KEY_LABEL: self.place.run_key,
            NODE_RANK_LABEL: str(self.place.node_rank),
        }
        annotations = {STATUS_ANNOTATION: self._status().render()}
        return {
            **metadata,
            "labels": {**(metadata.get("labels") or {}), **labels},
            "annotations": {**(metadata.get("annotations") or {}), **annotations},
        }

    def _status(self) -> Injected:
        return Injected(
            policy=self.policy.name,
            generation=self.policy.generation,
            image=self.defaults.sidecar_image,
            version=self.defaults.version,
            container=self.container,
            job=find_root_job(self.pod),
            warnings=tuple(self.warnings),
            ranked=asked_node_rank(self.pod) is not None,
        )

    def _warn(self, warning: str) -> None:
        if warning:
            self.warnings.append(warning)


def _without_names(spec: Body) -> str:
    """A warning if the pod's DNS does not know the cluster's Services; ''."""
    policy = spec.get("dnsPolicy") or "ClusterFirst"
    if policy != "Default" and not (spec.get("hostNetwork") and policy == "ClusterFirst"):
        return ""
    where = " on the host's network" if spec.get("hostNetwork") else ""
    expected = "ClusterFirstWithHostNet" if spec.get("hostNetwork") else "ClusterFirst"
    return (
        f"dnsPolicy {policy}{where} knows no Services of the cluster, so the sidecar cannot report:"
        " nothing is committed across pods, and the run's status stays Unknown. Set dnsPolicy:"
        f" {expected} in the pod template"
    )


def _require_free(body: Body, pod: Pod, policy: Policy) -> None:
    """Raises PodRefusedError if the pod uses a name or path of ours, or cannot have the sidecar."""
    spec = body.get("spec") or {}
    if (spec.get("os") or {}).get("name") == "windows":
        raise PodRefusedError(
            "Windows", "keepstep needs Linux; remove the annotation from this pod"
        )
    if spec.get("resources"):
        raise PodRefusedError(
            "PodResources",
            "the pod sets spec.resources, which the sidecar would not fit into; set resources on"
            " its containers instead",
        )
    containers = {*(container.name for container in pod.containers), *pod.init_containers}
    volumes = {volume.get("name") for volume in spec.get("volumes") or []}
    added = {volume["name"] for volume in pod_volumes(policy)}
    if taken := sorted({SIDECAR_CONTAINER, VOLUMES_CONTAINER} & containers) + sorted(
        added & volumes
    ):
        raise PodRefusedError(
            "Conflict",
            f"the pod template has a container or volume named {taken[0]}, which keepstep adds;"
            " remove it (was it copied from an injected pod?)",
        )
    for volume in spec.get("volumes") or [] if policy.huge_bytes else []:
        if (volume.get("emptyDir") or {}).get("medium") == "HugePages":
            raise PodRefusedError(
                "Conflict",
                f"volume {volume.get('name')} is of huge pages without a size, which kubelets mount"
                " only in a pod that asks for one size; write medium: HugePages-2Mi, or another",
            )
    for container in (*(spec.get("containers") or []), *(spec.get("initContainers") or [])):
        for mount in container.get("volumeMounts") or []:
            if mount.get("name") in added:
                raise PodRefusedError(
                    "Conflict",
                    f"container {container.get('name')} mounts volume {mount['name']}, which is the"
                    " sidecar's own; remove that mount",
                )
    training = _named(spec.get("containers") or [], training_container(pod).name)
    ours = [mount["mountPath"] for mount in memory_mounts(policy)]
    ours += [COMPILE_CACHE_PATH] if policy.compile_cache_volume else []
    for mount in training.get("volumeMounts") or []:
        if any(map(PurePosixPath(mount.get("mountPath", "/")).is_relative_to, ours)):
            raise PodRefusedError(
                "Conflict",
                f"container {training['name']} mounts {mount['mountPath']}, where keepstep"
                " mounts its own; mount it elsewhere",
            )


def _named(containers: list[Body], name: str) -> Body:
    return next(container for container in containers if container.get("name") == name)
