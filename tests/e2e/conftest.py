"""One cluster for the suite, a namespace a test, and everything written down when a test fails.

With workers (three, unless `E2E_JOBS=0 make e2e`) tests run side by side:
most of their time they wait. Those that take away what all need (the operator, the webhook, the API
server, a node) ask for `turn_alone` or `cluster_alone`: they come last, and nothing runs beside
them. The process that has the workers makes the cluster and deletes it, whatever becomes of them.

Nothing here is skipped where docker, kind, kubectl or helm is missing: a suite that does not run is
a failure, not a success.
"""

from __future__ import annotations

import fcntl
import json
import re
import secrets
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

import pytest

from tests.e2e import dump, jobs, runs
from tests.e2e.cluster import ROOT, Cluster
from tests.e2e.kubectl import Kubectl

_SCRATCH = ROOT / "build" / "e2e"
_REFERENCE_STEPS = 800

_CLUSTER = pytest.StashKey[Cluster]()
_BROKEN = pytest.StashKey[str]()
_FAILED = pytest.StashKey[bool]()
_MEASURED = pytest.StashKey[dict[str, float]]()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.e2e)
            if item.get_closest_marker("timeout") is None:
                item.add_marker(pytest.mark.timeout(900, func_only=True))
    items.sort(key=_rank)


def _rank(item: pytest.Item) -> int:
    """Who waits for minutes comes first; who needs others to be away after them, at first those
    whose jobs start meanwhile."""
    asks = set(getattr(item, "fixturenames", ()))
    if "cluster_alone" in asks:
        return 3
    if "turn_alone" in asks:
        return 1 if asks & {"training", "shelf"} else 2
    return -1 if item.get_closest_marker("long") else 0


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    """Remember how the call went, so that the namespace knows whether to dump itself."""
    outcome = yield
    report = outcome.get_result()  # type: ignore[attr-defined]
    if report.when == "call":
        item.stash[_FAILED] = report.failed
    namespace = getattr(item, "funcargs", {}).get("namespace")
    if report.when != "teardown" and report.failed and namespace is not None:
        report.sections.append(("its namespace", dump.summary(namespace)))


# --- the cluster ---------------------------------------------------------------------------------


@pytest.hookimpl(tryfirst=True)
def pytest_sessionstart(session: pytest.Session) -> None:
    """Before there are workers: their cluster. Without it each of their tests fails, with why."""
    config = session.config
    if _is_worker(config) or config.getoption("dist", "no") == "no" or config.option.collectonly:
        return
    made = config.stash[_CLUSTER] = Cluster(_SCRATCH)
    try:
        made.up()
    except (RuntimeError, subprocess.SubprocessError) as error:
        config.stash[_BROKEN] = str(error)


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Tells a worker of it."""
    node.workerinput["e2e_cluster"] = node.config.stash[_CLUSTER].name
    node.workerinput["e2e_broken"] = node.config.stash.get(_BROKEN, "")


def pytest_unconfigure(config: pytest.Config) -> None:
    """After the workers, also after those that were interrupted."""
    if (made := config.stash.get(_CLUSTER, None)) is not None:
        made.down()


def _is_worker(config: pytest.Config) -> bool:
    return hasattr(config, "workerinput")


@pytest.fixture(scope="session")
def cluster(pytestconfig: pytest.Config) -> Iterator[Cluster]:
    """The cluster, with keepstep installed as the quick start does it."""
    if _is_worker(pytestconfig):
        given: dict[str, str] = pytestconfig.workerinput  # type: ignore[attr-defined]
        if given["e2e_broken"]:
            pytest.fail(given["e2e_broken"], pytrace=False)
        yield Cluster(_SCRATCH, name=given["e2e_cluster"])
        return
    made = Cluster(_SCRATCH)
    try:
        made.up()
        yield made
    finally:
        made.down()


# --- side by side --------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def shared(pytestconfig: pytest.Config, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory of this test run that all of its workers see."""
    own = tmp_path_factory.getbasetemp()
    return own.parent if _is_worker(pytestconfig) else own


@pytest.fixture(autouse=True)
def turn(request: pytest.FixtureRequest, shared: Path) -> Iterator[TextIO]:
    """Two locks, which all share but those who ask to be alone: one as long as a test has anything
    in the cluster, one (which is given) while it looks at anything."""
    alone = "cluster_alone" in request.fixturenames
    with (
        _locked(shared / "cluster.lock", fcntl.LOCK_EX if alone else fcntl.LOCK_SH),
        _locked(shared / "turn.lock", fcntl.LOCK_SH) as turn,
    ):
        yield turn


@pytest.fixture
def turn_alone(turn: TextIO) -> Iterator[None]:
    """No other test looks at anything from here on: what theirs take away harms nobody.

    Ask for it after `training`: jobs of several such tests start side by side, and go on while one
    of these tests has its turn. Before it where losses are compared or steps archived: neither is
    endless.
    """
    fcntl.flock(turn, fcntl.LOCK_EX)  # which lets go of the shared one first
    yield
    fcntl.flock(turn, fcntl.LOCK_UN)


@pytest.fixture
def cluster_alone(turn: TextIO) -> None:
    """No other test has anything in the cluster."""


@contextmanager
def _locked(path: Path, kind: int) -> Iterator[TextIO]:
    with path.open("w") as file:
        fcntl.flock(file, kind)
        yield file


def _namespace_name(test: str) -> str:
    """Readable; never one that is still being deleted, nor one that another worker makes."""
    words = re.sub(r"[^a-z0-9]+", "-", test.removeprefix("test_").lower())[:48].strip("-")
    return f"{words}-{secrets.token_hex(4)}"


@pytest.fixture
def new_namespace(
    cluster: Cluster, request: pytest.FixtureRequest
) -> Iterator[Callable[[str], Kubectl]]:
    """kubectl in a new namespace of this test, named after it and the word that is given. Their
    pods are gone when the test is over."""
    made: list[Kubectl] = []

    def make(word: str) -> Kubectl:
        name = _namespace_name(f"{word}-{request.node.name}" if word else request.node.name)
        cluster.kubectl("create", "namespace", name)
        made.append(cluster.kubectl.namespaced(name))
        return made[-1]

    try:
        yield make
    finally:
        for kubectl in made:
            if request.node.stash.get(_FAILED, True):
                place = _SCRATCH / "failed" / request.node.name
                place = place if len(made) == 1 else place / str(kubectl.namespace)
                dump.stacks(cluster, kubectl, place)
                dump.namespace(cluster, kubectl, place)
            _delete(cluster, str(kubectl.namespace))


@pytest.fixture
def namespace(new_namespace: Callable[[str], Kubectl]) -> Kubectl:
    """kubectl in the one namespace of this test."""
    return new_namespace("")


def _delete(cluster: Cluster, namespace: str) -> None:
    """Also while the API server is away for a moment, as some tests make it."""

    def done() -> bool:
        cluster.kubectl("delete", "namespace", namespace, "--wait=false", "--ignore-not-found")
        return True

    cluster.kubectl.eventually(done, what=f"{namespace} is deleted")


@pytest.fixture
def training(namespace: Kubectl) -> Kubectl:
    """The namespace, with a job of two replicas of which some steps are committed."""
    namespace.apply(jobs.policy(), jobs.pytorch_job())
    runs.committed_beyond(namespace, 5)
    return namespace


# --- what is measured ----------------------------------------------------------------------------


@pytest.fixture(scope="session")
def measured(pytestconfig: pytest.Config) -> dict[str, float]:
    """What tests measure; shown at the end, never judged closely: this machine is shared."""
    return pytestconfig.stash.setdefault(_MEASURED, {})


def pytest_sessionfinish(session: pytest.Session) -> None:
    """A worker hands on what it measured."""
    if _is_worker(session.config):
        output: dict[str, Any] = session.config.workeroutput  # type: ignore[attr-defined]
        output["e2e_measured"] = session.config.stash.get(_MEASURED, {})


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """What a worker measured, unless it died."""
    output = getattr(node, "workeroutput", {})
    node.config.stash.setdefault(_MEASURED, {}).update(output.get("e2e_measured", {}))


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    """The table of `measured`."""
    for name, value in config.stash.get(_MEASURED, {}).items():
        terminalreporter.write_line(f"measured: {value:8.3f}  {name}")


@pytest.fixture(scope="session")
def reference(cluster: Cluster, shared: Path, measured: dict[str, float]) -> dict[int, str]:
    """Step -> exact loss of a run of the example that nothing interrupted, without keepstep.

    As long as the tests' jobs, since the learning rate depends on the number of steps; ended early.
    """
    found = shared / "reference.json"
    with _locked(shared / "reference.lock", fcntl.LOCK_EX):
        if not found.exists():
            with _locked(shared / "turn.lock", fcntl.LOCK_SH):
                found.write_text(json.dumps(_reference(cluster, measured)))
        losses: dict[str, str] = json.loads(found.read_text())
    return {int(step): loss for step, loss in losses.items()}


def _reference(cluster: Cluster, measured: dict[str, float]) -> dict[int, str]:
    name = _namespace_name("reference")
    kubectl = cluster.kubectl.namespaced(name)
    cluster.kubectl("create", "namespace", name)
    job = jobs.pytorch_job("gpt", policy=None)
    for replica in job["spec"]["pytorchReplicaSpecs"].values():
        arguments = replica["template"]["spec"]["containers"][0]["args"]
        arguments += ["--no-keepstep", "--step-seconds", "0"]
    try:
        kubectl.apply(job)
        life = runs.training_beyond(kubectl, _REFERENCE_STEPS)
        measured["pod to trainer, without keepstep"] = runs.scheduled_to_start_s(kubectl)
        measured["trainer to first step, without keepstep"] = runs.start_to_step_s(kubectl, life)
    finally:
        _delete(cluster, name)
    return dict(life.losses)
