"""Which run a pod belongs to, which place in it, which container trains."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from keepstep_operator.api.pod import (
    PodRefusedError,
    find_root_job,
    injected_of,
    is_queued_by_template,
    node_rank,
    parse_pod,
    parse_run_and_node_rank,
    parse_run_placement,
    run_key,
    training_container,
)
from keepstep_operator.injection import inject
from tests.operator.injection.pods import (
    ALL,
    DEFAULTS,
    JOB_UID,
    bare_pod,
    indexed_job,
    job_set,
    owner,
    policy,
    pytorch_job,
    ray_worker,
    train_job,
)

Body = dict[str, Any]


@pytest.mark.parametrize(
    ("body", "key", "rank", "container"),
    [
        (pytorch_job("master", rank=0), "gpt-3f6a1f0e", 0, "pytorch"),
        (pytorch_job(rank=7), "gpt-3f6a1f0e", 7, "pytorch"),
        (indexed_job(index=3), "bert-3f6a1f0e", 3, "train"),
        (job_set(job=2, index=1), "llama-aa11bb22", 20001, "train"),
        (train_job(), "llama-aa11bb22", 0, "node"),
        (ray_worker(replica=3), "llama-raycluster-9x7wq-3f6a1f0e", 30_000, "ray-worker"),
        (ray_worker(replica=1, host=2), "llama-raycluster-9x7wq-3f6a1f0e", 10_002, "ray-worker"),
        (bare_pod(), "try", 0, "main"),
    ],
    ids=[
        *("master", "worker", "Indexed Job", "JobSet", "TrainJob"),
        *("worker of Ray", "one of several hosts of Ray", "bare pod"),
    ],
)
def test_the_run_and_node_rank_of_a_pod_are_derived_for_each_kind_of_job(
    body: Body, key: str, rank: int, container: str
) -> None:
    pod = parse_pod(body)
    assert (run_key(pod), node_rank(pod)) == (key, rank)
    assert training_container(pod).name == container


def test_a_restarted_job_set_is_the_same_run() -> None:
    before, after = job_set(), job_set()
    after["metadata"]["ownerReferences"][0]["uid"] = "another-job"
    assert run_key(parse_pod(before)) == run_key(parse_pod(after))
    assert find_root_job(parse_pod(after)).kind == "JobSet"


def test_pods_of_an_older_job_set_without_a_uid_need_a_name_for_their_run() -> None:
    """Its jobs are made anew with each restart, and several of them are one run."""
    body = job_set(job=1, index=1)
    del body["metadata"]["labels"]["jobset.sigs.k8s.io/jobset-uid"]
    assert find_root_job(parse_pod(body)).kind == "JobSet"
    with pytest.raises(PodRefusedError, match=r"keepstep\.dev/run"):
        run_key(parse_pod(body))
    body["metadata"]["labels"]["keepstep.dev/run"] = "llama"
    assert (run_key(parse_pod(body)), node_rank(parse_pod(body))) == ("llama", 10_001)


def test_jobs_of_a_set_that_come_after_others_may_be_numbered_by_a_label_of_their_own() -> None:
    body = job_set(job=2, index=1)
    body["metadata"]["labels"]["jobset.sigs.k8s.io/job-index"] = "0"
    assert node_rank(parse_pod(body)) == 20_001
    label = "jobset.sigs.k8s.io/job-index"
    body["metadata"]["annotations"]["keepstep.dev/job-index-label"] = label
    assert node_rank(parse_pod(body)) == 1
    body["metadata"]["annotations"]["keepstep.dev/job-index-label"] = "missing"
    with pytest.raises(PodRefusedError, match="the pod has no label missing with a number"):
        node_rank(parse_pod(body))


@pytest.mark.parametrize(("job", "index"), [(0, 10_000), (10_000, 0)])
def test_two_pods_of_a_set_never_get_one_node_rank(job: int, index: int) -> None:
    with pytest.raises(PodRefusedError) as refused:
        node_rank(parse_pod(job_set(job=job, index=index)))
    assert refused.value.reason == "BadNodeRank"


def test_the_node_rank_in_an_elastic_job_is_the_replica_index() -> None:
    body = pytorch_job()
    body["metadata"]["labels"]["training.kubeflow.org/replica-index"] = "4"
    body["spec"]["containers"][1]["env"] = [{"name": "RANK", "value": "$(OTHER)"}]
    assert node_rank(parse_pod(body)) == 4


def test_the_label_continues_a_run_over_several_jobs() -> None:
    body = pytorch_job()
    body["metadata"]["labels"]["keepstep.dev/run"] = "gpt-large"
    assert run_key(parse_pod(body)) == "gpt-large"


@pytest.mark.parametrize("name", ["", "Upper", "a_b", "a.b", "-a", "../x", "x" * 64, "a/b"])
def test_a_run_label_that_cannot_name_a_directory_is_refused(name: str) -> None:
    body = pytorch_job()
    body["metadata"]["labels"]["keepstep.dev/run"] = name
    with pytest.raises(
        PodRefusedError, match=r"label keepstep.dev/run is .* at most 63 characters"
    ):
        run_key(parse_pod(body))


def test_a_long_job_name_is_truncated_and_made_unique_by_its_uid() -> None:
    body = indexed_job()
    body["metadata"]["ownerReferences"] = [
        owner("Job", "a" * 40 + "." + "b" * 40, api_version="batch/v1")
    ]
    key = run_key(parse_pod(body))
    assert len(key) == 63
    assert key == f"{'a' * 40}-{'b' * 13}-{JOB_UID[:8]}"


def test_a_pod_without_owner_and_name_is_refused_with_a_hint_to_set_a_label() -> None:
    body = bare_pod()
    body["metadata"] = {"generateName": "try-", "annotations": {}}
    with pytest.raises(PodRefusedError, match=r"give it the label keepstep.dev/run"):
        parse_run_and_node_rank(parse_pod(body))


def test_the_container_annotation_selects_the_training_container_and_must_be_valid() -> None:
    body = pytorch_job()
    body["metadata"]["annotations"]["keepstep.dev/container"] = "logger"
    assert training_container(parse_pod(body)).name == "logger"
    body["metadata"]["annotations"]["keepstep.dev/container"] = "absent"
    with pytest.raises(PodRefusedError, match=r"names 'absent'; the pod has logger, pytorch"):
        training_container(parse_pod(body))


@pytest.mark.parametrize("make", ALL.values(), ids=ALL.keys())
def test_the_reconciler_reads_back_what_admission_wrote(make: Any) -> None:
    body = make()
    injected = parse_pod(inject(body, policy(), DEFAULTS))
    assert parse_run_placement(injected) == parse_run_and_node_rank(parse_pod(body))
    injected_ = injected_of(injected)
    assert injected_ is not None
    assert injected_.job == find_root_job(injected)
    assert (injected_.policy, injected_.generation, injected_.reason) == ("default", 3, "")
    assert (injected_.image, injected_.version) == (DEFAULTS.sidecar_image, "0.1.0")
    assert injected_.container == training_container(injected).name


@pytest.mark.parametrize(
    "text", ["", "no json", "[]", '"x"', '{"policy": 1, "job": {"x": 1}}', "{}"]
)
def test_an_invalid_status_annotation_is_ignored(text: str) -> None:
    body = bare_pod()
    body["metadata"]["annotations"]["keepstep.dev/status"] = text
    assert injected_of(parse_pod(body)) is None


def _of_a_replica_set(**labels: str) -> Body:
    body = bare_pod("train-x7k2p")
    body["metadata"]["ownerReferences"] = [owner("ReplicaSet", "train", api_version="apps/v1")]
    body["metadata"]["labels"] |= labels
    return body


def test_a_pod_of_an_unknown_job_kind_takes_its_node_rank_from_the_label() -> None:
    with pytest.raises(PodRefusedError, match=r"keepstep\.dev/node-rank") as refused:
        node_rank(parse_pod(_of_a_replica_set()))
    assert refused.value.reason == "UnknownJobKind"
    body = _of_a_replica_set(**{"keepstep.dev/node-rank": "3"})
    injected = inject(body, policy(), DEFAULTS)
    assert injected["metadata"]["labels"]["keepstep.dev/node-rank"] == "3"
    assert inject(injected, policy(), DEFAULTS) == injected, "the webhook is reinvoked"


def test_a_node_rank_label_that_is_not_a_number_is_refused() -> None:
    with pytest.raises(PodRefusedError) as refused:
        node_rank(parse_pod(_of_a_replica_set(**{"keepstep.dev/node-rank": "first"})))
    assert refused.value.reason == "BadNodeRank"


def test_a_node_rank_label_copied_from_another_injected_pod_is_ignored() -> None:
    """A template that was copied from an injected pod: its label would hold for all pods."""
    copied = inject(pytorch_job(rank=2), policy(), DEFAULTS)
    copied["metadata"]["ownerReferences"][0]["uid"] = "another-job"
    (training,) = (
        container for container in copied["spec"]["containers"] if container["name"] == "pytorch"
    )
    training["env"] = [{"name": "RANK", "value": "5"}]
    assert node_rank(parse_pod(copied)) == 5


def test_a_pod_without_an_index_from_its_controller_is_not_given_node_rank_0() -> None:
    body = pytorch_job()
    del body["metadata"]["labels"]["training.kubeflow.org/replica-index"]
    body["spec"]["containers"][1]["env"] = []
    for pod in (body, _of_an_older_job_set()):
        with pytest.raises(PodRefusedError, match=r"keepstep\.dev/node-rank") as refused:
            node_rank(parse_pod(pod))
        assert refused.value.reason == "UnknownJobKind"
        pod["metadata"]["labels"]["keepstep.dev/node-rank"] = "3"
        assert node_rank(parse_pod(pod)) == 3


def test_the_head_of_a_ray_cluster_and_workers_of_an_older_kuberay_are_refused() -> None:
    older, head = ray_worker(), ray_worker()
    head["metadata"]["labels"] |= {"ray.io/node-type": "head", "ray.io/group": "headgroup"}
    for body in (older, head):
        del body["metadata"]["labels"]["ray.io/worker-group-replica-index"]
        with pytest.raises(PodRefusedError, match=r"keepstep\.dev/node-rank") as refused:
            node_rank(parse_pod(body))
        assert refused.value.reason == "UnknownJobKind"


def _of_an_older_job_set() -> Body:
    body = job_set(job=1, index=1)
    for where in ("labels", "annotations"):
        del body["metadata"][where]["jobset.sigs.k8s.io/job-global-index"]
    return body


def _of_a_leader_worker_set(name: str, **labels: str) -> Body:
    body = bare_pod(name)
    owned = "train" if labels["worker-index"] == "0" else name.rpartition("-")[0]
    body["metadata"]["ownerReferences"] = [owner("StatefulSet", owned, api_version="apps/v1")]
    lws = "leaderworkerset.sigs.k8s.io"
    body["metadata"]["labels"] = {f"{lws}/name": "train"} | {
        f"{lws}/{label}": value for label, value in labels.items()
    }
    return body


def test_the_pods_of_a_leader_worker_set_need_a_name_for_their_run() -> None:
    body = _of_a_leader_worker_set("train-0-1", **{"worker-index": "1", "group-index": "0"})
    with pytest.raises(PodRefusedError, match=r"keepstep\.dev/run"):
        run_key(parse_pod(body))
    body["metadata"]["labels"]["keepstep.dev/run"] = "llm"
    assert (run_key(parse_pod(body)), node_rank(parse_pod(body))) == ("llm", 1)


@pytest.mark.parametrize(
    ("name", "labels", "rank"),
    [
        ("train-0", {"worker-index": "0", "group-index": "0"}, 0),
        ("train-2", {"worker-index": "0", "group-index": "2"}, 20_000),
        ("train-2", {"worker-index": "0"}, 20_000),
        ("train-2-3", {"worker-index": "3", "group-index": "2"}, 20_003),
    ],
    ids=["leader", "of another group", "before their webhook", "worker"],
)
def test_groups_of_a_leader_worker_set_have_distinct_node_ranks_and_one_root(
    name: str, labels: dict[str, str], rank: int
) -> None:
    pod = parse_pod(_of_a_leader_worker_set(name, **labels))
    assert node_rank(pod) == rank
    root = find_root_job(pod)
    assert (root.kind, root.name) == ("LeaderWorkerSet", "train")


def test_reinvocation_after_the_leader_worker_set_webhook_leaves_the_injected_pod_unchanged() -> (
    None
):
    body = _of_a_leader_worker_set("train-1", **{"worker-index": "0"})
    body["metadata"]["labels"]["keepstep.dev/run"] = "llm"
    injected = inject(body, policy(), DEFAULTS)
    injected["metadata"]["labels"]["leaderworkerset.sigs.k8s.io/group-index"] = "1"
    assert inject(injected, policy(), DEFAULTS) == injected


def test_groups_that_have_no_number_are_refused() -> None:
    labels = {"worker-index": "1", "group-index": "da39a3ee"}
    with pytest.raises(PodRefusedError) as refused:
        node_rank(parse_pod(_of_a_leader_worker_set("train-da39a3ee-1", **labels)))
    assert refused.value.reason == "UnknownJobKind"


def test_volcano_tasks_take_their_node_rank_from_the_variable_of_the_volcano_plugin() -> None:
    def pod(task: str, rank: str = "") -> Body:
        body = bare_pod(f"train-{task}-0")
        version = "batch.volcano.sh/v1alpha1"
        body["metadata"]["ownerReferences"] = [owner("Job", "train", api_version=version)]
        body["metadata"]["labels"] = {"volcano.sh/task-index": "0", "volcano.sh/task-spec": task}
        if rank:
            body["spec"]["containers"][0]["env"] = [{"name": "RANK", "value": rank}]
        return body

    assert node_rank(parse_pod(pod("worker"))) == 0
    assert node_rank(parse_pod(pod("master", "0"))) == 0
    assert node_rank(parse_pod(pod("worker", "1"))) == 1


@pytest.mark.parametrize(
    ("body", "queued"),
    [
        (pytorch_job(), True),
        (indexed_job(), True),
        (job_set(), True),
        (train_job(), True),
        (bare_pod(), False),
    ],
    ids=["PyTorchJob", "Indexed Job", "JobSet", "TrainJob", "bare pod"],
)
@pytest.mark.parametrize("label", ["kueue.x-k8s.io/queue-name", "kueue.x-k8s.io/podset"])
def test_a_job_that_kueue_admitted_by_its_template_is_recognised_from_its_pods(
    body: Body, queued: bool, label: str
) -> None:
    assert not is_queued_by_template(parse_pod(body))
    labelled = copy.deepcopy(body)
    labelled["metadata"].setdefault("labels", {})[label] = "team"
    assert is_queued_by_template(parse_pod(labelled)) == queued


def test_pods_of_a_stateful_set_do_not_count_as_queued_by_template() -> None:
    body = bare_pod("train-0")
    body["metadata"]["labels"] = {"kueue.x-k8s.io/queue-name": "team"}
    body["metadata"]["ownerReferences"] = [owner("StatefulSet", "train", api_version="apps/v1")]
    assert not is_queued_by_template(parse_pod(body))
