"""What injection writes is what the sidecar's command line reads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from keepstep_operator.injection import inject
from keepstep_sidecar.__main__ import main
from tests.operator.injection.pods import DEFAULTS, EMPTY_DIR, HOST_PATH, policy, pytorch_job


@pytest.fixture
def containers(monkeypatch: pytest.MonkeyPatch) -> dict[str, dict[str, Any]]:
    """The init containers by name; the sidecar's environment is this process's."""
    wanted = policy(
        EMPTY_DIR,
        HOST_PATH,
        stage={"every": 5},
        persist={"mode": "Fixed", "every": 100},
        retention={"local": {"last": 3, "every": "12h"}, "archive": {"last": 5, "every": "6h"}},
        restore={"verify": "Seal"},
        sidecar={"ioThreadsPerVolume": 2, "bytesPerSecondLimit": "1Gi"},
        peers={"replicas": 2, "bytesPerSecondLimit": "500Mi"},
        archive={
            "s3": {"bucket": "ckpt", "endpoint": "http://10.0.0.1:7070", "region": "eu-1"},
            "every": 500,
        },
    )
    made = inject(pytorch_job(), wanted, DEFAULTS)["spec"]["initContainers"]
    by_name = {one["name"]: one for one in made}
    for one in by_name["keepstep-sidecar"]["env"]:
        if one["name"].startswith("KEEPSTEP_") and "value" in one:
            value = one["value"].replace("$(KEEPSTEP_POD_IP)", "10.0.0.7")
            monkeypatch.setenv(one["name"], value)
    return by_name


@pytest.mark.usefixtures("containers")
def test_the_sidecar_understands_every_setting() -> None:
    given = main.make_context("keepstep-sidecar", []).params
    assert given["run"] == "gpt-3f6a1f0e"
    assert given["memory_dir"] == Path("/run/keepstep")
    assert given["volumes"] == (
        Path("/keepstep/volumes/scratch"),
        Path("/keepstep/volumes/nvme0"),
    )
    assert given["slots"] == 4
    assert given["verify"] == "seal"
    assert given["report_url"].startswith(DEFAULTS.reports_url)
    assert given["report_ca"] == DEFAULTS.reports_ca
    assert given["metrics_port"] == 9464
    found = {name: given.get(name) for name in ("stage_every", "persist_every", "keep")}
    assert found == {"stage_every": 5, "persist_every": 100, "keep": 3}
    assert given["keep_every"] == (None, 12 * 3600)
    assert given["io_threads"] == 2
    assert given["peer_listen"] == ":9465"
    assert given["peer_advertise"] == "10.0.0.7:9465"
    assert (given["peer_replicas"], given["peer_bytes_per_second"]) == (2, 500 << 20)
    assert given["archive"] == "s3://ckpt/team-a"
    found = {name: given[f"archive_{name}"] for name in ("every", "keep", "endpoint", "region")}
    assert found == {
        "every": 500,
        "keep": 5,
        "endpoint": "http://10.0.0.1:7070",
        "region": "eu-1",
    }
    assert given["archive_keep_every"] == (None, 21600)
    sizes = {value for value in given.values() if isinstance(value, int)}
    assert {2 << 30, 95 << 30, 1 << 30} <= sizes, "memory limit, capacity, bytes per second"
    assert 60 in (given["flush_timeout"], given.get("flush_timeout_s"))


@pytest.mark.usefixtures("containers")
def test_every_variable_is_one_that_the_sidecar_reads(
    containers: dict[str, dict[str, Any]],
) -> None:
    context = main.make_context("keepstep-sidecar", [])
    read = {one.value_from_envvar(context) is not None and one.name for one in main.params}
    written = [
        one["name"]
        for one in containers["keepstep-sidecar"]["env"]
        if one["name"].startswith("KEEPSTEP_") and "value" in one
    ]
    assert len(read - {False}) == len(written), (read, written)


def test_start_flush_and_prepare_are_actions_of_the_sidecar(
    containers: dict[str, dict[str, Any]],
) -> None:
    sidecar = containers["keepstep-sidecar"]
    commands = [
        sidecar["lifecycle"]["postStart"]["exec"]["command"],
        sidecar["lifecycle"]["preStop"]["exec"]["command"],
        containers["keepstep-volumes"]["command"],
    ]
    for (program, *arguments), action in zip(
        commands, ("started", "flush", "prepare"), strict=True
    ):
        assert program == "keepstep-sidecar"
        given = main.make_context(program, arguments).params
        assert given[action] is True
    assert given["directories"] == (Path("/host/nvme0/team-a/gpt-3f6a1f0e/1"),)
