"""What injection writes is what the sidecar's command line reads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from keepstep.core.retention import Retention
from keepstep_operator.injection import inject
from keepstep_sidecar.cli.sidecar import program
from keepstep_sidecar.config.sidecar import (
    SETTINGS,
    ArchiveConfig,
    Config,
    PeerSettings,
    given_values,
)
from tests.operator.injection.pods import DEFAULTS, EMPTY_DIR, HOST_PATH, policy, pytorch_job


@pytest.fixture
def containers(monkeypatch: pytest.MonkeyPatch) -> dict[str, dict[str, Any]]:
    """The init containers by name; the sidecar's environment is this process's."""
    rules = policy(
        EMPTY_DIR,
        HOST_PATH,
        stage={"every": 5},
        persist={"mode": "Fixed", "every": 100},
        retention={"local": {"last": 3, "every": "12h"}, "archive": {"last": 5, "every": "6h"}},
        sidecar={"ioThreadsPerVolume": 2, "bytesPerSecondLimit": "1Gi"},
        peers={"replicas": 2, "bytesPerSecondLimit": "500Mi"},
        archive={
            "s3": {"bucket": "ckpt", "endpoint": "http://10.0.0.1:7070", "region": "eu-1"},
            "every": 500,
        },
    )
    made = inject(pytorch_job(), rules, DEFAULTS)["spec"]["initContainers"]
    by_name = {pod["name"]: pod for pod in made}
    for variable in by_name["keepstep-sidecar"]["env"]:
        if variable["name"].startswith("KEEPSTEP_") and "value" in variable:
            value = variable["value"].replace("$(KEEPSTEP_POD_IP)", "10.0.0.7")
            monkeypatch.setenv(variable["name"], value)
    return by_name


@pytest.mark.usefixtures("containers")
def test_the_sidecar_parses_every_injected_setting() -> None:
    config = Config.from_values(given_values())
    assert config.run == "gpt-3f6a1f0e"
    assert config.memory_dir == Path("/run/keepstep")
    assert config.volumes == (Path("/keepstep/volumes/scratch"), Path("/keepstep/volumes/nvme0"))
    assert (config.slots, config.io_threads, config.metrics_port) == (4, 2, 26740)
    assert config.ui_port == 26742
    assert config.flush_timeout_s == 60.0
    assert config.reporting is not None
    assert config.reporting.url.startswith(DEFAULTS.reports_url)
    assert config.reporting.ca == DEFAULTS.reports_ca
    assert (config.stage_every, config.persist_every) == (5, 100)
    assert config.retention == Retention(last=3, every_s=12 * 3600)
    assert (config.memory_limit_bytes, config.capacity_bytes) == (2 << 30, 95 << 30)
    assert config.bytes_per_second == 1 << 30
    assert config.peer_settings == PeerSettings(
        listen=":26741", advertise="10.0.0.7:26741", replicas=2, bytes_per_second=500 << 20
    )
    assert config.archive_config == ArchiveConfig(
        url="s3://ckpt/team-a",
        every=500,
        endpoint="http://10.0.0.1:7070",
        region="eu-1",
        retention=Retention(last=5, every_s=21600),
    )


def test_persist_auto_passes_the_drive_wear_limit_to_the_sidecar(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rules = policy(EMPTY_DIR, stage={"every": 5}, persist={"driveWritesPerDay": "0.3"})
    sidecar = inject(pytorch_job(), rules, DEFAULTS)["spec"]["initContainers"][0]
    for variable in sidecar["env"]:
        if variable["name"].startswith("KEEPSTEP_") and "value" in variable:
            monkeypatch.setenv(variable["name"], variable["value"])
    config = Config.from_values(given_values())
    assert (config.persist_every, config.drive_writes_per_day) == (None, 0.3)
    assert config.persist_grid_interval == 5


def test_stage_auto_lets_the_sidecar_choose_the_stage_interval_by_cost(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sidecar = inject(pytorch_job(), policy(EMPTY_DIR, stage={"mode": "Auto"}), DEFAULTS)
    for variable in sidecar["spec"]["initContainers"][0]["env"]:
        if variable["name"].startswith("KEEPSTEP_") and "value" in variable:
            monkeypatch.setenv(variable["name"], variable["value"])
    assert Config.from_values(given_values()).stages_by_cost


def test_every_injected_variable_is_read_by_the_sidecar(
    containers: dict[str, dict[str, Any]],
) -> None:
    written = {
        variable["name"]
        for variable in containers["keepstep-sidecar"]["env"]
        if variable["name"].startswith("KEEPSTEP_")
    } - {"KEEPSTEP_POD_IP", "KEEPSTEP_UI_SECRET"}
    assert len(written) > 20
    assert written <= {setting.variable for setting in SETTINGS}


def test_the_injected_probe_flush_and_prepare_commands_exist_in_the_sidecar(
    containers: dict[str, dict[str, Any]],
) -> None:
    sidecar = containers["keepstep-sidecar"]
    commands = [
        sidecar["lifecycle"]["postStart"]["exec"]["command"],
        sidecar["lifecycle"]["preStop"]["exec"]["command"],
        containers["keepstep-volumes"]["command"],
    ]
    found = []
    for name, *arguments in commands:
        assert name == "keepstep-sidecar"
        context = program.make_context(name, arguments)
        name, command, rest = program.resolve_command(
            context, [*context._protected_args, *context.args]
        )
        assert command is not None
        found.append((name, command.make_context(name, rest).params))
    (probe, waiting), (flush, _), (prepare, made) = found
    assert (probe, flush, prepare) == ("probe", "flush", "prepare")
    assert (waiting["started"], waiting["timeout_s"]) == (True, 120.0)
    assert made["directories"] == (Path("/host/nvme0/team-a/gpt-3f6a1f0e/1"),)
