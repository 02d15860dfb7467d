"""A kind cluster with the job kinds, our images and our chart: made, loaded, and deleted.

`KEEPSTEP_E2E_CLUSTER` names a cluster for development: made if it is not there, else used as it is,
and left when the tests end. Without it, one is made for the suite and always deleted.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

from tests import hugetlbfs
from tests.e2e.kubectl import Kubectl, Object
from tests.harness import eventually

ROOT = Path(__file__).resolve().parents[2]
VERSION = "0.1.0"
OPERATOR = f"keepstep/operator:{VERSION}"
SIDECAR = f"keepstep/sidecar:{VERSION}"
TRAINER = f"keepstep/example-gpt:{VERSION}"
RELEASE, NAMESPACE = "keepstep", "keepstep-system"
HOST_PATH = "/var/lib/keepstep"
HUGE_PAGES = 160
"""On each node: a kubelet counts them when it starts."""
ADMISSION = "app.kubernetes.io/component=admission"
CERTIFICATES = "app.kubernetes.io/component=certificates"
RECONCILE = "app.kubernetes.io/component=reconcile"

_UPSTREAM = {
    "training-operator.yaml": (
        "-k",
        "github.com/kubeflow/training-operator.git/manifests/overlays/standalone?ref=v1.9.3",
    ),
    "jobset.yaml": (
        "-f",
        "https://github.com/kubernetes-sigs/jobset/releases/download/v0.10.1/manifests.yaml",
    ),
}


def run(*command: str, timeout_s: float = 600.0, input: str | None = None) -> str:
    """Run a program; its standard output. Raises RuntimeError with what it said."""
    done = subprocess.run(
        command, cwd=ROOT, text=True, capture_output=True, timeout=timeout_s, input=input
    )
    if done.returncode:
        output = f"{done.stdout[-3000:]}{done.stderr[-3000:]}"
        raise RuntimeError(f"{' '.join(command)}: exit {done.returncode}\n{output}")
    return done.stdout


class Cluster:
    """One kind cluster. `name`: of one that another process makes and deletes."""

    def __init__(self, scratch: Path, *, name: str = "") -> None:
        given = name or os.environ.get("KEEPSTEP_E2E_CLUSTER", "")
        self.name = given or f"keepstep-e2e-{os.getpid()}"
        self.kept = bool(given)
        self.scratch = scratch
        self.kubeconfig = scratch / f"{self.name}.kubeconfig"
        self.kubectl = Kubectl(self.kubeconfig)
        self._pages = ExitStack()

    # --- life --------------------------------------------------------------------------------

    def up(self) -> None:
        """Make the cluster and everything in it, as far as it is not there."""
        missing = [name for name in ("docker", "kind", "kubectl", "helm") if not shutil.which(name)]
        if missing:
            raise RuntimeError(f"the end-to-end tests need {', '.join(missing)} on the PATH")
        self.scratch.mkdir(parents=True, exist_ok=True)
        if self.name in run("kind", "get", "clusters").split():
            run("kind", "export", "kubeconfig", "--name", self.name, *self._kubeconfig())
            return  # what runs in it is the developer's affair
        beside = ThreadPoolExecutor()
        try:
            ours, trainer = beside.submit(build_ours), beside.submit(build_trainer)
            self._create()
            job_kinds = beside.submit(self._install_job_kinds)
            self.load(ours.result())
            self._log("keepstep's images are loaded")
            release = beside.submit(self.install)
            self.load(trainer.result())
            self._log("the training image is loaded")
            job_kinds.result()
            release.result()
        finally:
            beside.shutdown(wait=False, cancel_futures=True)
        self._log("all is installed")

    def _create(self) -> None:
        try:
            hugetlbfs.require_limits()
            self._pages.enter_context(hugetlbfs.reserved(HUGE_PAGES))
        except hugetlbfs.Unavailable as error:
            self._log(f"no huge pages, so their tests will fail: {error}")
        config = Path(__file__).with_name("kind.yaml")
        run("kind", "create", "cluster", "--name", self.name, "--config", str(config),
            "--wait", "180s", *self._kubeconfig())  # fmt: skip
        self._log("the cluster is up")

    def down(self) -> None:
        """Delete the cluster, unless it was given."""
        if not self.kept and shutil.which("kind"):
            run("kind", "delete", "cluster", "--name", self.name)
            self._pages.close()

    def _kubeconfig(self) -> tuple[str, str]:
        return "--kubeconfig", str(self.kubeconfig)

    def _log(self, what: str) -> None:
        print(f"e2e {time.strftime('%H:%M:%S')} {what}", flush=True)

    # --- images ------------------------------------------------------------------------------

    def load(self, images: Sequence[str]) -> None:
        """Put images onto the nodes, what they share once; those that a node has are skipped."""
        workers = ",".join(self.workers())
        run("kind", "load", "docker-image", *images, "--name", self.name, "--nodes", workers)

    # --- what runs in it ---------------------------------------------------------------------

    def _install_job_kinds(self) -> None:
        manifests = _manifests()
        for name, upstream in _UPSTREAM.items():
            local = manifests / name if manifests else None
            source = ("-f", str(local)) if local and local.exists() else upstream
            self.kubectl("apply", "--server-side", "--force-conflicts", *source)
        for namespace in ("kubeflow", "jobset-system"):
            for deployment in self.kubectl.namespaced(namespace).list("deployments"):
                self._keep(namespace, deployment["metadata"]["name"])

    def _keep(self, namespace: str, deployment: str) -> None:
        """Move it to the node that no test takes away, and wait until it is there."""
        place = {
            "nodeSelector": {"node-role.kubernetes.io/control-plane": ""},
            "tolerations": [{"key": "node-role.kubernetes.io/control-plane", "operator": "Exists"}],
        }
        patch = json.dumps({"spec": {"template": {"spec": place}}})
        self.kubectl("-n", namespace, "patch", "deployment", deployment, "--patch", patch)
        self.kubectl("-n", namespace, "rollout", "status", f"deployment/{deployment}",
                     "--timeout=540s", timeout_s=560)  # fmt: skip

    def install(self, *values: str) -> None:
        """`helm upgrade --install` of this chart, and wait until all of it is ready. What a run
        that is gone left on nodes is cleaned after half a minute, not after a day. No agent runs
        on the control plane, which has no image of it."""
        self.helm(
            "upgrade", "--install", RELEASE, "charts/keepstep", "-n", NAMESPACE,
            "--create-namespace", "--set", f"hostPaths={{{HOST_PATH}}}",
            "--set", "agent.cleanAfterSeconds=30", "--set", "agent.nodeSelector.trains=yes",
            *values, "--wait", "--timeout", "540s",
        )  # fmt: skip

    def helm(self, *arguments: str) -> str:
        return run("helm", *arguments, *self._kubeconfig(), timeout_s=600)

    # --- nodes -------------------------------------------------------------------------------

    def nodes(self) -> list[str]:
        return run("kind", "get", "nodes", "--name", self.name).split()

    def workers(self) -> list[str]:
        return sorted(node for node in self.nodes() if "control-plane" not in node)

    def start_node(self, node: str) -> None:
        """Start a node that was stopped, and wait until all that is to run there does so again.
        Nothing where it runs."""
        if run("docker", "inspect", "-f", "{{.State.Running}}", node).strip() == "true":
            return
        begun = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        run("docker", "start", node)
        self.kubectl.eventually(
            lambda: self._runs_since(node, begun), within_s=240, what=f"{node} is back"
        )

    def _runs_since(self, node: str, begun: str) -> bool:
        """Whether a node takes pods, and containers of the cluster's own run there that began
        then or later: what is told of it until its kubelet is back was true before. Raises KeyError
        for one that does not run."""
        pods = [
            pod
            for namespace in ("kube-system", NAMESPACE)
            for pod in self.kubectl.namespaced(namespace).list("pods")
            if pod["spec"].get("nodeName") == node
            and pod["status"]["phase"] not in ("Succeeded", "Failed")
            and "deletionTimestamp" not in pod["metadata"]
        ]
        containers = [status for pod in pods for status in pod["status"]["containerStatuses"]]
        body = self.kubectl.get("node", node)
        return (
            body is not None
            and not body["spec"].get("taints")
            and all(container["ready"] for container in containers)
            and all(container["state"]["running"]["startedAt"] >= begun for container in containers)
        )

    def admission_settled(self) -> None:
        """Wait until both replicas of admission serve, and no other."""
        system = self.kubectl.namespaced(NAMESPACE)
        system("rollout", "status", "deployment/keepstep-admission", "--timeout=240s",
               timeout_s=250)  # fmt: skip
        # pods that end still serve those who keep a connection to them
        system.eventually(lambda: len(system.list("pods", ADMISSION)) == 2, what="no old pod")

    def reconciler(self) -> Object:
        """The reconciler's pod, as soon as it runs: a test before may have killed the last one."""
        system = self.kubectl.namespaced(NAMESPACE)

        def probe() -> Object | None:
            pods = [
                pod
                for pod in system.list("pods", RECONCILE)
                if pod["status"]["containerStatuses"][0]["state"].get("running")
            ]
            return pods[0] if len(pods) == 1 else None

        found: Object = system.eventually(probe, what="the reconciler runs")
        return found

    def on_node(self, node: str, *command: str) -> str:
        """Run something as root on a node."""
        return run("docker", "exec", node, *command)

    def process(
        self, pod: dict[str, object], container: str, *, within_s: float = 120.0
    ) -> tuple[str, str]:
        """The node of a pod, and the id there of a container's first process. The pod is read again
        until its status names one that runs: it lags behind one that is just made again."""
        metadata: dict[str, str] = pod["metadata"]  # type: ignore[assignment]
        kubectl = self.kubectl.namespaced(metadata["namespace"])

        def running() -> tuple[str, str] | None:
            body = kubectl.get("pod", metadata["name"]) or pod
            node, status = str(body["spec"]["nodeName"]), body["status"]  # type: ignore[index]
            tasks = self.on_node(node, "ctr", "-n", "k8s.io", "tasks", "ls").splitlines()[1:]
            pids = {
                container_id: pid
                for container_id, pid, state in map(str.split, tasks)
                if state == "RUNNING"
            }
            for key in ("containerStatuses", "initContainerStatuses"):
                for reported in status.get(key, ()):  # type: ignore[attr-defined]
                    container_id = str(reported.get("containerID", "")).removeprefix(
                        "containerd://"
                    )
                    if reported["name"] == container and container_id in pids:
                        return node, pids[container_id]
            return None

        found: tuple[str, str] = eventually(
            running, what=f"container {container} runs", within_s=within_s, every_s=0.5
        )
        return found

    def kill_container(self, pod: dict[str, object], container: str) -> None:
        """SIGKILL the first process of a pod's container, as the kernel's OOM killer would."""
        node, pid = self.process(pod, container)
        self.on_node(node, "kill", "-9", pid)


def build_ours() -> list[str]:
    """The operator's and the sidecar's images; their names."""
    images = {target: f"keepstep/{target}:{VERSION}" for target in ("operator", "sidecar")}
    for target, image in images.items():
        run("docker", "build", "--target", target, "-t", image, ".", timeout_s=900)
    return [*images.values()]


def build_trainer() -> list[str]:
    """The training image; its name."""
    base = os.environ.get("KEEPSTEP_E2E_TORCH_IMAGE") or _image_with_wheels()
    build = ("--build-arg", f"BUILD_IMAGE={base}") if base else ()
    file, image = "examples/kubernetes/Dockerfile", f"keepstep/example-gpt:{VERSION}"
    run("docker", "build", "-f", file, "-t", image, *build, ".", timeout_s=1800)
    return [image]


def _manifests() -> Path | None:
    """Upstream manifests that lie beside an offline `kind`; elsewhere they come from upstream."""
    kind = shutil.which("kind")
    place = Path(kind).resolve().parent.parent / "manifests" if kind else None
    return place if place and place.is_dir() else None


def _image_with_wheels() -> str:
    """An image of this machine with a small build of torch, where there is one."""
    image = "keepstep.test/python-wheels:3.11"
    found = subprocess.run(["docker", "image", "inspect", image], capture_output=True)
    return image if found.returncode == 0 else ""
