"""Machines that do not serve each other: what a lost machine held comes back from the others, over
the ranks' own process group, or the run says that it is gone."""

from __future__ import annotations

import re
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.harness import SidecarProcess, eventually, torchrun

SCRIPT = Path(__file__).parent / "lending_script.py"


class Machine(SidecarProcess):
    """A machine with one sidecar. `lose`: it is gone, and another one takes its place."""

    def lose(self, *options: str, **environment: str) -> None:
        self.kill()
        self.lose_memory()
        shutil.rmtree(self.volume)
        self.start(*options, **environment)


@pytest.fixture
def machines(tmp_path: Path) -> Iterator[list[Machine]]:
    """Four machines that are not started yet, for one run."""
    memory = Path(tempfile.mkdtemp(prefix="keepstep-test-", dir="/dev/shm"))
    made = []
    for number in range(4):
        (memory / str(number)).mkdir()
        place = tmp_path / str(number)
        made.append(Machine("run", memory / str(number), place, tmp_path / f"log-{number}"))
    yield made
    for machine in made:
        machine.end()
    shutil.rmtree(memory, ignore_errors=True)


def train(
    kind: str, last: int, machines: list[Machine], *, local: int = 1, **env: str
) -> list[str]:
    """What each rank said, in rank order; raises if a rank failed."""
    sockets = [machine.socket for machine in machines]
    done = torchrun(len(machines) * local, SCRIPT, kind, last, local, *sockets, **env)
    if done.returncode:
        raise RuntimeError(done.stderr)
    return sorted(line for line in done.stdout.splitlines() if line.startswith("rank"))


def words_after(lines: list[str], word: str) -> list[str]:
    return [line.partition(f" {word} ")[2] for line in lines if f" {word} " in line]


def values(lines: list[str], word: str) -> set[str]:
    return {re.sub(".*with ", "", line) for line in words_after(lines, word)}


def test_a_lost_machine_restores_from_its_replica(machines):
    two = [machine.start() for machine in machines[:2]]
    before = train("ddp", 4, two)
    two[0].lose()
    after = train("ddp", 4, two, PREVIEW="1")
    assert words_after(after, "previews") == ["(4, {'seen': 4})"] * 2
    assert [line.split(" with ")[0] for line in words_after(after, "begins")] == [
        "at 4 from memory"
    ] * 2
    assert values(after, "begins") == values(before, "ends")
    assert len(values(after, "begins")) == 1


def test_a_lost_machine_with_several_ranks_restores_from_its_replica(machines):
    two = [machine.start() for machine in machines[:2]]
    before = train("ddp", 3, two, local=2)
    two[1].lose()
    after = train("ddp", 5, two, local=2)
    assert words_after(after, "begins")[0].startswith("at 3 from")
    assert values(after, "begins") == values(before, "ends")
    assert len(values(after, "ends")) == 1


def test_a_step_is_restored_from_shards_on_different_machines(machines):
    four = [machine.start() for machine in machines]
    before = train("hsdp", 3, four)
    four[1].lose()
    four[2].lose()
    after = train("hsdp", 5, four)
    assert {line[:4] for line in words_after(after, "begins")} == {"at 3"}
    assert values(after, "begins") == values(before, "ends")


def test_a_run_that_grows_to_two_machines_resumes_from_the_step_of_the_first(machines):
    two = [machine.start() for machine in machines[:2]]
    before = train("ddp", 3, two[:1])
    after = train("ddp", 5, two)
    assert {line[:4] for line in words_after(after, "begins")} == {"at 3"}
    assert values(after, "begins") == values(before, "ends")


def test_shards_of_another_world_size_are_combined(machines):
    three = [machine.start() for machine in machines[:3]]
    before = train("fsdp", 3, three[:2])
    after = train("fsdp", 5, three)
    assert {line[:4] for line in words_after(after, "begins")} == {"at 3"}
    assert values(after, "begins") == values(before, "ends")


def test_a_lost_machine_also_restores_from_the_drive_of_its_replica(machines):
    two = [machine.start() for machine in machines[:2]]
    before = train("ddp", 3, two)
    two[0].lose()
    two[1].kill()
    two[1].lose_memory()
    two[1].start()
    after = train("ddp", 3, two)
    assert words_after(after, "begins")[0].startswith("at 3 from local")
    assert values(after, "begins") == values(before, "ends")


def test_a_run_waits_for_a_lost_shard_and_resumes_once_it_returns(machines, tmp_path):
    two = [machine.start() for machine in machines[:2]]
    before = train("fsdp", 3, two)
    two[0].kill()
    two[0].lose_memory()
    aside = two[0].volume.rename(tmp_path / "aside")
    two[0].start()
    with pytest.raises(RuntimeError, match="together they do not hold a whole one") as refused:
        train("fsdp", 3, two)
    assert "rank 0: nothing; rank 1: " in str(refused.value)
    assert "keepstep run --run NAME" in str(refused.value)
    two[0].kill()
    shutil.rmtree(two[0].volume)
    aside.rename(two[0].volume)
    two[0].start()
    after = train("fsdp", 3, two)
    assert values(after, "begins") == values(before, "ends")


def test_a_run_restarts_at_step_0_after_a_shard_was_lost_for_good(machines):
    fleeting = {"KEEPSTEP_ON_LOSS": "restart"}
    two = [machine.start(**fleeting) for machine in machines[:2]]
    train("fsdp", 3, two)
    two[0].lose(**fleeting)
    after = train("fsdp", 1, two)
    assert {line.split(" with")[0] for line in words_after(after, "begins")} == {"at None"}
    again = train("fsdp", 4, two)
    assert {line[:4] for line in words_after(again, "begins")} == {"at 1"}, (
        "not 3, which is not whole"
    )


def test_a_drive_that_returns_after_a_start_at_step_0_makes_its_steps_available_again(
    machines, tmp_path
):
    two = [machine.start() for machine in machines[:2]]
    before = train("fsdp", 3, two)
    drive, aside, new = two[0].volume, tmp_path / "aside", tmp_path / "new"
    lose_power(two)
    drive.rename(aside)
    for first in two:
        first.start(KEEPSTEP_ON_LOSS="restart")
    again = train("fsdp", 1, two)
    assert {line.split(" with")[0] for line in words_after(again, "begins")} == {"at None"}
    lose_power(two)
    drive.rename(new)
    aside.rename(drive)
    for first in two:
        first.start()
    after = train("fsdp", 3, two)
    assert {line[:4] for line in words_after(after, "begins")} == {"at 3"}
    assert values(after, "begins") == values(before, "ends")


def lose_power(machines: list[Machine]) -> None:
    """Only what lies on drives is left."""
    for machine in machines:
        machine.kill()
        machine.lose_memory()


def test_a_run_waits_if_the_storage_of_one_machine_may_still_return(machines):
    two = [machines[0].start(KEEPSTEP_ON_LOSS="restart"), machines[1].start()]
    train("fsdp", 3, two)
    two[0].lose(KEEPSTEP_ON_LOSS="restart")
    with pytest.raises(RuntimeError, match="NothingCommonError"):
        train("fsdp", 3, two)


def test_a_damaged_step_of_a_replica_is_skipped_for_an_older_one(machines):
    two = [machine.start("--persist-every", "1") for machine in machines[:2]]
    before = train("ddp", 3, two)
    assert len(values(before, "ends")) == 1
    two[0].lose("--persist-every", "1")
    two[1].kill()
    two[1].lose_memory()
    newest = max(two[1].volume.rglob("*.safetensors"), key=lambda path: path.parent.name)
    with newest.open("r+b") as file:
        size = newest.stat().st_size
        for at in range(size // 2, size - 8192, 64):
            file.seek(at)
            file.write(b"\xff")
    two[1].start("--persist-every", "1")
    after = train("ddp", 4, two)
    (step,) = {int(line.split()[1]) for line in words_after(after, "begins")}
    assert step < 3


def test_a_run_starts_at_step_0_when_all_replicas_were_lost(machines):
    two = [machine.start() for machine in machines[:2]]
    train("ddp", 2, two)
    for first in two:
        first.lose()
    after = train("ddp", 1, two)
    assert {line.split(" with")[0] for line in words_after(after, "begins")} == {"at None"}


def test_a_lost_machine_restores_a_requested_older_step_from_its_replica(machines):
    two = [machine.start() for machine in machines[:2]]
    train("ddp", 3, two)
    two[0].lose()
    after = train("ddp", 4, two, ASKED="2")
    assert {line[:4] for line in words_after(after, "begins")} == {"at 2"}


def test_a_machine_with_an_unreadable_drive_restores_from_its_replica(machines):
    two = [machine.start() for machine in machines[:2]]
    before = train("ddp", 3, two)
    two[0].kill()
    two[0].lose_memory()
    for path in two[0].volume.rglob("*.safetensors"):
        path.write_bytes(b"\xff" * path.stat().st_size)
    two[0].start()
    after = train("ddp", 3, two)
    assert values(after, "begins") == values(before, "ends")


# --- machines that come back in another order ----------------------------------------------------


@pytest.mark.parametrize("kind", ["fsdp", "ddp"])
def test_two_machines_that_swap_node_ranks_twice_lose_no_step(machines, kind):
    """The second time, each machine also has the old images of the ranks that come back to it."""
    two = [machine.start() for machine in machines[:2]]
    first = train(kind, 3, two)
    second = train(kind, 8, two[::-1])
    assert {line[:4] for line in words_after(second, "begins")} == {"at 3"}
    assert values(second, "begins") == values(first, "ends")
    third = train(kind, 10, two)
    assert {line[:4] for line in words_after(third, "begins")} == {"at 8"}
    assert values(third, "begins") == values(second, "ends")


def test_machines_that_kept_only_their_drives_resume_with_permuted_node_ranks(machines):
    three = [machine.start() for machine in machines[:3]]
    first = train("fsdp", 3, three)
    for machine in three:
        machine.kill()
        machine.lose_memory()
        machine.start()
    second = train("fsdp", 6, [*three[1:], three[0]])
    assert {line[:4] for line in words_after(second, "begins")} == {"at 3"}
    assert values(second, "begins") == values(first, "ends")


def test_machines_resume_with_permuted_node_ranks_while_a_lost_one_is_replaced(machines):
    four = [machine.start() for machine in machines]
    first = train("hsdp", 3, four)
    four[3].lose()
    second = train("hsdp", 6, [four[2], four[0], four[3], four[1]])
    assert {line[:4] for line in words_after(second, "begins")} == {"at 3"}
    assert values(second, "begins") == values(first, "ends")
    third = train("hsdp", 8, four)
    assert {line[:4] for line in words_after(third, "begins")} == {"at 6"}
    assert values(third, "begins") == values(second, "ends")


def test_two_machines_with_two_ranks_each_resume_with_swapped_node_ranks(machines):
    two = [machine.start() for machine in machines[:2]]
    first = train("fsdp", 3, two, local=2)
    second = train("fsdp", 6, two[::-1], local=2)
    assert {line[:4] for line in words_after(second, "begins")} == {"at 3"}
    assert values(second, "begins") == values(first, "ends")


def test_ranks_moved_to_machines_with_older_images_restore_the_newest_step(machines):
    two = [machine.start() for machine in machines[:2]]
    train("ddp", 3, two)
    second = train("ddp", 6, two[:1], local=2)
    third = train("ddp", 8, two)
    assert {line[:4] for line in words_after(second, "begins")} == {"at 3"}
    assert {line[:4] for line in words_after(third, "begins")} == {"at 6"}
    assert values(third, "begins") == values(second, "ends")


def test_machines_with_memory_for_only_one_rank_resume_with_swapped_node_ranks(machines):
    """The images of the ranks that left give way, and then those that came have all their slots."""
    two = [machine.start() for machine in machines[:2]]
    first = train("fsdp", 3, two)
    largest = max(
        slot.stat().st_size for rank, machine in enumerate(two) for slot in machine.slots(rank)
    )
    for machine in two:
        machine.kill()
        machine.start("--memory-limit", str(4 * largest))
    second = train("fsdp", 8, two[::-1])
    assert {line[:4] for line in words_after(second, "begins")} == {"at 3"}
    assert values(second, "begins") == values(first, "ends")
    for rank, machine in enumerate(two[::-1]):
        eventually(lambda machine=machine, rank=rank: len(machine.slots(rank)) >= 3)
        assert machine.slots(1 - rank) == []
        assert machine.get("/v1/status")["warnings"] == []
