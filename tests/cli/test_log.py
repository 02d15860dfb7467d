"""The sidecar's log is bounded, while a live sidecar goes on appending to it."""

from __future__ import annotations

from pathlib import Path

import pytest

from keepstep_sidecar.cli.sidecar_launcher import limit_log


def test_a_large_log_is_rotated_and_its_writer_continues_in_the_new_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("keepstep_sidecar.cli.sidecar_launcher.LOG_LIMIT_BYTES", 10)
    path = tmp_path / "sidecar.log"
    with path.open("ab", buffering=0) as writer:  # O_APPEND, as the sidecar's
        writer.write(b"0123456789\n")
        limit_log(path)
        writer.write(b"next\n")
    assert path.read_bytes() == b"next\n"
    assert (tmp_path / "sidecar.log.1").read_bytes() == b"0123456789\n"


def test_a_small_log_and_a_missing_one_are_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "sidecar.log"
    limit_log(path)
    path.write_bytes(b"short\n")
    limit_log(path)
    assert [path.name for path in tmp_path.iterdir()] == ["sidecar.log"]
