"""Writes the table of docs/guarantees.md from test results: what each failure costs.

    python scripts/guarantees.py build/junit-*.xml    # after make test and make e2e

Each row names the tests that prove it, and is in the table only if all of them passed. The tests
measured the steps lost (`record_property("lost_steps", ...)`), and the table has the most of all
runs on record. The results are in docs/guarantees.json; a test compares the page with them.
"""

from __future__ import annotations

import json
import sys
import xml.etree.ElementTree
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "docs" / "guarantees.json"
PAGE = ROOT / "docs" / "guarantees.md"
BEGIN, END = "<!-- guarantees:begin -->", "<!-- guarantees:end -->"


@dataclass(frozen=True)
class Row:
    """What dies, under which policy, from where the run goes on, and the tests that prove it."""

    dies: str
    policy: str
    goes_on_from: str
    tests: tuple[str, ...]
    lost: str = "none"  # shown if its tests measure no number of steps


_E2E = "tests.e2e."

ROWS = (
    Row(
        "a trainer, once (SIGKILL, OOM, an exception)",
        "any",
        "memory",
        (
            _E2E + "test_2_container_killed::"
            "test_a_killed_trainer_restarts_in_place_and_goes_on_from_memory",
        ),
    ),
    Row(
        "a sidecar",
        "any",
        "training goes on; sealed slots are adopted",
        (
            _E2E + "test_2_container_killed::"
            "test_a_killed_sidecar_comes_back_while_training_goes_on",
        ),
    ),
    Row(
        "a pod, made again on its node",
        "`hostPath`",
        "the node's volume: flushed at the pod's end",
        (
            _E2E + "test_3_pods_deleted::"
            "test_a_deleted_pod_flushes_and_its_successor_restores_that_step",
        ),
    ),
    Row(
        "a trainer, while the operator is away",
        "any",
        "memory: the ranks agree among themselves",
        (_E2E + "test_4_operator_away::test_pods_restart_by_agreement_while_the_operator_is_down",),
    ),
    Row(
        "the API server, etcd",
        "any",
        "training goes on",
        (
            _E2E + "test_4_operator_away::"
            "test_etcd_and_the_api_server_are_killed_and_nothing_stops",
            _E2E + "test_4_operator_away::"
            "test_an_api_server_that_stands_still_for_a_minute_stops_nothing",
        ),
    ),
    Row(
        "the job, all pods and their volumes",
        "`archive`",
        "the newest archived step (here every 10 steps)",
        (_E2E + "test_12_tiers::test_a_job_made_anew_goes_on_from_the_archive",),
    ),
    Row(
        "nothing: the number of replicas changes",
        "`archive`",
        "the newest archived step, resharded",
        (
            _E2E + "test_12_tiers::"
            "test_another_number_of_replicas_goes_on_where_the_old_one_stopped",
        ),
    ),
    Row(
        "a node",
        "`peers`",
        "its buddy's copies",
        (_E2E + "test_12_tiers::test_a_lost_node_with_a_buddy_costs_no_committed_step",),
    ),
    Row(
        "a pod, made again on another node while its old node lives",
        "`hostPath`",
        "the node that it left, served by a helper pod",
        (
            _E2E + "test_15_helpers::"
            "test_a_pod_that_moved_has_its_shards_from_the_node_it_left_and_both_are_cleaned_in_the_end",
        ),
    ),
    Row(
        "etcd's content: every object of keepstep's",
        "`archive`",
        "the archive; its steps are listed again",
        (_E2E + "test_17_shelf::test_archived_checkpoints_are_listed_again_after_etcd_was_lost",),
    ),
    Row(
        "a pod of several; each holds the whole state (DDP)",
        "`emptyDir`, without peers or archive",
        "the pods that are left, which send it",
        (_E2E + "test_21_a_part_is_gone::test_a_replica_goes_on_from_the_pod_that_is_left",),
    ),
    Row(
        "a node with one pod of several; each holds the whole state (DDP)",
        "`emptyDir`, without peers or archive",
        "the pods that are left, which send it",
        (
            _E2E + "test_12_tiers::"
            "test_a_lost_node_whose_replica_is_left_costs_nothing_without_any_copy",
        ),
    ),
    Row(
        "a pod of several; each holds a part (FSDP)",
        "`emptyDir`, without peers or archive",
        "step 0 by itself, with an Event that says how much was lost",
        (
            _E2E + "test_21_a_part_is_gone::"
            "test_shards_that_went_with_their_pod_have_the_run_begin_again",
        ),
        lost="all",
    ),
    Row(
        "a pod of several; each holds a part (FSDP)",
        "`emptyDir`, `onLoss: Wait`",
        "step 0, once a person said so; until then it waits",
        (
            _E2E + "test_21_a_part_is_gone::"
            "test_with_on_loss_wait_the_run_waits_until_a_person_decides",
        ),
        lost="all",
    ),
    Row(
        "a drive, which is formatted or replaced on its node; each pod holds a part (FSDP)",
        "`hostPath` on ext4 or XFS, without peers or archive",
        "step 0 by itself, with Events that name the drive and say how much was lost",
        (
            _E2E + "test_21_a_part_is_gone::"
            "test_another_drive_in_place_of_the_one_with_the_steps_has_the_run_begin_again",
        ),
        lost="all",
    ),
    Row(
        "nothing for good: a drive is not mounted; each pod holds a part (FSDP)",
        "`hostPath`, without peers or archive",
        "the drive, once it is mounted again; until then the run waits",
        (
            _E2E + "test_21_a_part_is_gone::"
            "test_a_drive_that_is_not_mounted_is_waited_for_and_its_return_is_enough",
        ),
    ),
    Row(
        "a drive or a node for good; each pod holds a part (FSDP)",
        "`hostPath`, without peers or archive",
        "what was lost, once it is back; or step 0: by itself where another drive (ext4, XFS) is in"
        " its place, else once a person said so",
        (
            _E2E + "test_21_a_part_is_gone::"
            "test_where_a_host_path_may_come_back_the_run_waits_and_one_command_works",
        ),
        lost="all, unless it comes back",
    ),
    Row(
        "a sidecar, and about a second later its trainer",
        "any",
        "memory: sealed slots are adopted; no step is kept in between",
        (
            _E2E + "test_21_a_part_is_gone::"
            "test_a_sidecar_and_its_trainer_that_are_killed_cost_what_was_finished_between",
        ),
    ),
    Row(
        "nothing for good: a node restarts with all pods of a job",
        "`emptyDir`",
        "the node's volume, which outlives the restart",
        (
            _E2E + "test_21_a_part_is_gone::"
            "test_a_node_that_restarts_with_all_pods_costs_what_was_not_committed",
        ),
    ),
    Row(
        "the archive, for a while",
        "`archive`",
        "training goes on; it catches up",
        (_E2E + "test_12_tiers::test_an_archive_that_is_away_stops_nothing_and_catches_up",),
    ),
    Row(
        "the sidecar of a buddy, or the copies that it keeps",
        "`peers`",
        "training goes on; the copies are sent again",
        (
            _E2E + "test_14_faults::"
            "test_a_buddy_that_stands_still_or_loses_its_copies_holds_up_nobody"
            "_and_is_brought_up_to_date",
        ),
    ),
    Row(
        "a node's drive, and the newest copy of it rots",
        "`hostPath`, `peers`, `archive`",
        "the newest step that verifies: an older copy, or the archive",
        (
            _E2E + "test_14_faults::"
            "test_a_copy_whose_bytes_changed_is_refused_and_the_next_step_that_verifies_is_restored",
        ),
    ),
    Row(
        "nothing: a drive is full",
        "`hostPath`, `peers`",
        "training and commits go on; copies for others go first",
        (
            _E2E + "test_14_faults::"
            "test_a_full_drive_of_one_node_is_named_and_costs_copies_before_it_costs_commits",
        ),
    ),
    Row(
        "nothing: somebody goes back to an older step",
        "`archive`",
        "that step, exactly; what was left is never mixed in",
        (
            _E2E + "test_14_faults::"
            "test_what_a_run_that_went_back_left_behind_is_never_mixed_into_its_new_line",
        ),
        lost="what lies beyond that step",
    ),
    Row(
        "a shard's bytes (bit rot)",
        "any",
        "the next tier or step that verifies; never those bytes",
        (
            "tests.sidecar.test_restart::"
            "test_a_damaged_shard_is_quarantined_and_never_a_silent_fresh_start",
        ),
        lost="none if another tier has the step; else what lies beyond an older one",
    ),
)


def read(paths: Iterable[Path]) -> dict[str, dict[str, Any]]:
    """The outcome of each test and the steps lost that it recorded, from pytest's JUnit files."""
    found: dict[str, dict[str, Any]] = {}
    for path in paths:
        for case in xml.etree.ElementTree.parse(path).getroot().iter("testcase"):
            name = f"{case.get('classname')}::{case.get('name')}"
            bad = [one.tag for one in case if one.tag in ("failure", "error", "skipped")]
            recorded = {one.get("name"): one.get("value") for one in case.iter("property")}
            lost = recorded.get("lost_steps")
            found[name] = {
                "outcome": bad[0] if bad else "passed",
                **({"lost_steps": int(lost)} if lost else {}),
            }
    return found


def collect(results: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """The results of the rows whose tests all passed. Names the other rows on stderr."""
    kept: dict[str, dict[str, Any]] = {}
    for row in ROWS:
        if all(results.get(name, {}).get("outcome") == "passed" for name in row.tests):
            kept |= {name: results[name] for name in row.tests}
        else:
            print(f"not proved, and left out: {row.dies} ({row.policy})", file=sys.stderr)
    return kept


def worst(
    results: dict[str, dict[str, Any]], before: dict[str, dict[str, Any]]
) -> dict[str, dict[str, Any]]:
    """`results`, with the most steps that a test lost in this run or in one that is on record."""
    for name, one in results.items():
        if "lost_steps" in one:
            one["lost_steps"] = max(one["lost_steps"], before.get(name, {}).get("lost_steps", 0))
    return results


def render(results: dict[str, dict[str, Any]]) -> str:
    """The table, with the rows whose tests are all in `results`."""
    lines = [
        "| what dies | policy | finished steps lost | goes on from |",
        "| --- | --- | --- | --- |",
    ]
    for row in ROWS:
        if not results.keys() >= set(row.tests):
            continue
        lost = [results[one]["lost_steps"] for one in row.tests if "lost_steps" in results[one]]
        said = str(max(lost)) if lost else row.lost
        lines.append(f"| {row.dies} | {row.policy} | {said} | {row.goes_on_from} |")
    return "\n".join(lines)


def place(page: str, table: str) -> str:
    """The page with `table` between its marks."""
    before, rest = page.split(BEGIN)
    return f"{before}{BEGIN}\n{table}\n{END}{rest.split(END)[1]}"


def main(paths: list[str]) -> None:
    """Read results, write docs/guarantees.json and the page."""
    if not paths:
        raise SystemExit(__doc__)
    results = worst(collect(read(map(Path, paths))), json.loads(RESULTS.read_text()))
    RESULTS.write_text(json.dumps(results, indent=1, sort_keys=True) + "\n")
    PAGE.write_text(place(PAGE.read_text(), render(results)))


if __name__ == "__main__":
    main(sys.argv[1:])
