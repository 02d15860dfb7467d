"""The Service by which the pods of a run find its leader."""

from __future__ import annotations

import re

import kubernetes_validate
from hypothesis import given
from hypothesis import strategies as st

from keepstep_operator.api.leader_service import leader_address, service_body, service_name

NAMES = st.from_regex(r"\A[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?\Z")
OWNER = {"apiVersion": "keepstep.dev/v1alpha1", "kind": "CheckpointRun", "name": "r", "uid": "u"}


@given(NAMES)
def test_every_run_has_a_name_that_a_service_may_have(run: str) -> None:
    assert re.fullmatch(r"[a-z]([-a-z0-9]{0,61}[a-z0-9])?", service_name(run))


@given(NAMES, NAMES)
def test_different_runs_have_different_service_names(first: str, other: str) -> None:
    assert (first == other) == (service_name(first) == service_name(other))


def test_long_run_names_with_the_same_prefix_have_different_service_names() -> None:
    first, other = (f"{'a' * 62}{end}" for end in "xy")
    assert service_name(first) != service_name(other)


def test_the_service_selects_node_rank_0_also_before_it_is_ready() -> None:
    body = service_body("team", "gpt", port=26741, owner=OWNER)
    kubernetes_validate.validate(body, "1.31", strict=True)
    assert body["spec"]["selector"]["keepstep.dev/node-rank"] == "0"
    assert body["spec"]["publishNotReadyAddresses"]
    assert leader_address("team", "gpt", 26741) == "keepstep-gpt.team.svc:26741"
