"""Jobs as users write them, in the variants that the tests need, and what their logs say."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from tests.e2e.cluster import ROOT
from tests.e2e.kubectl import Kubectl, Object

EXAMPLES = ROOT / "examples" / "kubernetes"
STEPS = 120
SMALL = ("--batch", "2", "--layers", "1")
"""An image has 3.5 MB, and a step takes 6 ms of CPU instead of some 100."""

_FAULTHANDLER = {"name": "PYTHONFAULTHANDLER", "value": "1"}
"""Lets `dump.stacks` see where a trainer stands if it hangs."""


def example(name: str) -> Object:
    """A file of examples/kubernetes, as it stands there."""
    loaded: Object = yaml.safe_load((EXAMPLES / name).read_text())
    return copy.deepcopy(loaded)  # aliases become objects of their own


def policy(name: str = "default", *, host_path: bool = False, **spec: Any) -> Object:
    """The example policy under another name, with some fields of its spec changed."""
    body = example("policy-hostpath.yaml" if host_path else "policy.yaml")
    body["metadata"]["name"] = name
    body["spec"] |= spec
    return body


def frozen(script: str) -> list[str]:
    """Starts a training script after its imports, `torch._dynamo` too, which comes with the first
    optimizer anyway: to look for garbage among what they make takes a quarter of their CPU time."""
    imports = "import gc, runpy; gc.disable(); import torch._dynamo; gc.freeze(); gc.enable()"
    return ["python3", "-c", f"{imports}; runpy.run_path({script!r}, run_name='__main__')"]


def trainer(*, steps: int, **container: Any) -> Object:
    """The example's training container, of a user that Pod Security "restricted" accepts."""
    (trained,) = example("pytorchjob.yaml")["spec"]["pytorchReplicaSpecs"]["Master"]["template"][
        "spec"
    ]["containers"]
    # paced and with small batches, so that two cores have time for everything else, too
    trained["command"] = frozen("/train_gpt.py")
    trained["args"] = ["--steps", str(steps), "--log-file", "-", "--step-seconds", "0.25", *SMALL]
    trained["env"].append(_FAULTHANDLER)
    trained["securityContext"] = {
        "allowPrivilegeEscalation": False,
        "runAsNonRoot": True,
        "capabilities": {"drop": ["ALL"]},
        "seccompProfile": {"type": "RuntimeDefault"},
    }
    changed: Object = json.loads(json.dumps(trained)) | container
    return changed


def template(
    *,
    steps: int = 100_000,
    policy: str | None = "default",
    run: str = "",
    spec: Object | None = None,
    **container: Any,
) -> Object:
    """A pod template with the annotation."""
    metadata: Object = {"annotations": {"keepstep.dev/policy": policy} if policy else {}}
    if run:
        metadata["labels"] = {"keepstep.dev/run": run}
    return {
        "metadata": metadata,
        "spec": {"containers": [trainer(steps=steps, **container)], **(spec or {})},
    }


def pytorch_job(name: str = "gpt", *, workers: int = 1, **of_template: Any) -> Object:
    """A PyTorchJob of `1 + workers` replicas."""
    body = example("pytorchjob.yaml")
    body["metadata"]["name"] = name
    specs = body["spec"]["pytorchReplicaSpecs"]
    for replica in specs.values():
        replica["template"] = template(**of_template)
    if workers:
        specs["Worker"]["replicas"] = workers
    else:
        del specs["Worker"]
    return body


def sharded_job(*, node: str = "", **of_template: Any) -> tuple[Object, Object]:
    """A PyTorchJob of two pods, each of which holds one half of all tensors, and the ConfigMap with
    its script. `node`: where both run."""
    script: Object = {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": "script"},
        "data": {"sharded.py": Path(__file__).with_name("sharded.py").read_text()},
    }
    spec: Object = {"volumes": [{"name": "script", "configMap": {"name": "script"}}]}
    if node:
        spec["nodeSelector"] = {"kubernetes.io/hostname": node}
    job = pytorch_job(
        spec=spec,
        command=frozen("/script/sharded.py"),
        args=[],
        volumeMounts=[{"name": "script", "mountPath": "/script"}],
        **of_template,
    )
    return script, job


def indexed_job(name: str = "gpt", *, pods: int = 2, **of_template: Any) -> Object:
    """A plain Indexed Job whose pods find each other through a headless Service."""
    body = template(**of_template)
    environment = [
        _FAULTHANDLER,
        {"name": "OMP_NUM_THREADS", "value": "1"},
        {"name": "MASTER_ADDR", "value": f"{name}-0.{name}"},
        {"name": "MASTER_PORT", "value": "29500"},
        {"name": "WORLD_SIZE", "value": str(pods)},
        {
            "name": "RANK",
            "valueFrom": {
                "fieldRef": {
                    "fieldPath": "metadata.annotations['batch.kubernetes.io/job-completion-index']"
                }
            },
        },
    ]
    body["spec"]["containers"][0]["env"] = environment
    body["spec"] |= {"restartPolicy": "OnFailure", "subdomain": name}
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": name},
        "spec": {
            "completions": pods,
            "parallelism": pods,
            "completionMode": "Indexed",
            "backoffLimit": 20,
            "template": body,
        },
    }


def headless_service(name: str) -> Object:
    """Gives the pods of an Indexed Job their names."""
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": name},
        "spec": {
            "clusterIP": "None",
            "publishNotReadyAddresses": True,
            "selector": {"job-name": name},
        },
    }


def job_set(name: str = "gpt", *, pods: int = 2, **of_template: Any) -> Object:
    """A JobSet of a job for each pod, after one that prepares; JobSet itself makes the headless
    Service."""
    job = indexed_job(name, **of_template)
    spec = job["spec"] | {"completions": 1, "parallelism": 1}
    _variable(spec["template"], "MASTER_ADDR")["value"] = f"{name}-trainers-0-0.{name}"
    _variable(spec["template"], "WORLD_SIZE")["value"] = str(pods)
    label = "jobset.sigs.k8s.io/job-index"
    field = {"fieldPath": f"metadata.labels['{label}']"}
    _variable(spec["template"], "RANK")["valueFrom"] = {"fieldRef": field}
    spec["template"]["metadata"]["annotations"]["keepstep.dev/job-index-label"] = label
    del spec["template"]["spec"]["subdomain"]
    (trained,) = spec["template"]["spec"]["containers"]
    container = {"name": "prepare", "image": trained["image"], "command": ["true"]}
    prepares = {"template": {"spec": {"restartPolicy": "Never", "containers": [container]}}}
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": {"name": name},
        "spec": {
            "failurePolicy": {"maxRestarts": 5},
            "replicatedJobs": [
                {"name": "prepare", "replicas": 1, "template": {"spec": prepares}},
                {"name": "trainers", "replicas": pods, "template": {"spec": spec}},
            ],
        },
    }


def stateful_set(name: str = "gpt", *, pods: int = 2, **of_template: Any) -> Object:
    """A StatefulSet, whose pods find each other as an Indexed Job's do."""
    body = indexed_job(name, pods=pods, **of_template)["spec"]["template"]
    body["metadata"]["labels"] = body["metadata"].get("labels", {}) | {"job-name": name}
    body["spec"]["restartPolicy"] = "Always"
    field = {"fieldPath": "metadata.labels['apps.kubernetes.io/pod-index']"}
    _variable(body, "RANK")["valueFrom"] = {"fieldRef": field}
    return {
        "apiVersion": "apps/v1",
        "kind": "StatefulSet",
        "metadata": {"name": name},
        "spec": {
            "serviceName": name,
            "replicas": pods,
            "podManagementPolicy": "Parallel",
            "selector": {"matchLabels": {"job-name": name}},
            "template": body,
        },
    }


def _variable(of_template: Object, name: str) -> Object:
    """A variable of the training container, to be changed."""
    (found,) = [
        variable
        for variable in of_template["spec"]["containers"][0]["env"]
        if variable["name"] == name
    ]
    variable: Object = found
    return variable


def owner(kubectl: Kubectl) -> Object:
    """Reference to a suspended Job, which can own pods that nobody else makes."""
    job = indexed_job("owner")
    job["spec"]["suspend"] = True
    kubectl.apply(job)
    made = kubectl.get("job", "owner")
    assert made is not None
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "name": "owner",
        "controller": True,
        "uid": made["metadata"]["uid"],
    }


def owned_pod(name: str, owner: Object) -> Object:
    """An annotated pod as a job controller makes it."""
    body = template(spec={"restartPolicy": "Never"})
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": body["metadata"] | {"name": name, "ownerReferences": [owner]},
        "spec": body["spec"],
    }


def admitted(kubectl: Kubectl, *pods: Object) -> list[Object]:
    """What these pods would be, after all webhooks; nothing is made."""
    body = json.dumps({"apiVersion": "v1", "kind": "List", "items": pods})
    output = kubectl(
        "create", "--dry-run=server", "-o", "json", "-f", "-", input=body, timeout_s=240
    )
    decoder, found, at = json.JSONDecoder(), [], 0
    while at < len(output):
        decoded, at = decoder.raw_decode(output, at)
        found.append(decoded)
        at += len(output[at:]) - len(output[at:].lstrip())
    return found


def is_injected(kubectl: Kubectl, owner: Object, name: str = "one") -> bool:
    """Whether a pod of this owner would get its sidecar now; nothing is made."""
    (made,) = admitted(kubectl, owned_pod(name, owner))
    return _has_sidecar(made)


def injected(kubectl: Kubectl, owner: Object) -> set[bool]:
    """Whether pods of this owner would get their sidecars now, by every replica of admission: each
    review has a connection of its own. Nothing is made."""
    return set(map(_has_sidecar, admitted(kubectl, *(owned_pod(f"p{n}", owner) for n in range(8)))))


def all_inject(kubectl: Kubectl, owner: Object) -> None:
    """Wait until every replica of admission gives pods of this owner their sidecars."""
    kubectl.eventually(lambda: injected(kubectl, owner) == {True}, what="all inject")


def _has_sidecar(pod: Object) -> bool:
    labels: dict[str, str] = pod["metadata"].get("labels", {})
    return labels.get("keepstep.dev/injected") == "true"


# --- what came of it -----------------------------------------------------------------------------


@dataclass(frozen=True)
class Life:
    """One life of rank 0, from its log. `losses`: step -> exact loss; `first`: its first step.

    `restore_s`: what the restore took; `ended_at`: step -> unix seconds of its end. `began_at`: of
    the life, which tells it from others that began with the same step.
    """

    first: int
    tier: str | None
    losses: dict[int, str]
    restore_s: float
    ended_at: dict[int, float]
    began_at: float = 0.0

    @property
    def last(self) -> int:
        return max(self.losses, default=self.first - 1)


def read_life(log: str) -> Life | None:
    """The last life in a log, or None while there is none yet."""
    life: Life | None = None
    for event in _events(log):
        if "first" in event:
            restore_s = event["restore_s"] or 0.0
            life = Life(event["first"], event["tier"], {}, restore_s, {}, event["wall"])
        elif life is not None and "step" in event:
            life.losses[event["step"]] = event["loss_hex"]
            life.ended_at[event["step"]] = event["wall"]
    return life


def _events(log: str) -> Iterable[Object]:
    for line in log.splitlines():
        if line.startswith("{") and line.endswith("}"):
            yield json.loads(line)


def life(
    kubectl: Kubectl, pod: str, *, container: str = "pytorch", previous: bool = False
) -> Life | None:
    """What rank 0 has done so far in its container's present (or previous) life."""
    try:
        return read_life(kubectl.logs(pod, container, previous=previous))
    except RuntimeError:
        return None
