"""A run that is not as expected costs itself what it costs, and nobody else anything."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.operator.promises.surface import (
    NAMESPACE,
    SAID_OF_A_POD,
    SAID_OF_A_RUN,
    Body,
    Shown,
    pod,
    policy,
    shown,
)

ODD = (
    "../../x", "a..b", "x?watch=true", "x/log", "x\n", "\0", "\u00b2", "\u0663", "x" * 64,
    "x" * 254, "9" * 5000, "0-999999999", "-1", "0001.aaaaaaaa", "newest",
    "0001.aaaaaaaa-000000005", "good/5", "2026-11-21T07:00:00Z", "9999-12-31T23:59:60Z", "Finished",
)  # fmt: skip
TEXTS = st.text(max_size=20) | st.sampled_from(ODD)
JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.sampled_from([2**31, 2**63, 10**40])
    | st.floats(allow_nan=False, allow_infinity=False)
    | TEXTS,
    lambda part: st.lists(part, max_size=3) | st.dictionaries(TEXTS, part, max_size=3),
    max_leaves=5,
)
"""Anything in place of anything."""


def _some_of(*names: str, values: st.SearchStrategy[Any] = JSON) -> st.SearchStrategy[Body]:
    return st.dictionaries(st.sampled_from(names), values, min_size=1, max_size=3)


def _each_of(**values: st.SearchStrategy[Any]) -> st.SearchStrategy[Body]:
    return st.fixed_dictionaries({}, optional=values)


JOBS = _some_of("api_version", "kind", "name", "uid")
OWNERS = _some_of("apiVersion", "kind", "name", "uid", values=TEXTS | JSON)
LABELS = _some_of(
    "keepstep.dev/run-key",
    "keepstep.dev/node-rank",
    "keepstep.dev/injected",
    "keepstep.dev/run",
    "jobset.sigs.k8s.io/jobset-name",
    "jobset.sigs.k8s.io/jobset-uid",
    "leaderworkerset.sigs.k8s.io/name",
    values=TEXTS,
)
ANNOTATIONS = _some_of(
    "keepstep.dev/policy",
    "keepstep.dev/container",
    "keepstep.dev/restore-from",
    "keepstep.dev/status",
    values=TEXTS,
)
RUNS = _each_of(
    spec=JSON | _some_of("restoreFrom", "pins", "paused") | _each_of(restoreFrom=TEXTS),
    annotations=_some_of("keepstep.dev/fresh-start", values=TEXTS),
    status=JSON
    | _some_of(*SAID_OF_A_RUN)
    | _each_of(
        phase=TEXTS,
        job=_some_of("apiVersion", "kind", "name", "uid", values=TEXTS),
        policy=_each_of(name=TEXTS, generation=JSON, spec=JSON),
        epoch=TEXTS,
        step=st.integers(),
        committed=_each_of(step=st.integers(), id=TEXTS, time=TEXTS),
        recent=st.lists(_each_of(time=TEXTS, type=TEXTS, step=st.integers()), max_size=3),
        holders=st.lists(
            st.fixed_dictionaries(
                {"node": TEXTS, "nodeRanks": TEXTS, "copies": TEXTS}, optional={"step": JSON}
            ),
            max_size=3,
        ),
        restoreFrom=_each_of(asked=TEXTS, run=TEXTS, step=TEXTS, epoch=TEXTS, since=JSON),
    ),
)


COMMITTED = {"step": 5, "id": "0001.aaaaaaaa-000000005", "time": "2026-11-21T07:00:00Z"}


def _with(body: Body, **metadata: Body) -> tuple[Body, Body]:
    """The pod of these labels or annotations, and one beside it that has no sidecar, of which
    people are told by an Event."""
    body = copy.deepcopy(body)
    for name, values in metadata.items():
        body["metadata"][name] |= values
    bare = copy.deepcopy(body)
    bare["metadata"]["uid"] += "-bare"
    bare["metadata"]["name"] += "-bare"
    bare["spec"]["initContainers"] = []
    return body, bare


def _run(name: str, **parts: Any) -> Body:
    annotations = parts.pop("annotations", {})
    metadata = {"name": name, "namespace": NAMESPACE, "uid": f"uid-of-{name}", "generation": 1}
    return {"metadata": {**metadata, "annotations": annotations}, "spec": {}, **parts}


def _ends_no_other(*evil: tuple[str, Body]) -> None:
    """Shown beside a good run of its namespace, of which all is told that there is to tell: also
    what changes after the evil one was seen."""
    good = [("pods", one) for one in _with(pod(run="good"))]

    def told(found: Shown) -> bool:
        return bool(found.status("good").get("policy") and found.events("good"))

    found = shown(*evil, *good, ("policies", policy()[1]), tells=told)
    assert found.crashes == []


@given(said=_some_of(*SAID_OF_A_POD) | st.fixed_dictionaries({"job": JOBS}))
@settings(max_examples=60)
@example(said={"job": {"name": 5}})
@example(said={"job": {"uid": ["u"]}})
@example(said={"policy": ["default"]})
@example(said={"image": "\ud800"})
def test_what_a_pod_says_of_itself_ends_no_other_run(said: Body) -> None:
    body = pod(run="evil")
    before = json.loads(body["metadata"]["annotations"]["keepstep.dev/status"])
    if isinstance(said.get("job"), dict):
        said = said | {"job": before["job"] | said["job"]}
    annotation = {"keepstep.dev/status": json.dumps(before | said)}
    _ends_no_other(
        ("runs", _run("evil")), *(("pods", one) for one in _with(body, annotations=annotation))
    )


@pytest.mark.parametrize("text", ["[" * 100_000, '{"policy":' * 100_000, "{", "5", '"\ud800"'])
def test_an_annotation_that_is_none_ends_no_other_run(text: str) -> None:
    both = _with(pod(run="evil"), annotations={"keepstep.dev/status": text})
    _ends_no_other(*(("pods", one) for one in both))


@given(labels=LABELS | st.just({}), annotations=ANNOTATIONS | st.just({}))
@settings(max_examples=40)
def test_labels_and_annotations_of_a_pod_end_no_other_run(labels: Body, annotations: Body) -> None:
    both = _with(pod(run="evil"), labels=labels, annotations=annotations)
    _ends_no_other(*(("pods", one) for one in both))


@given(owner=OWNERS, labels=LABELS | st.just({}))
@settings(max_examples=40)
def test_what_a_pod_says_of_its_owner_ends_no_other_run(owner: Body, labels: Body) -> None:
    body = pod(run="evil")
    del body["metadata"]["annotations"]["keepstep.dev/status"]
    body["metadata"]["ownerReferences"][0] |= owner
    _ends_no_other(("runs", _run("evil")), *(("pods", one) for one in _with(body, labels=labels)))


@given(parts=RUNS)
@settings(max_examples=80)
@example(
    parts={"status": {"committed": COMMITTED, "holders": [{"node": "a", "nodeRanks": "\u00b2"}]}}
)
@example(parts={"status": {"policy": {"name": "p", "generation": [1]}}})
@example(parts={"spec": ["restoreFrom"], "status": "Finished"})
def test_a_run_that_somebody_edited_ends_no_other_run(parts: Body) -> None:
    _ends_no_other(
        ("runs", _run("evil", **parts)), *(("pods", one) for one in _with(pod(run="evil")))
    )
