"""`keepstep doctor` on real directories, mounts and this machine; it changes nothing."""

from __future__ import annotations

import contextlib
import pwd
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from keepstep_sidecar.cli.commands import doctor as machine
from keepstep_sidecar.cli.commands.doctor import Finding, Outcome, RunRequirements
from keepstep_sidecar.memory.slot_directories import free_huge_bytes
from tests.cli.conftest import Keepstep

MIB = 1 << 20
UNKNOWN = RunRequirements(image_bytes=None, ranks=1, slots=4)


@contextlib.contextmanager
def mounted(place: Path, kind: str, options: str) -> Iterator[Path]:
    place.mkdir()
    mount = ["mount", "-t", kind, "-o", options, "none", str(place)]
    if subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("nothing may be mounted here")
    try:
        yield place
    finally:
        subprocess.run(["umount", str(place)], check=True)


def findings(place: Path, need: RunRequirements = UNKNOWN, **options: Any) -> dict[str, Finding]:
    settings: dict[str, Any] = {"volumes": 1, "probe_bytes": 16 * MIB, "clock": lambda: 0.0}
    found = machine.check_drive(place, need, **{**settings, **options})
    return {finding.name.partition(" ")[0]: finding for finding in found}


def test_doctor_passes_on_a_healthy_machine_and_leaves_no_file(
    keepstep: Keepstep, tmp_path: Path
) -> None:
    place = tmp_path / "drive"
    place.mkdir()
    words = ("doctor", "--volume", str(place), "--state", "1Mi", "--probe-size", "16Mi")
    answer = keepstep.json(*words)
    assert answer["ok"]
    names = {check["name"].partition(" ")[0] for check in answer["checks"]}
    memory = {"shared", "huge", "memlock", "RemoveIPC"}
    assert names == {"python", "torch", "keepstep", "space", "O_DIRECT", "speed", *memory}
    assert not list(place.iterdir())
    assert not keepstep.directory.exists()
    assert "ok       torch: " in keepstep(*words).stdout


def test_doctor_exits_with_1_and_prints_what_to_change(keepstep: Keepstep) -> None:
    shown = keepstep("doctor", "--state", "900Ti", "--probe-size", "8Mi", code=1).stdout
    assert "missing  shared memory" in shown
    assert "missing  space" in shown
    assert "change: " in shown
    assert not keepstep.json("doctor", "--volume", "/proc", code=1)["ok"]
    assert "no size" in keepstep("doctor", "--state", "0", code=2).stderr


def test_doctor_compares_the_state_size_with_available_memory_and_space(keepstep: Keepstep) -> None:
    checks = keepstep.json("doctor", "--state", "1Mi", "--probe-size", "8Mi")["checks"]
    found = {check["name"].partition(" ")[0]: check["found"] for check in checks}
    assert "3.00 MiB needed" in found["shared"]
    several = keepstep("doctor", "--nodes", "2", "--state", "1Mi", "--probe-size", "8Mi").stdout
    assert "4.00 MiB needed" in several
    assert "needed" in found["space"]
    assert "a step of all ranks" in found["speed"]
    need = RunRequirements(image_bytes=10, ranks=4, slots=4)
    assert (need.memory_bytes, need.volume_bytes(2)) == (160, 60)


@pytest.mark.root
def test_shared_memory_has_room_for_all_slots_for_one_or_for_none(tmp_path: Path) -> None:
    with mounted(tmp_path / "shm", "tmpfs", "size=64M") as place:

        def outcome(image_bytes: int | None, slots: int) -> Outcome:
            need = RunRequirements(image_bytes=image_bytes, ranks=1, slots=slots)
            return machine.check_shared_memory(place, need).outcome

        room = 64 * MIB + free_huge_bytes()
        assert outcome(room // 8, 4) is Outcome.OK
        assert outcome(room * 9 // 10, 4) is Outcome.SLOW
        assert outcome(room * 2, 4) is Outcome.MISSING
        assert outcome(None, 4) is Outcome.SLOW
    assert machine.check_shared_memory(tmp_path / "absent", UNKNOWN).outcome is Outcome.MISSING


@pytest.mark.root
def test_doctor_reports_drives_that_are_full_read_only_or_without_direct_io(tmp_path: Path) -> None:
    with mounted(tmp_path / "small", "tmpfs", "size=4M") as place:
        assert findings(place)["space"].outcome is Outcome.MISSING
        assert not list(place.iterdir())
    with mounted(tmp_path / "read-only", "tmpfs", "size=64M,ro") as place:
        (found,) = findings(place).values()
        assert found.outcome is Outcome.MISSING
        assert "writable" in found.change
    with mounted(tmp_path / "ramfs", "ramfs", "mode=755") as place:
        found = findings(place)["O_DIRECT"]
        assert found.outcome is Outcome.SLOW
        assert "refused" in found.found


def test_doctor_warns_when_logind_would_remove_shared_memory(tmp_path: Path) -> None:
    """For a user that people log in as; whichever has an account here."""
    user = next((user for user in pwd.getpwall() if user.pw_uid >= 1000), None)
    uid = 4321 if user is None else user.pw_uid
    etc = tmp_path / "etc/systemd"

    def outcome(uid: int = uid) -> Outcome:
        return machine.check_remove_ipc(tmp_path, uid).outcome

    assert outcome() is Outcome.OK, "no systemd"
    (tmp_path / "run/systemd/system").mkdir(parents=True)
    assert outcome() is Outcome.SLOW, "its default"
    assert outcome(uid=999) is Outcome.OK
    (etc / "logind.conf.d").mkdir(parents=True)
    (etc / "logind.conf").write_text("[Login]\n#RemoveIPC=yes\nRemoveIPC=no\n")
    assert outcome() is Outcome.OK
    (etc / "logind.conf.d/10-ours.conf").write_text("[Login]\nRemoveIPC=yes\n")
    assert outcome() is Outcome.SLOW, "a drop-in counts more"
    (etc / "logind.conf.d/20-mine.conf").write_text("not a section")
    assert outcome() is Outcome.SLOW
    if user is not None:
        lingers = tmp_path / "var/lib/systemd/linger"
        lingers.mkdir(parents=True)
        (lingers / user.pw_name).touch()
        assert outcome() is Outcome.OK
