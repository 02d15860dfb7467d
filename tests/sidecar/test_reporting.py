"""One run, two pods and an operator: node rank 0 leads, and reports the run."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from operator_host import OperatorHost, make_identity
from pods import Pod
from trainer import FakeTrainer, Ranks

from keepstep.steps import StepId, TierAnswer
from keepstep.wire.run_reports import AdvisoryKind
from keepstep_sidecar.cli import calls
from keepstep_sidecar.cli.probe import sidecar_health
from tests.harness import eventually, free_port

Trainers = Callable[..., FakeTrainer]


class Team(Ranks):
    """The two pods of a run, and a rank on each."""

    def __init__(self, pods: list[Pod], trainers: Trainers) -> None:
        super().__init__(trainers)
        self.pods = pods

    def start(self, *options: str, size: int = 64 << 10) -> tuple[list[Pod], list[FakeTrainer]]:
        """Both sidecars, and the ranks in their first epoch."""
        for pod in self.pods:
            pod.start(*options)
        for rank, pod in enumerate(self.pods):
            trainer = self._trainers(pod.socket, rank, 2, size=size)
            self.ranks.append(trainer.begin_run(local_world=1))
        return self.pods, self.ranks

    def come_back(self, *, local_world: int = 1) -> list[FakeTrainer]:
        """Ranks that have not restored yet."""
        return self.come([pod.socket for pod in self.pods], local_world=local_world)


def unreachable() -> str:
    """An address on loopback where nobody listens."""
    return f"https://localhost:{free_port()}/v1/runs"


@pytest.fixture
def team(pods: Callable[[str], list[Pod]], operator: OperatorHost, trainers: Trainers) -> Team:
    return Team(pods(operator.url), trainers)


@pytest.fixture
def lone_team(pods: Callable[[str], list[Pod]], trainers: Trainers) -> Team:
    """Its operator is away."""
    return Team(pods(unreachable()), trainers)


def events(pod: Pod, event: str) -> list[dict[str, object]]:
    lines = [json.loads(line) for line in pod.text().splitlines() if line.startswith("{")]
    return [line for line in lines if line["event"] == event]


# --- commits, retirement -------------------------------------------------------------------------


def test_a_step_that_is_durable_on_both_pods_is_committed_and_published_on_both(team: Team) -> None:
    both, ranks = team.start()
    first = ranks[0].stage(1)
    assert ranks[0].wait(first, "durable", flush=True).reached
    assert not ranks[0].wait(first, "committed", timeout_s=0.5).reached
    assert both[0].published() == []
    ranks[1].stage(1)
    for rank in ranks:
        assert rank.wait(first, "committed", flush=True).reached
    for rank, pod in enumerate(both):
        assert [path.name for path in (pod.root / str(first)).iterdir()] == [
            f"rank-{rank:05d}-of-00002.safetensors"
        ]
        status = pod.get("/v1/status")
        assert status["watermarks"]["local"]["step"] == 1
        assert status["survives"] == ["ContainerRestart", "PodRestart"]
        assert status["reported_at"] is not None


def test_all_commits_of_one_reply_are_published_and_archived_if_due(
    team: Team, tmp_path: Path
) -> None:
    """Steps follow each other faster than reports do, and the same answer that tells of a commit
    may retire it: both pods archive it nonetheless."""
    archive = tmp_path / "archive"
    archive.mkdir()
    options = ("--keep", "3", "--archive", str(archive), "--archive-every", "4")
    both, ranks = team.start(*options)
    for step in range(1, 9):
        for rank in ranks:
            assert rank.wait(rank.stage(step), "durable", flush=True).reached
    for pod in both:
        eventually(
            lambda pod=pod: pod.published() == [6, 7, 8],
            what=lambda pod=pod: f"published {pod.published()}",
        )

    def archived() -> list[int]:
        return sorted(
            StepId.parse(path.parent.name).step for path in archive.glob("run/*/step.json")
        )

    eventually(lambda: archived() == [4, 8], what=lambda: f"archived {archived()}")


# --- restart -------------------------------------------------------------------------------------


def test_after_both_pods_were_lost_the_common_step_is_fetched_ahead_and_restored(
    team: Team,
) -> None:
    both, ranks = team.start()
    step_id = team.reach(7)
    only_here = ranks[0].stage(8)
    assert ranks[0].wait(only_here, "durable", flush=True).reached
    for pod in both:
        pod.kill()
        pod.lose_memory()
        pod.start()
    for pod in both:
        (loaded,) = eventually(
            lambda pod=pod: events(pod, "restore.shard_loaded"), what="the shard ahead"
        )
        assert loaded["step"] == str(step_id)
    ranks = team.come_back()
    found = ranks[0].candidates()
    assert [candidate.id.step for candidate in found.candidates] == [7, 8]
    assert found.plan == step_id
    assert team.restore() == step_id


def test_node_ranks_may_have_gaps(
    pods: Callable[..., list[Pod]], operator: OperatorHost, trainers: Trainers
) -> None:
    """As those of a JobSet with several jobs, where each job begins at a multiple of 10,000."""
    team = Team(pods(operator.url, nodes=(0, 70_000)), trainers)
    both, ranks = team.start("--peer-replicas", "1")
    step_id = team.reach(7)
    for rank in ranks:
        assert rank.wait(step_id, "committed", flush=True).reached
    for pod in both:
        eventually(lambda pod=pod: pod.get("/v1/status")["watermarks"].get("peer"), what="a copy")
    both[1].kill()
    both[1].lose_memory()
    shutil.rmtree(both[1].root)
    both[1].start("--peer-replicas", "1")
    team.disconnect()
    team.come_back()
    assert team.restore() == step_id
    assert operator.newest is not None
    assert [node.node_rank for node in operator.newest.nodes] == [0, 70_000]


def test_a_restore_is_reported_with_step_tier_and_what_was_lost(
    team: Team, operator: OperatorHost
) -> None:
    _, ranks = team.start()
    step_id = team.stage(7)
    ranks[0].stage(8)
    team.disconnect()
    team.come_back()
    assert team.restore() == step_id
    restored = eventually(
        lambda: (found := operator.newest) and found.recent and found.recent[0],
        what="a report of the restore",
    )
    assert (restored.type, restored.step, restored.lost_steps) == ("Restored", 7, 0)


def test_ranks_agree_on_the_restored_step_without_the_operator(lone_team: Team) -> None:
    both, ranks = lone_team.start()
    for step in (4, 5):
        step_id = lone_team.reach(step, "durable")
    later = ranks[1].stage(6)
    both[0].kill()
    both[0].lose_memory()
    both[0].start()
    ranks[0].disconnect()
    ranks[1].disconnect()
    assert later.step == 6
    lone_team.come_back()
    assert lone_team.restore() == step_id


def test_a_pod_without_steps_never_starts_at_step_0_beside_a_pod_with_steps(
    lone_team: Team, trainers: Trainers
) -> None:
    """Without LOCAL_WORLD_SIZE a sidecar of many does not take its ranks for all there are."""
    for rank, pod in enumerate(lone_team.pods):
        trainer = trainers(pod.start().socket, rank, 2).begin_run()
        trainer.stage(5)
        trainer.disconnect()
    lone_team.come_back(local_world=0)
    assert lone_team.restore().step == 5


def test_a_restarted_sidecar_reads_the_last_commit_from_its_volume(
    team: Team, operator: OperatorHost
) -> None:
    both, ranks = team.start()
    step_id = team.stage(2)
    for rank in ranks:
        assert rank.wait(step_id, "committed", flush=True).reached
        rank.disconnect()
    for pod in both:
        assert pod.terminate() == 0
        assert json.loads((pod.root / "run.json").read_text())["committed"] == str(step_id)
        pod.lose_memory()
    operator.stop()
    both[0].start()
    assert both[0].get("/v1/status")["watermarks"]["local"]["step"] == 2
    (loaded,) = eventually(lambda: events(both[0], "restore.shard_loaded"), what="the commit ahead")
    assert loaded["step"] == str(step_id)


def archived_below(archive: Path) -> list[int]:
    return sorted(StepId.parse(path.parent.name).step for path in archive.glob("run/*/step.json"))


@pytest.fixture
def archived_team(team: Team, operator: OperatorHost, tmp_path: Path) -> tuple[Team, Path]:
    """Both pods know each other, and hold steps 1 to 4 in memory alone: neither drives nor archive
    want any of them."""
    archive = tmp_path / "archive"
    archive.mkdir()
    every = ("--persist-every", "1000000", "--archive-every", "1000000")
    team.start("--archive", str(archive), *every)
    for step in range(1, 5):
        team.stage(step)
    eventually(lambda: operator.newest and operator.newest.known == 2)
    return team, archive


@pytest.mark.parametrize("leaves", [0, 1])
def test_the_last_step_of_a_terminating_pod_is_archived_before_it_exits(
    archived_team: tuple[Team, Path], leaves: int
) -> None:
    team, archive = archived_team
    assert team.pods[leaves].terminate() == 0
    eventually(lambda: archived_below(archive) == [4], what=f"not {archived_below(archive)}")


def test_a_step_staged_after_the_termination_notice_is_also_committed_and_archived(
    archived_team: tuple[Team, Path], operator: OperatorHost
) -> None:
    """The operator says it, of a pod without a preStop hook."""
    team, archive = archived_team
    leaves = team.pods[1]
    operator.ask(members=(team.pods[0].member(), leaves.member(leaving=True)))
    eventually(lambda: archived_below(archive) == [4], what=f"not {archived_below(archive)}")
    team.stage(5)
    for rank in team.ranks:
        rank.disconnect()
    assert leaves.terminate() == 0
    eventually(lambda: archived_below(archive) == [4, 5], what=f"not {archived_below(archive)}")


def test_the_pre_stop_hook_of_a_pod_notifies_the_other_pods(
    archived_team: tuple[Team, Path],
) -> None:
    team, archive = archived_team
    assert calls.ask_flush(team.pods[1].socket, timeout_s=10.0) is not None
    eventually(lambda: archived_below(archive) == [4], what=f"not {archived_below(archive)}")


def test_a_terminating_pod_exits_in_time_even_if_its_last_step_cannot_be_committed(
    archived_team: tuple[Team, Path],
) -> None:
    """The other pod is gone, so no step is committed: ten seconds are spent on the hope."""
    team, archive = archived_team
    team.pods[1].kill()
    assert team.pods[0].terminate(within_s=60) == 0
    assert archived_below(archive) == []


# --- an operator that is away, slow, or not the one ----------------------------------------------


def test_an_absent_operator_is_logged_once_and_does_not_affect_training(
    lone_team: Team, operators: Callable[..., OperatorHost]
) -> None:
    both, ranks = lone_team.start()
    for step in range(20):
        lone_team.stage(step)
    eventually(lambda: events(both[0], "operator.report_failed"))
    url = both[0].report["KEEPSTEP_REPORT_URL"]
    back = operators(port=int(url.split(":")[2].split("/")[0])).start()
    eventually(lambda: back.newest, within_s=40, what="reports catch up")
    assert len(events(both[0], "operator.report_failed")) == 1
    step_id = lone_team.reach(20, "durable")
    for rank in ranks:
        assert rank.wait(step_id, "committed", flush=True).reached


def test_a_server_that_the_given_authority_did_not_sign_never_sees_the_token(
    pods: Callable[[str], list[Pod]], operator: OperatorHost, tmp_path: Path, trainers: Trainers
) -> None:
    (pod, _) = pods(operator.url)
    other = make_identity(tmp_path / "other")
    pod.start(KEEPSTEP_REPORT_CA=other.pem)
    (failure,) = eventually(lambda: events(pod, "operator.report_failed"))
    assert failure["kind"] == "tls"
    assert operator.seen.tokens == []
    trainer = trainers(pod.socket, 0, 2).begin_run(local_world=1)
    assert trainer.wait(trainer.stage(0), "durable").reached


def test_a_new_authority_from_a_reply_replaces_the_old_one_also_after_a_restart(
    pods: Callable[[str], list[Pod]],
    operators: Callable[..., OperatorHost],
    tmp_path: Path,
) -> None:
    old, new = operators().start(), make_identity(tmp_path / "new")
    (pod, _) = pods(old.url)
    old.ask(authorities=new.pem)
    pod.start()
    eventually(lambda: events(pod, "certificate.authorities_updated"))
    (failure,) = eventually(lambda: events(pod, "operator.report_failed"), within_s=30)
    assert failure["kind"] == "tls", "whoever has the old key is believed no more"
    old.stop()

    replaced = operators(port=old.port, identity=new).start()
    eventually(lambda: replaced.newest, within_s=40, what="a report to the new authority")
    before = len(replaced.seen.reports)
    pod.kill()
    pod.start()
    eventually(lambda: len(replaced.seen.reports) > before, within_s=40, what="after a restart")


def test_the_token_file_is_read_again_for_each_report(
    pods: Callable[[str], list[Pod]], operator: OperatorHost, trainers: Trainers
) -> None:
    (pod, _) = pods(operator.url)
    pod.token.unlink()
    pod.start()
    (failure,) = eventually(lambda: events(pod, "operator.report_failed"))
    assert failure["kind"] == "token"
    pod.token.write_text("stranger")
    eventually(lambda: len(events(pod, "operator.report_failed")) == 2)
    assert events(pod, "operator.report_failed")[1]["kind"] == "status 401"
    pod.token.write_text("node-0.renewed")
    eventually(lambda: operator.newest, what="a report with the new token")
    assert operator.seen.tokens[-1] == "node-0.renewed"


# --- bad input -----------------------------------------------------------------------------------


def test_training_continues_although_the_volume_cannot_be_written(
    pods: Callable[[str], list[Pod]], operator: OperatorHost, trainers: Trainers
) -> None:
    (pod, _) = pods(operator.url)
    pod.volume.write_text("not a directory")
    pod.start()
    trainer = trainers(pod.socket, 0, 1)
    trainer.connect(local_world=1)
    assert trainer.candidates().answer is TierAnswer.UNKNOWN
    trainer.go_on()
    for step in range(6):
        step_id = trainer.stage(step)
    waited = trainer.wait(step_id, "durable", timeout_s=5.0, flush=True)
    assert not waited.reached
    assert "cannot use the volume" in waited.reason
    report = eventually(lambda: (found := operator.newest) and found.step == step_id.step and found)
    (doubt,) = (doubt for doubt in report.doubts if doubt.kind is AdvisoryKind.COMMIT_STALLED)
    assert "cannot use the volume" in doubt.text
    assert (report.nodes[0].memory, report.nodes[0].local) == (step_id.step, None)


def test_an_invalid_record_on_a_volume_does_not_prevent_training(
    pods: Callable[[str], list[Pod]], operator: OperatorHost, trainers: Trainers
) -> None:
    (pod, _) = pods(operator.url)
    pod.root.mkdir(parents=True)
    (pod.root / "run.json").write_text('{"format_version": 1e999, "run": "run", "epochs": []}')
    pod.start()
    trainer = trainers(pod.socket, 0, 2)
    trainer.connect(local_world=1)
    trainer.go_on()
    step_id = trainer.stage(1)
    report = eventually(
        lambda: (found := operator.newest) and found.nodes and found.nodes[0].memory and found
    )
    assert report.nodes[0].memory == step_id.step
    assert "not a run record" in report.doubts[0].text
    assert sidecar_health(pod.socket)


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to mount")
def test_a_read_only_volume_is_read_and_a_run_may_begin_beside_it(
    pods: Callable[[str], list[Pod]], operator: OperatorHost, trainers: Trainers
) -> None:
    (pod, _) = pods(operator.url)
    pod.volume.mkdir()
    mount = ("mount", "-t", "tmpfs", "-o", "ro", "tmpfs", str(pod.volume))
    if subprocess.run(mount, check=False, capture_output=True).returncode:
        pytest.skip("tmpfs cannot be mounted here")
    try:
        pod.start()
        trainer = trainers(pod.socket, 0, 1)
        trainer.connect(local_world=1)
        assert trainer.candidates().answer is TierAnswer.NONE
        trainer.go_on()
        trainer.stage(1)
        assert any("Read-only" in text for text in pod.get("/v1/status")["warnings"])
    finally:
        pod.end()
        subprocess.run(["umount", str(pod.volume)], check=True)


def test_an_invalid_authority_certificate_disables_reports_but_not_training(
    pods: Callable[[str], list[Pod]], operator: OperatorHost, trainers: Trainers
) -> None:
    (pod, _) = pods(operator.url)
    pod.start(KEEPSTEP_REPORT_CA="not a certificate")
    trainer = trainers(pod.socket, 0, 2).begin_run(local_world=1)
    assert trainer.wait(trainer.stage(0), "durable").reached
    (failure,) = eventually(lambda: events(pod, "operator.report_failed"))
    assert failure["kind"] == "authorities"
