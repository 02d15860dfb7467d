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
    (one,) = [one for one in conditions if one["type"] == "Accepted"]
    found: dict[str, str] = one
    return found


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"volumes": [{"name": "a"}]}, "exactly one"),
        ({"volumes": [{"name": "a", "hostPath": {"path": "/a/../b"}}]}, ".."),
        ({"persist": {"mode": "Fixed"}}, "every"),
        ({"memory": {"limit": "1Gi", "slots": 1}}, "slots"),
        ({"stage": {"every": 0}}, "every"),
    ],
    ids=["no source", "dots", "fixed without every", "one slot", "stage zero"],
)
def test_a_policy_that_cannot_work_is_refused_by_the_api_server(
    namespace: Kubectl, change: dict[str, object], words: str
) -> None:
    with pytest.raises(RuntimeError, match=words.replace(".", r"\.")):
        namespace.apply(jobs.policy("wrong", **change))


def test_a_policy_made_after_its_job_in_one_apply_counts(namespace: Kubectl) -> None:
    namespace.apply(jobs.pytorch_job(workers=0), jobs.policy())
    pod = namespace.eventually(lambda: namespace.get("pod", "gpt-master-0"), what="the pod")
    if pod["metadata"]["labels"].get("keepstep.dev/injected") == "true":
        runs.committed_beyond(namespace, 2)
    else:  # the pod was admitted first: then somebody says what to do
        namespace.eventually(lambda: namespace.events("NotInjected"), what="an event")


def test_a_wrong_policy_name_starts_the_pods_and_is_told(namespace: Kubectl) -> None:
    namespace.apply(jobs.pytorch_job(workers=0, policy="no-such-policy"))
    (event, *_) = namespace.eventually(lambda: namespace.events("NotInjected"), what="an event")
    assert "no-such-policy" in event["message"]
    assert runs.training_beyond(namespace, 3).first == 0


def test_a_policy_changed_or_deleted_mid_run_leaves_the_run_as_it_is(namespace: Kubectl) -> None:
    namespace.apply(jobs.policy(), jobs.pytorch_job(workers=0))
    runs.committed_beyond(namespace, 5)
    namespace.apply(jobs.policy(stage={"every": 7}))
    assert runs.status(namespace)["policy"]["generation"] == 1
    namespace("delete", "ckpolicy", "default")
    committed = runs.committed_beyond(namespace, 5)
    assert runs.committed_beyond(namespace, committed) > committed
    assert runs.training_beyond(namespace, 0).first == 0


@pytest.mark.long
def test_an_image_without_the_library_trains_and_the_run_says_so(namespace: Kubectl) -> None:
    command = ["python3", "-c", "import time\nwhile True: time.sleep(1)"]
    namespace.apply(jobs.policy(), jobs.pytorch_job(workers=0, command=command, args=[]))
    condition = runs.becomes(
        namespace, "Protected", "False", words="pip install ./lib", within_s=150
    )
    assert condition["reason"]
