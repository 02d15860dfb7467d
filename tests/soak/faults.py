"""The faults: each does its harm to one team (or to the cluster), undoes what a person would, and
says which step must at least be restored."""

from __future__ import annotations

import json
import random
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass

from tests.e2e import runs, tiers
from tests.e2e.cluster import NAMESPACE, Cluster
from tests.soak.team import MASTER, PODS, Seen, Team


@dataclass(frozen=True, kw_only=True)
class Fault:
    """`do(team, before, dice)` returns the oldest step that a restore may take, with `exact` the
    very step. `share`: how often, beside the others. `ends`: the trainers end by it; else they must
    not. `alone`: it strikes all teams, so nothing else happens meanwhile.

    `within_s`: for a new step. A trainer that comes again may still find its master's name at the
    address of a pod that is gone: the connection fails after two minutes (tcp_syn_retries), and
    torch tries again.
    """

    name: str
    do: Callable[[Team, Seen, random.Random], int]
    share: float = 1.0
    ends: bool = True
    exact: bool = False
    alone: bool = False
    within_s: float = 300.0
    needs_small_drive: bool = False


def _kill(team: Team, pod: str, container: str) -> None:
    team.cluster.kill_container(team.pod(pod), container)


def _trainer(team: Team, before: Seen, dice: random.Random) -> int:
    _kill(team, dice.choice(PODS), "pytorch")
    return before.committed


def _sidecar(team: Team, before: Seen, dice: random.Random) -> int:
    _kill(team, dice.choice(PODS), tiers.SIDECAR)
    return before.committed


def _both(team: Team, before: Seen, dice: random.Random) -> int:
    pod = dice.choice(PODS)
    _kill(team, pod, tiers.SIDECAR)
    _kill(team, pod, "pytorch")
    return before.committed


def _pod(team: Team, before: Seen, dice: random.Random) -> int:
    team.kubectl("delete", "pod", dice.choice(PODS), timeout_s=180)
    return before.committed


def _pod_at_once(team: Team, before: Seen, dice: random.Random) -> int:
    team.kubectl("delete", "pod", dice.choice(PODS), "--force", "--grace-period=0", timeout_s=180)
    return before.committed


def _all_pods(team: Team, before: Seen, dice: random.Random) -> int:
    team.kubectl("delete", "pods", "-l", "keepstep.dev/injected", timeout_s=180)
    return before.committed


def _job(team: Team, before: Seen, dice: random.Random) -> int:
    tiers.ended(team.kubectl)
    team.kubectl.apply(team.job)
    return before.committed


def _rot(team: Team, before: Seen, dice: random.Random) -> int:
    """The newest shard of one rank rots; then its pod goes, and its memory with it."""
    rank = dice.randrange(2)
    found = tiers.shards(team.cluster, team.nodes[rank], team.directory(rank))
    if found:
        _rotten(team, rank, found[-1])
    _drop(team, PODS[rank])
    return min(before.committed, before.peer)


def _drive(team: Team, before: Seen, dice: random.Random) -> int:
    """A pod's directory is gone: it restores from its buddy."""
    _lose_drive(team, dice.randrange(2))
    return min(before.peer, before.committed)


def _drive_and_rot(team: Team, before: Seen, dice: random.Random) -> int:
    """A pod's directory is gone, and the newest of its copies has rotted: an older one, or the
    archive's."""
    rank = dice.randrange(2)
    other = 1 - rank
    copies = tiers.shards(team.cluster, team.nodes[other], team.directory(other), copies=True)
    if len(copies) > 1:  # without another copy its twin would serve: its own RNG would be gone
        _rotten(team, other, copies[-1])
    _lose_drive(team, rank)
    return min(before.archived, before.peer)


def _lose_drive(team: Team, rank: int) -> None:
    _drop(team, PODS[rank])
    team.cluster.on_node(team.nodes[rank], "rm", "-rf", team.directory(rank))


def _drop(team: Team, pod: str) -> None:
    """A pod goes with hardly any time to flush."""
    team.kubectl("delete", "pod", pod, "--grace-period=1", timeout_s=180)


def _rotten(team: Team, rank: int, path: str) -> None:
    try:
        tiers.rot(team.cluster, team.nodes[rank], path)
    except RuntimeError:
        return  # retired meanwhile


def _buddy(team: Team, before: Seen, dice: random.Random) -> int:
    with tiers.standing_still(team.cluster, team.kubectl, dice.choice(PODS)):
        at = team.seen().life.last
        time.sleep(dice.uniform(2, 8))  # for so long nothing comes from it
        trained = team.kubectl.eventually(
            lambda: (now := team.seen().life).last > at and now,
            within_s=30,
            what="training goes on meanwhile",
        )
        assert trained.first == before.life.first, "the trainers never ended"
    return before.committed


def _archive(team: Team, before: Seen, dice: random.Random) -> int:
    """It hangs. It is not killed: the gateway that stands for a store here was seen to answer every
    listing with 404 after that (why, was not looked into), which no real store would."""
    (pod,) = team.kubectl.list("pods", "app=s3")
    with tiers.standing_still(team.cluster, team.kubectl, pod["metadata"]["name"], "s3"):
        time.sleep(dice.uniform(3, 12))
    return before.committed


def _full(team: Team, before: Seen, dice: random.Random) -> int:
    node = team.nodes[0]
    tiers.fill(team.cluster, node, team.drive)
    try:
        at = team.seen().life.last
        time.sleep(dice.uniform(2, 10))
        runs.training_beyond(team.kubectl, at, within_s=30)
    finally:
        tiers.free(team.cluster, node, team.drive)
    return before.committed


def _back(team: Team, before: Seen, dice: random.Random) -> int:
    """Somebody wants an archived step back."""
    body = json.dumps({"spec": {"restoreFrom": str(before.archived)}})
    team.kubectl("patch", "ckrun", team.name, "--type=merge", "-p", body)
    team.kubectl.eventually(
        lambda: runs.condition(team.kubectl, "RestoreFrom")["reason"] == "Waiting",
        what="the way back is understood",
    )
    _kill(team, MASTER, "pytorch")
    return before.archived


def _operator(team: Team, before: Seen, dice: random.Random) -> int:
    """At once, and its pod with it: a container that is killed again and again would be started
    again only after minutes."""
    system = team.cluster.kubectl.namespaced(NAMESPACE)
    which = ("-l", "app.kubernetes.io/component=reconcile")
    system("delete", "pods", *which, "--force", "--grace-period=0", timeout_s=60)
    return before.committed


def _api(team: Team, before: Seen, dice: random.Random) -> int:
    cluster = team.cluster
    (node,) = [node for node in cluster.nodes() if "control-plane" in node]
    pids = cluster.on_node(node, "pgrep", "-x", "kube-apiserver|etcd").split()
    cluster.on_node(node, "kill", "-STOP", *pids)
    try:
        time.sleep(dice.uniform(5, 20))
    finally:
        cluster.on_node(node, "kill", "-CONT", *pids)
    return before.committed


def _node(team: Team, before: Seen, dice: random.Random) -> int:
    """The second node is switched off and on: memory is gone, its drive is not."""
    lost_node(team.cluster, team.nodes[1])
    return before.committed


def lost_node(cluster: Cluster, node: str) -> None:
    subprocess.run(["docker", "stop", "-t", "1", node], check=True, capture_output=True)
    time.sleep(5)
    subprocess.run(["docker", "start", node], check=True, capture_output=True)
    cluster.kubectl.eventually(
        lambda: cluster.on_node(node, "systemctl", "is-active", "kubelet"),
        within_s=60,
        what=f"{node} starts",
    )


FAULTS = (
    Fault(name="trainer killed", do=_trainer, share=3),
    Fault(name="sidecar killed", do=_sidecar, ends=False, share=3),
    Fault(name="sidecar and trainer killed", do=_both, share=2),
    Fault(name="pod deleted", do=_pod, share=2),
    Fault(name="pod deleted at once", do=_pod_at_once, share=1),
    Fault(name="all pods deleted", do=_all_pods, share=1),
    Fault(name="job deleted and made anew", do=_job, share=0.5),
    Fault(name="shard rotten, pod gone", do=_rot, share=1),
    Fault(name="drive lost", do=_drive, share=1),
    Fault(name="drive lost, newest copy rotten", do=_drive_and_rot, share=1),
    Fault(name="sidecar of a buddy stands still", do=_buddy, ends=False, share=2),
    Fault(name="archive hangs", do=_archive, ends=False, share=1.5),
    Fault(name="drive full", do=_full, ends=False, share=3, needs_small_drive=True),
    Fault(name="gone back to an archived step", do=_back, exact=True, share=1),
    Fault(name="operator killed", do=_operator, ends=False, share=1.5),
    Fault(name="API server stands still", do=_api, ends=False, share=0.3, alone=True),
    Fault(name="node switched off and on", do=_node, share=0.3, alone=True),
)


def drawn(dice: random.Random, *, small: bool) -> Fault:
    """One of those that a team can have. `small`: its drive is."""
    fit = [fault for fault in FAULTS if small or not fault.needs_small_drive]
    return dice.choices(fit, [fault.share for fault in fit])[0]
