"""Everything that explains a failure, written into a directory: objects, events, logs."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.cluster import NAMESPACE, Cluster
from tests.e2e.kubectl import Kubectl, Object

_KINDS = "pods,jobs,pytorchjobs,jobsets,ckpolicy,ckrun,ckpt,events"


def namespace(cluster: Cluster, kubectl: Kubectl, place: Path) -> None:
    """Best effort: a cluster that is broken is dumped as far as it answers."""
    place.mkdir(parents=True, exist_ok=True)
    _write(kubectl, place / "objects.yaml", "get", _KINDS, "-o", "yaml")
    _write(kubectl, place / "overview.txt", "get", _KINDS, "-o", "wide")
    _logs(kubectl, place)
    system = cluster.kubectl.namespaced(NAMESPACE)
    _write(system, place / "system.txt", "get", "pods,events", "-o", "wide")
    _logs(system, place)


def summary(kubectl: Kubectl) -> str:
    """What may be all that is left of a failure where nobody keeps files: pods, runs, the ends of
    all logs. Best effort."""
    sections = [kubectl.attempt("get", "pods", "-o", "wide", timeout_s=60).stdout]
    for run in _listed(kubectl, "ckrun"):
        status = run.get("status", {})
        sections += [
            f"{run['metadata']['name']}: epoch {status.get('epoch')}, {status.get('watermarks')}",
            *(
                f"  {condition['type']}={condition['status']} {condition['reason']}:"
                f" {condition['message']}"
                for condition in status.get("conditions", ())
            ),
        ]
    for pod in _listed(kubectl, "pods"):
        name = pod["metadata"]["name"]
        for previous in ((), ("--previous",)):
            command = ("logs", name, "--all-containers", "--prefix", "--tail=12", *previous)
            lines = kubectl.attempt(*command, timeout_s=60).stdout.splitlines()
            sections += [f"{'before: ' if previous else ''}{line[:300]}" for line in lines]
    return "\n".join(sections)


def stacks(cluster: Cluster, kubectl: Kubectl, place: Path) -> None:
    """Where every trainer stands: the connections of its container, and of each process of Python
    there what the kernel knows of its threads. On their standard error, Python's stacks (they must
    run with PYTHONFAULTHANDLER). It ends all of them but the first of each container. Best effort.
    """
    place.mkdir(parents=True, exist_ok=True)
    try:
        pods = kubectl.list("pods", "keepstep.dev/injected")
    except RuntimeError as error:
        (place / "stacks.txt").write_text(str(error))
        return
    for pod in pods:
        name = pod["metadata"]["name"]
        try:
            output = _stacks(cluster, *cluster.process(pod, "pytorch", within_s=2.0))
        except (RuntimeError, KeyError, pytest.fail.Exception) as error:
            output = f"no process of the trainer: {error}"
        (place / f"{name}.stacks.txt").write_text(output)


def _stacks(cluster: Cluster, node: str, first: str) -> str:
    """Of a container's first process, and of those that it started: a warm trainer is a child."""
    found = cluster.on_node(node, "sh", "-c", _PYTHONS.format(pid=first)).split()
    pids = [first, *(pid for pid in found if pid != first)]
    sections = [cluster.on_node(node, "sh", "-c", _CONNECTIONS.format(pid=first))]
    sections += [cluster.on_node(node, "sh", "-c", _THREADS.format(pid=pid)) for pid in pids]
    for pid in pids:
        # the first of a container lives on; it goes first, before it notices that others end
        cluster.on_node(node, "sh", "-c", f"kill -ABRT {pid} || true")
    return "\n".join(sections)


_PYTHONS = """cd /proc; space=$(readlink {pid}/ns/pid); for one in [0-9]*; do
  case "$(readlink $one/ns/pid) $(readlink $one/exe)" in "$space "*python*) echo $one;; esac
done"""

_CONNECTIONS = "cat /proc/{pid}/net/tcp /proc/{pid}/net/tcp6"

_THREADS = """cd /proc/{pid} || exit 0; echo "process {pid}: $(tr '\\0' ' ' <cmdline)"
grep -E 'State|PPid|Threads|SigPnd|ShdPnd|SigCgt' status
for task in task/*; do
  echo "$task $(cat $task/comm) $(cat $task/wchan) $(cat $task/syscall)"; cat $task/stack
done 2>&1"""


def _listed(kubectl: Kubectl, kind: str) -> list[Object]:
    try:
        return kubectl.list(kind)
    except RuntimeError:
        return []


def _logs(kubectl: Kubectl, place: Path) -> None:
    try:
        pods = kubectl.list("pods")
    except RuntimeError as error:
        (place / f"{kubectl.namespace}-pods.txt").write_text(str(error))
        return
    for pod in pods:
        name = pod["metadata"]["name"]
        common = ("logs", name, "--all-containers", "--prefix", "--timestamps")
        _write(kubectl, place / f"{name}.log", *common, "--tail=2000")
        _write(kubectl, place / f"{name}.previous.log", *common, "--previous", "--tail=500")


def _write(kubectl: Kubectl, path: Path, *arguments: str) -> None:
    done = kubectl.attempt(*arguments, timeout_s=60)
    path.write_text(done.stdout + (f"\n--- {done.stderr}" if done.returncode else ""))
