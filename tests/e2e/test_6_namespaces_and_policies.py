"""What users get wrong, and what a namespace forbids."""

from __future__ import annotations

import pytest

from tests.e2e import jobs, runs
from tests.e2e.cluster import Cluster
from tests.e2e.kubectl import Kubectl


def test_an_empty_dir_policy_satisfies_the_strictest_pod_security(
    cluster: Cluster, namespace: Kubectl
) -> None:
    cluster.kubectl(
        "label", "namespace", namespace.namespace, "pod-security.kubernetes.io/enforce=restricted"
    )
    namespace.apply(jobs.policy())
    (made,) = jobs.admitted(namespace, jobs.owned_pod("alone", jobs.owner(namespace)))
    assert made["metadata"]["labels"]["keepstep.dev/injected"] == "true"


def test_a_host_path_that_the_chart_does_not_allow_is_refused_with_a_reason(
    namespace: Kubectl,
) -> None:
    policy = jobs.policy("elsewhere", host_path=True)
    policy["spec"]["volumes"][0]["hostPath"]["path"] = "/etc/keepstep"
    namespace.apply(policy)
    accepted = namespace.eventually(
        lambda: _accepted(namespace, "elsewhere"), what="the policy is judged"
    )
    assert accepted["status"] == "False"
    assert accepted["reason"] == "HostPathNotAllowed"
    assert "/etc/keepstep" in accepted["message"]
    namespace.apply(jobs.pytorch_job(workers=0, policy="elsewhere"))
    namespace.eventually(lambda: namespace.events("NotInjected"), what="an event")
    life = runs.training_beyond(namespace, 3)
    assert life.first == 0, "training goes on"


def _accepted(kubectl: Kubectl, name: str) -> dict[str, str]:
    conditions = (kubectl.get("ckpolicy", name) or {})["status"]["conditions"]
    (condition,) = [condition for condition in conditions if condition["type"] == "Accepted"]
    found: dict[str, str] = condition
    return found


def test_pods_with_an_unknown_policy_start_uninjected_with_an_event(namespace: Kubectl) -> None:
    namespace.apply(jobs.pytorch_job(workers=0, policy="no-such-policy"))
    (event, *_) = namespace.eventually(lambda: namespace.events("NotInjected"), what="an event")
    assert "no-such-policy" in event["message"]
    assert runs.training_beyond(namespace, 3).first == 0


@pytest.mark.long
def test_a_training_image_without_the_library_starts_and_the_run_reports_it(
    namespace: Kubectl,
) -> None:
    command = ["python3", "-c", "import time\nwhile True: time.sleep(1)"]
    namespace.apply(jobs.policy(), jobs.pytorch_job(workers=0, command=command, args=[]))
    condition = runs.becomes(
        namespace, "Protected", "False", words="pip install ./lib", within_s=150
    )
    assert condition["reason"]
