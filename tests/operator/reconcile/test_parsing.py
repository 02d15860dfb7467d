"""Objects of the cluster as records: what is read from them, and what their absence means."""

from __future__ import annotations

import json
from typing import Any

import pytest

from keepstep_operator.api.cluster_objects import JobState, RunKey
from keepstep_operator.api.policy import VolumeKind
from keepstep_operator.reconcile.parsing import (
    job_state,
    parse_node,
    parse_pod_record,
    parse_policy_record,
    parse_run_object,
)
from tests.operator.reconcile.samples import pod_body


def test_the_record_of_an_injected_pod_is_parsed_from_its_annotation() -> None:
    pod = parse_pod_record(pod_body(3))
    assert pod is not None
    assert (pod.injected, pod.run, pod.node_rank) == (True, RunKey("team", "gpt-1a2b3c4d"), 3)
    assert (pod.policy, pod.policy_generation, pod.sidecar_version) == ("default", 1, "0.1.0")
    assert pod.volumes == (VolumeKind.HOST_PATH,)
    assert pod.training_since == 1795244430.0
    assert pod.job is not None
    assert (pod.job.kind, pod.job.name) == ("PyTorchJob", "gpt")


def test_a_pod_without_a_sidecar_belongs_to_the_run_that_it_would_have_been_given() -> None:
    pod = parse_pod_record(pod_body(1, injected=False))
    assert pod is not None
    assert (pod.injected, pod.run, pod.node_rank) == (False, RunKey("team", "gpt-1a2b3c4d"), 1)


def test_a_pod_with_labels_but_without_a_sidecar_counts_as_not_injected() -> None:
    body = pod_body(1)
    body["spec"]["initContainers"] = []
    pod = parse_pod_record(body)
    assert pod is not None
    assert not pod.injected


@pytest.mark.parametrize("key", ["", "A..b", "../x", "x/y"])
def test_an_invalid_run_key_label_creates_no_run(key: str) -> None:
    body = pod_body(1)
    body["metadata"]["labels"]["keepstep.dev/run-key"] = key
    pod = parse_pod_record(body)
    assert pod is None or pod.run.name != key


def test_a_pod_without_the_policy_annotation_is_ignored() -> None:
    body = pod_body(1, injected=False)
    body["metadata"]["annotations"] = {}
    assert parse_pod_record(body) is None


def test_the_reason_of_a_stuck_pod_is_parsed() -> None:
    body = pod_body(1)
    body["status"] = {
        "phase": "Pending",
        "conditions": [
            {
                "type": "PodScheduled",
                "status": "False",
                "reason": "Unschedulable",
                "message": "0/3 nodes are available: 3 Insufficient memory.",
            }
        ],
    }
    pod = parse_pod_record(body)
    assert pod is not None
    assert pod.trouble == "not scheduled: 0/3 nodes are available: 3 Insufficient memory."
    body["status"] = {
        "initContainerStatuses": [
            {
                "name": "keepstep-sidecar",
                "state": {"waiting": {"reason": "CrashLoopBackOff", "message": "back-off 10s"}},
            }
        ],
        "containerStatuses": [
            {"name": "pytorch", "state": {"waiting": {"reason": "PodInitializing"}}}
        ],
    }
    pod = parse_pod_record(body)
    assert pod is not None
    assert pod.trouble == "container keepstep-sidecar: CrashLoopBackOff (back-off 10s)"
    assert pod.training_since is None


@pytest.mark.parametrize(
    ("conditions", "state"),
    [
        ([], JobState.ACTIVE),
        ([{"type": "Running", "status": "True"}], JobState.ACTIVE),
        ([{"type": "Succeeded", "status": "True"}], JobState.FINISHED),
        ([{"type": "Complete", "status": "True"}], JobState.FINISHED),
        ([{"type": "Failed", "status": "True"}], JobState.FAILED),
        ([{"type": "Failed", "status": "False"}], JobState.ACTIVE),
    ],
)
def test_the_state_of_a_job_is_read_from_its_conditions(
    conditions: list[Any], state: JobState
) -> None:
    assert job_state({"status": {"conditions": conditions}}) is state


@pytest.mark.parametrize(
    ("phase", "state"),
    [
        ("Completed", JobState.FINISHED),
        ("Failed", JobState.FAILED),
        ("Terminated", JobState.FAILED),
        *((phase, JobState.ACTIVE) for phase in ("Pending", "Running", "Restarting", "Completing")),
        *((phase, JobState.ACTIVE) for phase in ("Aborting", "Aborted", "Terminating", "")),
    ],
)
def test_the_state_of_a_volcano_job_is_read_from_its_phase_and_aborted_is_not_final(
    phase: str, state: JobState
) -> None:
    body = {
        "apiVersion": "batch.volcano.sh/v1alpha1",
        "kind": "Job",
        "status": {
            "conditions": [
                {"lastTransitionTime": "2026-11-21T07:00:00Z", "status": "Pending"},
                {"lastTransitionTime": "2026-11-21T08:00:00Z", "status": phase},
            ],
            "minAvailable": 2,
            "state": {"lastTransitionTime": "2026-11-21T08:00:00Z", "phase": phase},
        },
    }
    assert job_state(body) is state


def test_an_empty_run_object_requests_nothing() -> None:
    body = parse_run_object({"metadata": {"namespace": "team", "name": "gpt"}})
    assert body.key == RunKey("team", "gpt")
    assert (body.pins, body.paused, body.fresh_start, body.policy) == ((), False, "", None)


def test_a_policy_record_contains_peers_and_archive_and_describes_their_protection() -> None:
    body = {
        "metadata": {"name": "p", "namespace": "n"},
        "spec": {
            "memory": {"limit": "1Gi"},
            "volumes": [{"name": "a", "emptyDir": {}}],
            "peers": {"replicas": 2},
            "archive": {"directory": {"claimName": "shared"}, "every": 50},
        },
    }
    record = parse_policy_record(body, allowed_paths=())
    assert record.policy is not None
    assert record.policy.peers is not None
    assert record.policy.archive is not None
    assert (record.policy.peers.replicas, record.policy.archive.every) == (2, 50)
    assert "peers outlive the loss of a node" in record.advice
    assert "every 50 steps one goes to claim shared" in record.advice


def test_a_node_whose_kubelet_is_silent_is_not_ready() -> None:
    body = {
        "metadata": {"name": "a", "labels": {"zone": "z"}},
        "spec": {"unschedulable": True, "podCIDR": "10.0.0.0/24"},
        "status": {"conditions": [{"type": "Ready", "status": "Unknown", "message": "silent"}]},
    }
    assert parse_node(body).cordoned
    assert not parse_node(body).ready


def test_injection_warnings_in_a_pod_annotation_are_read_with_bounded_size() -> None:
    body = pod_body()
    annotation = json.loads(body["metadata"]["annotations"]["keepstep.dev/status"])
    annotation["warnings"] = ["a\x1b[2J" + "b" * 5000, *map(str, range(500))]
    body["metadata"]["annotations"]["keepstep.dev/status"] = json.dumps(annotation)
    record = parse_pod_record(body)
    assert record is not None
    assert len(record.warnings) == 10
    assert record.warnings[0].startswith("a\ufffd[2Jb")
    assert max(map(len, record.warnings)) <= 400
