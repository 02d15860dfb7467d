"""One cluster for the suite, a namespace a test, and everything written down when a test fails.

Nothing here is skipped where docker, kind, kubectl or helm is missing: a suite that does not run is
a failure, not a success.
"""

from __future__ import annotations

import itertools
import re
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e import dump, jobs, runs
from tests.e2e.cluster import ROOT, Cluster
from tests.e2e.kubectl import Kubectl

_SCRATCH = ROOT / "build" / "e2e"
_REFERENCE_STEPS = 500
_NUMBERS = itertools.count(int(time.time()))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.e2e)
            if item.get_closest_marker("timeout") is None:
                item.add_marker(pytest.mark.timeout(420, func_only=True))


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    """Remember how the call went, so that the namespace knows whether to dump itself."""
    outcome = yield
    report = outcome.get_result()  # type: ignore[attr-defined]
    if report.when == "call":
        item.stash[_FAILED] = report.failed


_FAILED = pytest.StashKey[bool]()
_MEASURED = pytest.StashKey[dict[str, float]]()


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    """The cluster, with keepstep installed as the quick start does it."""
    made = Cluster(_SCRATCH)
    try:
        made.up()
        yield made
    finally:
        made.down()


def _namespace_name(test: str) -> str:
    """Readable, and never that of a namespace that is still being deleted."""
    words = re.sub(r"[^a-z0-9]+", "-", test.removeprefix("test_").lower())[:48].strip("-")
    return f"{words}-{next(_NUMBERS) % 10**6:06d}"


@pytest.fixture
def namespace(cluster: Cluster, request: pytest.FixtureRequest) -> Iterator[Kubectl]:
    """kubectl in a new namespace of this test. Its pods are gone when the test is over."""
    name = _namespace_name(request.node.name)
    kubectl = cluster.kubectl.namespaced(name)
    cluster.kubectl("create", "namespace", name)
    try:
        yield kubectl
    finally:
        if request.node.stash.get(_FAILED, True):
            dump.namespace(cluster, kubectl, _SCRATCH / "failed" / request.node.name)
        cluster.kubectl("delete", "namespace", name, "--wait=false")


@pytest.fixture(scope="session")
def measured(pytestconfig: pytest.Config) -> dict[str, float]:
    """What tests measure; shown at the end, never judged closely: this machine is shared."""
    return pytestconfig.stash.setdefault(_MEASURED, {})


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    """The table of `measured`."""
    for name, value in config.stash.get(_MEASURED, {}).items():
        terminalreporter.write_line(f"measured: {value:8.3f}  {name}")


@pytest.fixture(scope="session")
def reference(cluster: Cluster, measured: dict[str, float]) -> dict[int, str]:
    """Step -> exact loss of a run of the example that nothing interrupted, without keepstep.

    As long as the tests' jobs, since the learning rate depends on the number of steps; ended early.
    """
    name = _namespace_name("reference")
    kubectl = cluster.kubectl.namespaced(name)
    cluster.kubectl("create", "namespace", name)
    job = jobs.pytorch_job("gpt", policy=None)
    for replica in job["spec"]["pytorchReplicaSpecs"].values():
        arguments = replica["template"]["spec"]["containers"][0]["args"]
        arguments += ["--no-keepstep", "--step-seconds", "0"]
    kubectl.apply(job)
    try:
        life = runs.training_beyond(kubectl, _REFERENCE_STEPS)
        measured["pod to trainer, without keepstep"] = runs.scheduled_to_start_s(kubectl)
        measured["trainer to first step, without keepstep"] = runs.start_to_step_s(kubectl, life)
    finally:
        cluster.kubectl("delete", "namespace", name, "--wait=false")
    return dict(life.losses)
