"""helm upgrade, rollback and uninstall under a job that trains; then everything is deleted."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import yaml

from tests.e2e import jobs, runs
from tests.e2e.cluster import NAMESPACE, RELEASE, ROOT, Cluster
from tests.e2e.kubectl import Kubectl


def test_upgrade_rollback_and_uninstall_leave_the_job_training(
    cluster: Cluster, training: Kubectl, turn_alone: None, tmp_path: Path
) -> None:
    namespace = training
    committed = runs.committed_beyond(namespace, 5)

    fewer, of_release = _chart_without_dashboards(tmp_path), (RELEASE, "-n", NAMESPACE)
    values = "admission.replicas=3,hostPaths={/var/lib/keepstep},agent.nodeSelector.trains=yes"
    reset = ("--reset-values", "--set", values, "--wait", "--timeout", "540s")
    cluster.helm("upgrade", *of_release, str(fewer), *reset)
    cluster.helm(*_documented_upgrade())
    kept = json.loads(cluster.helm("get", "values", *of_release, "-o", "json"))
    assert kept == {
        "admission": {"replicas": 3},
        "hostPaths": ["/var/lib/keepstep"],
        "agent": {"nodeSelector": {"trains": "yes"}},
    }
    committed = runs.committed_beyond(namespace, committed)
    cluster.helm("rollback", RELEASE, "-n", NAMESPACE, "--wait", "--timeout", "540s")
    committed = runs.committed_beyond(namespace, committed)

    cluster.helm("uninstall", RELEASE, "-n", NAMESPACE, "--wait", "--timeout", "360s")
    try:
        assert namespace.list("ckrun"), "objects stay"
        alone = runs.training_beyond(namespace, committed + 20)
        assert alone.first == 0
        # a job that comes now trains without us
        namespace.apply(jobs.pytorch_job("bare", workers=0))
        runs.training_beyond(namespace, 3, pod="bare-master-0")
        namespace("delete", "pytorchjob", "bare", "--wait=false")
        cluster.kubectl("create", "namespace", "goes-away")
        gone = cluster.kubectl.namespaced("goes-away")
        gone.apply(jobs.policy(), _run_without_job())
        cluster.kubectl("delete", "namespace", "goes-away", "--wait=true", timeout_s=200)
    finally:
        cluster.install()
    owner = jobs.owner(namespace)
    jobs.all_inject(namespace, owner)
    assert runs.committed_beyond(namespace, committed) > committed
    assert runs.training_beyond(namespace, alone.last).first == 0, "the trainers never ended"


def _chart_without_dashboards(directory: Path) -> Path:
    """A chart to which the next upgrade adds a value."""
    chart = directory / "keepstep"
    shutil.copytree(ROOT / "charts" / "keepstep", chart)
    (chart / "templates" / "monitoring" / "dashboards.yaml").unlink()
    values = yaml.safe_load((chart / "values.yaml").read_text())
    del values["grafanaDashboard"]
    (chart / "values.yaml").write_text(yaml.safe_dump(values))
    schema = json.loads((chart / "values.schema.json").read_text())
    del schema["properties"]["grafanaDashboard"]
    (chart / "values.schema.json").write_text(json.dumps(schema))
    return chart


def _documented_upgrade() -> list[str]:
    """The command of docs/install.md, word for word."""
    text = (ROOT / "docs" / "install.md").read_text()
    (line,) = [line for line in text.splitlines() if line.startswith("    helm upgrade ")]
    return line.split()[1:]


def _run_without_job() -> dict[str, object]:
    return {
        "apiVersion": "keepstep.dev/v1alpha1",
        "kind": "CheckpointRun",
        "metadata": {"name": "left-behind"},
        "spec": {},
    }


def test_helm_test_passes(cluster: Cluster) -> None:
    output = cluster.helm("test", RELEASE, "-n", NAMESPACE, "--timeout", "360s")
    assert "Succeeded" in output
