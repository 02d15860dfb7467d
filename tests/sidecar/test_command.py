"""The command line as a pod uses it: configured by environment, probed, flushed, prepared."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import socket
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from trainer import FakeTrainer

from keepstep_sidecar.cli import calls
from keepstep_sidecar.cli.sidecar import program
from tests.harness import SidecarProcess, eventually, free_port

Trainers = Callable[..., FakeTrainer]
COMMAND = (sys.executable, "-m", "keepstep_sidecar")
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="gives directories to another user")


def run(*words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*COMMAND, *words],
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
        env={**os.environ, **environment},
    )


def test_the_sidecar_without_a_subcommand_runs_serve(tmp_path: Path) -> None:
    words = ["--run", "a", "--slots", "3"]
    context = program.make_context("keepstep-sidecar", list(words))
    assert [*context._protected_args, *context.args] == ["serve", *words]
    assert run("--probe", "--memory-dir", str(tmp_path)).returncode == 2


def test_a_cleaning_option_is_refused_by_commands_that_do_not_clean(tmp_path: Path) -> None:
    done = run("prepare", str(tmp_path / "run"), "--gone-since", "1")
    assert done.returncode == 2
    assert "--gone-since" in done.stderr
    assert not (tmp_path / "run").exists()


def test_a_probe_imports_no_server_modules() -> None:
    heavy = "{'asyncio', 'http.client', 'msgspec', 'ssl', 'keepstep.wire', 'keepstep.core'}"
    code = f"import sys, keepstep_sidecar.__main__; print({heavy} & set(sys.modules))"
    found = subprocess.check_output([sys.executable, "-c", code], text=True)
    assert found.strip() == "set()"


def test_a_probe_reads_the_memory_directory_from_a_config_file_too(
    sidecar: SidecarProcess, tmp_path: Path
) -> None:
    file = tmp_path / "keepstep.toml"
    file.write_text(f'memory_dir = "{sidecar.memory}"\n')
    assert run("probe", "--config", str(file)).returncode == 0
    assert run("probe", KEEPSTEP_CONFIG=str(file)).returncode == 0
    file.write_text("memory_dir = 3\n")
    assert (done := run("probe", "--config", str(file))).returncode == 2
    assert f"{file}: memory_dir" in done.stderr


def test_a_probe_waits_for_a_sidecar_that_starts(sidecar: SidecarProcess) -> None:
    sidecar.kill()
    sidecar.socket.unlink()
    probe = subprocess.Popen([*COMMAND, "probe", "--memory-dir", str(sidecar.memory)])
    sidecar.start()
    assert probe.wait(10) == 0


def test_the_exit_code_of_a_probe_reflects_whether_the_sidecar_answers(
    sidecar: SidecarProcess,
) -> None:
    assert run("probe", "--memory-dir", str(sidecar.memory)).returncode == 0
    assert run("probe", KEEPSTEP_MEMORY_DIR=str(sidecar.memory)).returncode == 0
    sidecar.kill()
    assert run("probe", "--memory-dir", str(sidecar.memory)).returncode == 1


def test_a_start_hook_never_keeps_a_trainer_from_starting(
    sidecar: SidecarProcess, tmp_path: Path
) -> None:
    memory = ("--memory-dir", str(sidecar.memory))
    up = run("probe", "--started", *memory)
    assert (up.returncode, up.stderr.strip().endswith("training begins")) == (0, True)
    assert sidecar.process is not None
    sidecar.process.send_signal(signal.SIGSTOP)
    hung = run("probe", "--started", "--timeout", "0.5s", *memory)
    sidecar.process.send_signal(signal.SIGCONT)
    assert hung.returncode == 0
    assert "no sidecar answers" in hung.stderr
    assert run("probe", "--started", "--timeout", "0.1s").returncode == 0, "and no directory named"


def test_the_health_check_fails_on_problems_although_the_sidecar_answers(
    sidecars: Callable[..., SidecarProcess], trainers: Trainers
) -> None:
    sidecar = sidecars().start(KEEPSTEP_FAULTS="write.data:eio")
    memory = ("--memory-dir", str(sidecar.memory))
    assert run("probe", "--healthy", *memory).returncode == 0
    trainer = trainers(sidecar.socket).begin_run()
    trainer.stage(1)
    eventually(lambda: sidecar.get("/v1/status")["volumes"][0]["failed"])
    done = run("probe", "--healthy", *memory)
    assert done.returncode == 1
    assert "injected at write.data" in done.stderr
    assert run("probe", *memory).returncode == 0
    assert trainer.wait(trainer.stage(2), "committed", flush=True).reached
    assert run("probe", "--healthy", *memory).returncode == 0, "the volume works again"


def test_a_flush_prints_what_is_durable(
    sidecars: Callable[..., SidecarProcess], trainers: Trainers
) -> None:
    sidecar = sidecars().start("--persist-every", "1000000", "--slots", "3")
    memory = ("--memory-dir", str(sidecar.memory))
    nothing = run("flush", *memory)
    assert (nothing.returncode, nothing.stdout.split()[0]) == (0, "nothing")
    trainer = trainers(sidecar.socket).begin_run()
    ids = [trainer.stage(step) for step in range(1, 4)]
    done = run("flush", "--flush-timeout", "20s", *memory)
    assert done.stdout.splitlines() == [f"step {step_id} is durable" for step_id in ids[1:]]
    assert done.returncode == 0


def test_status_steps_and_verify_work_inside_the_sidecar_container(
    sidecars: Callable[..., SidecarProcess], trainers: Trainers, tmp_path: Path
) -> None:
    sidecar = sidecars().start()
    trainer = trainers(sidecar.socket).begin_run()
    assert trainer.wait(trainer.stage(4), "committed").reached
    pod = {
        "KEEPSTEP_RUN": sidecar.run,
        "KEEPSTEP_MEMORY_DIR": str(sidecar.memory),
        "KEEPSTEP_VOLUMES": str(sidecar.volume),
    }
    (tmp_path / "anywhere").mkdir()

    def command(*words: str, **environment: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "keepstep_sidecar.cli", *words],
            capture_output=True,
            text=True,
            timeout=30,
            cwd=tmp_path / "anywhere",
            env={**os.environ, **environment},
        )

    status = command("status", **pod)
    assert status.returncode == 0, status.stderr
    assert str(sidecar.root) in status.stdout
    assert "step 4 of epoch" in status.stdout
    assert "sidecar.log" not in status.stdout
    steps = json.loads(command("steps", "--json", **pod).stdout)["steps"]
    assert [step["step"] for step in steps] == [4]
    assert "every digest is right" in command("verify", **pod).stdout
    other = command("status", "--run", "another", **pod)
    assert (other.returncode, "no run 'another'" in other.stderr) == (2, True)
    assert command("stop", **pod).returncode == 2, "it is the pod's to end"
    assert command("status").returncode == 2
    assert not [*sidecar.root.glob("run.lock"), *sidecar.root.glob("sidecar.*")]


def test_metrics_are_served_over_tcp_and_nothing_else_is(
    sidecars: Callable[..., SidecarProcess],
) -> None:
    port = free_port()
    sidecars().start("--metrics-port", str(port))

    def ask(route: str) -> tuple[int, bytes]:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
        try:
            connection.request("GET", route)
            response = connection.getresponse()
            return response.status, response.read()
        finally:
            connection.close()

    assert ask("/healthz")[0] == 200
    assert b"keepstep_last_report_timestamp_seconds" in ask("/metrics")[1]
    assert ask("/v1/status")[0] == 404


def test_a_taken_metrics_port_does_not_stop_the_sidecar_and_is_used_once_free(
    sidecars: Callable[..., SidecarProcess],
) -> None:
    with socket.create_server(("0.0.0.0", 0)) as taken:
        port = taken.getsockname()[1]
        sidecar = sidecars().start("--metrics-port", str(port))
        (warning,) = sidecar.get("/v1/status")["warnings"]
        assert f"port {port} cannot be opened (Address already in use)" in warning
        assert "sidecar.ports.metrics" in warning

    def scraped() -> bool:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
        with contextlib.closing(connection), contextlib.suppress(OSError):
            connection.request("GET", "/metrics")
            return connection.getresponse().status == 200
        return False

    eventually(scraped)
    assert sidecar.get("/v1/status")["warnings"] == []
    assert sidecar.text().count('"metrics.port_unavailable"') == 1


def test_training_and_sidecar_both_work_when_the_script_opens_the_metrics_port_first(
    sidecars: Callable[..., SidecarProcess], tmp_path: Path
) -> None:
    """The sidecar is restarted while the script listens on both of the sidecar's ports."""
    with (
        socket.create_server(("0.0.0.0", 0)) as metrics,
        socket.create_server(("0.0.0.0", 0)) as peers,
    ):
        options = ("--metrics-port", str(metrics.getsockname()[1]))
        address = f"127.0.0.1:{peers.getsockname()[1]}"
        options += ("--nodes", "2", "--leader", address, "--peer-listen", address)
        sidecar = sidecars().start(*options, KEEPSTEP_SECRET="a secret of the tests")
        trainer = FakeTrainer(sidecar.socket).begin_run()
        assert trainer.wait(trainer.stage(1), "durable").reached
        trainer.disconnect()
        warnings = " ".join(sidecar.get("/v1/status")["warnings"])
        assert "no metrics are served" in warnings
        assert "peers are not served" in warnings

    def is_served() -> bool:
        warnings = sidecar.get("/v1/status")["warnings"]
        return [line.partition(":")[0] for line in warnings] == ["no connection from node ranks 1"]

    eventually(is_served, what="only the other machine is missing")


def test_the_linger_time_of_a_sidecar_starts_only_after_its_owner_has_exited(
    sidecars: Callable[..., SidecarProcess],
) -> None:
    with subprocess.Popen(["sleep", "600"]) as owner:
        sidecar = sidecars().start("--linger", "0.3", "--owner-pid", str(owner.pid))
        assert sidecar.process is not None
        with pytest.raises(subprocess.TimeoutExpired):
            sidecar.process.wait(1.5)
        owner.kill()
    assert sidecar.process.wait(20) == 0


def test_an_adopted_sidecar_ends_with_its_new_owner_and_not_the_old_one(
    sidecars: Callable[..., SidecarProcess],
) -> None:
    with subprocess.Popen(["sleep", "600"]) as first, subprocess.Popen(["sleep", "600"]) as second:
        sidecar = sidecars().start("--linger", "0.3", "--owner-pid", str(first.pid))
        assert sidecar.process is not None
        calls.register_owner_process(sidecar.socket, second.pid)
        first.kill()
        with pytest.raises(subprocess.TimeoutExpired):
            sidecar.process.wait(1.5)
        second.kill()
    assert sidecar.process.wait(20) == 0


def test_a_flush_ignores_the_write_rate_limit(
    sidecars: Callable[..., SidecarProcess], trainers: Trainers
) -> None:
    limit = ("--bytes-per-second", "1Mi", "--persist-every", "1000000")
    sidecar = sidecars().start(*limit)
    trainer = trainers(sidecar.socket, size=64 << 20).begin_run()
    trainer.stage(1)
    done = run("flush", "--memory-dir", str(sidecar.memory))
    assert done.returncode == 0, done.stderr
    assert sidecar.get("/v1/status")["persist_seconds"] < 40.0


@pytest.mark.root
@needs_root
def test_prepare_makes_a_directory_and_gives_it_to_the_sidecar(tmp_path: Path) -> None:
    directory = tmp_path / "team-a" / "gpt" / "0"
    for _ in range(2):
        done = run("prepare", str(directory), str(tmp_path / "other"))
        assert done.returncode == 0, done.stderr
    for path in (directory, tmp_path / "other"):
        found = path.stat()
        assert (found.st_uid, found.st_gid, stat.S_IMODE(found.st_mode)) == (65532, 65532, 0o2770)
    passage = directory.parent.stat()
    assert (passage.st_uid, passage.st_gid, stat.S_IMODE(passage.st_mode)) == (0, 65532, 0o750)


@pytest.mark.root
@needs_root
def test_prepare_bounds_the_compile_caches_of_each_user(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    place, elsewhere = tmp_path / "0" / ".compile-cache", tmp_path / "elsewhere"
    words = (str(tmp_path / "0"), "--compile-cache", str(place), "--compile-cache-limit", "1Mi")
    assert run("prepare", *words).returncode == 0
    assert (place.stat().st_uid, stat.S_IMODE(place.stat().st_mode)) == (65532, 0o2770)
    elsewhere.mkdir()
    (elsewhere / "precious").write_bytes(bytes(2 << 20))
    for user, size_bytes in ((1000, 2 << 20), (1001, 4096)):
        (place / str(user)).mkdir(mode=0o700)
        (place / str(user) / "one.so").write_bytes(bytes(size_bytes))
        (place / str(user) / "link").symlink_to(elsewhere)
        os.chown(place / str(user), user, user)
    (place / "1002").symlink_to(elsewhere)
    limited = ("setpriv", "--bounding-set=-all,+chown,+dac_override,+fowner", "--inh-caps=-all")
    subprocess.run([*limited, *COMMAND, "prepare", *words], check=True, timeout=30)
    assert sorted(path.name for path in place.iterdir()) == ["1001", "1002"]
    assert (elsewhere / "precious").exists()


def test_the_agent_commands_name_missing_options(tmp_path: Path) -> None:
    done = run("agent", "serve", "--peer-listen", ":26741", str(tmp_path))
    assert (done.returncode, done.stdout) == (2, "")
    assert "Missing --report-url, --report-ca-file, --report-token-file." in done.stderr
    done = run("agent", "clean", str(tmp_path))
    assert (done.returncode, "Missing option '--after'" in done.stderr) == (2, True)


@pytest.mark.root
@needs_root
def test_prepare_needs_no_more_than_three_capabilities(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    directory = tmp_path / "team-a" / "gpt" / "0"
    kept = "-all,+chown,+dac_override,+fowner"
    limited = ("setpriv", f"--bounding-set={kept}", "--inh-caps=-all")
    done = subprocess.run(
        [*limited, *COMMAND, "prepare", str(directory)],
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert stat.S_IMODE(directory.stat().st_mode) == 0o2770


@pytest.mark.root
@needs_root
@pytest.mark.parametrize("link", ["team-a", "team-a/gpt", "team-a/gpt/0"])
def test_prepare_follows_no_link_below_the_mount(tmp_path: Path, link: str) -> None:
    target = tmp_path / "elsewhere"
    target.mkdir(mode=0o700)
    path = tmp_path / "host" / link
    path.parent.mkdir(parents=True)
    path.symlink_to(target)
    done = run("prepare", str(tmp_path / "host" / "team-a" / "gpt" / "0"))
    assert done.returncode == 1
    assert "a link is not followed" in done.stderr
    assert list(target.iterdir()) == []
    assert target.stat().st_uid == 0
