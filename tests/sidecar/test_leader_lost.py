"""The leader is killed while the run trains, or a firewall drops what goes between it and a member.

The member behind the firewall runs in a network namespace of its own; that needs root.
"""

from __future__ import annotations

import contextlib
import os
import random
import secrets
import shutil
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from http.client import HTTPException

import pytest
from machines import Machine, Run
from trainer import FakeTrainer

from tests.harness import eventually, free_port

_OPTIONS = ("--persist-every", "1", "--keep", "2")
_MINUTE_S = 60.0


class Firewall:
    """A network namespace behind a firewall, which lets everything through until `close`."""

    def __init__(self) -> None:
        mark = secrets.token_hex(3)  # the kernel removes the link of one before a moment later
        self._name, self._link = f"keepstep-{mark}-member", f"ks{mark}"
        number = int(mark, 16) % (1 << 14) * 4
        network = f"10.78.{number >> 8}"
        self.here, self.there = (f"{network}.{(number & 255) + host}" for host in (1, 2))
        self.inside = ("nsenter", f"--net=/run/netns/{self._name}")

    def __enter__(self) -> Firewall:
        _run("ip", "netns", "add", self._name)
        try:
            _run("ip", "link", "add", self._link, "type", "veth",
                 "peer", "name", "eth0", "netns", self._name)  # fmt: skip
            _run("ip", "address", "add", f"{self.here}/30", "dev", self._link)
            _run("ip", "link", "set", self._link, "up")
            _run("ip", "-n", self._name, "address", "add", f"{self.there}/30", "dev", "eth0")
            _run("ip", "-n", self._name, "link", "set", "eth0", "up")
            _run("ip", "-n", self._name, "link", "set", "lo", "up")
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        _run("ip", "netns", "delete", self._name)

    def close(self) -> None:
        """From now on it drops everything."""
        self._rules("-A")

    def open(self) -> None:
        self._rules("-D")

    def _rules(self, change: str) -> None:
        for chain, way in (("INPUT", "-i"), ("OUTPUT", "-o")):
            _run(*self.inside, "iptables", change, chain, way, "eth0", "-j", "DROP")


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, timeout=30)


@pytest.fixture
def firewall() -> Iterator[Firewall]:
    if os.geteuid() != 0:
        pytest.skip("needs root to make network namespaces")
    if missing := [name for name in ("ip", "nsenter", "iptables") if not shutil.which(name)]:
        pytest.skip(f"needs {', '.join(missing)}")
    with Firewall() as made:
        yield made


@pytest.fixture
def behind(run: Callable[[int], Run], firewall: Firewall) -> Run:
    """Two machines, of which the second one is behind the firewall."""
    two = run(2)
    here, there = two.machines
    here.host, there.host = firewall.here, firewall.there
    here.leader = there.leader = f"{firewall.here}:{free_port()}"
    here.port = int(here.leader.rpartition(":")[2])
    there.program = (*firewall.inside, *there.program)
    return two


def test_a_member_behind_a_firewall_keeps_training_and_both_sides_report_it(
    behind: Run, firewall: Firewall
) -> None:
    firewall.close()
    behind.start(*_OPTIONS)
    for step in range(4):
        step_id = behind.stage(step)
        assert all(rank.wait(step_id, "durable").reached for rank in behind.ranks)
    here, there = behind.machines
    _logs(here, "no connection from node ranks 1", within_s=30)
    _logs(there, "a firewall drops the connection", within_s=30)
    for machine in behind.machines:
        assert max(machine.steps()) == 3
    firewall.open()
    eventually(lambda: not there.warnings(), what="it is a member now", within_s=20)
    behind.reach(4)


def test_a_member_that_is_disconnected_for_a_minute_keeps_training_and_commits_soon_after(
    behind: Run, firewall: Firewall
) -> None:
    behind.start(*_OPTIONS)
    commit = behind.reach(0).step
    here, there = behind.machines
    firewall.close()
    began, step = time.monotonic(), 0
    while time.monotonic() - began < _MINUTE_S:
        step += 1
        step_id = behind.stage(step)
        assert all(rank.wait(step_id, "durable").reached for rank in behind.ranks), "it trains on"
        assert commit in here.steps() & there.steps(), "what was committed stays"
        if time.monotonic() - began > 56:  # silence, time to come back, a look
            assert "no connection from node ranks 1" in here.warnings()
            assert "the leader at" in there.warnings()
        time.sleep(1.0)
    firewall.open()
    began = time.monotonic()
    behind.reach(step + 1)
    assert time.monotonic() - began < 15
    for machine in behind.machines:
        eventually(lambda machine=machine: len(machine.steps()) <= 3, what="older steps go again")


@pytest.mark.soak
def test_a_leader_that_is_killed_20_times_while_the_run_trains_loses_no_commit(
    run: Callable[[int], Run],
) -> None:
    two = run(2).start(*_OPTIONS)
    here, there = two.machines
    step, seed = 0, time.time_ns()
    print("seed", seed)
    moments = random.Random(seed)
    commit, slowest = two.reach(step).step, 0.0
    for _ in range(20):
        killer = threading.Timer(moments.uniform(0.0, 1.0), here.kill)
        killer.start()
        while killer.is_alive():
            step += 1
            with contextlib.suppress(OSError, HTTPException):
                two.stage(step)
            time.sleep(0.02)
        killer.join()
        step += 1
        two.ranks[1].stage(step)  # the others train on
        assert max(here.steps() & there.steps()) >= commit
        here.start(*_OPTIONS)
        _comes_back(two.ranks[0])
        began, step = time.monotonic(), step + 1
        step_id = two.stage(step)
        assert all(rank.wait(step_id, "durable", flush=True).reached for rank in two.ranks)
        assert all(rank.wait(step_id, "committed").reached for rank in two.ranks)
        commit = step
        slowest = max(slowest, time.monotonic() - began)
        assert max(here.steps() & there.steps()) >= commit
    print("slowest commit after a return:", round(slowest, 2), "s, steps:", step)
    assert slowest < 5
    two.disconnect()
    two.come_back()
    assert two.restore().step >= commit


def _comes_back(trainer: FakeTrainer) -> None:
    """As the library does when its lease has ended: it fills nothing that it had before."""
    eventually(lambda: trainer.ended, what="the killed sidecar has ended the lease")
    trainer.connect(local_world=1)
    trainer.register()
    trainer.slot = None


def _logs(machine: Machine, text: str, *, within_s: float) -> None:
    eventually(lambda: text in machine.warnings(), what=machine.warnings, within_s=within_s)
