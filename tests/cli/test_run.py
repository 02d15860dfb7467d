"""`keepstep run` with real processes: exit codes, signals, restarts, and what stays behind."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import tomllib

from keepstep import processes
from keepstep.processes import Process
from tests import warm
from tests.cli.conftest import LISTENER, TRAIN, Keepstep
from tests.harness import eventually

PYTHON = sys.executable


def test_run_passes_through_the_output_and_exit_code_of_the_command(keepstep: Keepstep) -> None:
    text = "import os, sys; print(sys.stdin.read(), os.environ['KEEPSTEP_SOCKET']); sys.exit(7)"
    done = keepstep("run", "--run", "a", "--", PYTHON, "-c", text, code=7, input="hello")
    assert done.stdout == f"hello {keepstep.memory('a') / 'sidecar.sock'}\n"
    lines = [line for line in done.stderr.splitlines() if line.startswith("keepstep: ")]
    assert len(lines) == 2
    assert "every step is staged" in lines[0]
    assert "the newest 2 committed" in lines[0]
    assert "failed with 7" in lines[1]
    assert "stays for 15m" in lines[1]


def test_the_sidecar_uses_the_settings_of_file_environment_and_flags(
    keepstep: Keepstep, monkeypatch: pytest.MonkeyPatch
) -> None:
    (keepstep.home / "keepstep.toml").write_text("keep = 5\npersist_every = 7\nslots = 5\n")
    monkeypatch.setenv("KEEPSTEP_SLOTS", "3")
    monkeypatch.setenv("KEEPSTEP_KEEP", "4")
    options = ("--run", "a", "--config", "keepstep.toml", "--keep", "9", "--keep-every", "3")
    output = keepstep("run", *options, "--", "false", code=1).stderr
    assert "every 7th step is made durable, the newest 9 committed steps and one every 3" in output
    written = tomllib.loads((keepstep.directory / "a" / "sidecar.toml").read_text())
    expected = {"keep": 9, "keep_every": "3", "persist_every": 7, "slots": 3}
    assert expected.items() <= written.items()
    read = json.loads((keepstep.memory("a") / "sidecar.json").read_text())["config"]
    assert expected.items() <= read.items()


def test_run_reports_before_a_restart_that_the_script_created_no_checkpointer(
    keepstep: Keepstep,
) -> None:
    failed = keepstep("run", "--run", "a", "--restarts", "1", "--", "false", code=1).stderr
    restart, end = failed.splitlines()[-2:]
    assert "restart 1 of 1; it can go on from the beginning: no trainer has connected" in restart
    assert "no trainer has connected" in end
    well = keepstep("run", "--run", "a", "--", "true").stderr
    assert "ended with 0; no trainer has connected; a script makes a keepstep.Checkpointer" in well
    keepstep.script("train.py", TRAIN)
    trained = keepstep("run", "--run", "a", "--", warm.python(), "train.py", "2", "-1").stderr
    assert "no trainer" not in trained


def test_a_problem_of_the_sidecar_is_printed_once_while_the_command_runs(
    keepstep: Keepstep,
) -> None:
    wait = "until [ -e end ]; do sleep 0.1; done"
    options = ("--run", "a", "--archive", "nowhere")
    with keepstep.start("run", *options, "--", "sh", "-c", wait) as process:
        assert process.stderr is not None
        line = next(line for line in process.stderr if "warning" in line)
        (keepstep.home / "end").touch()
        _, rest = process.communicate(timeout=60)
    assert "nowhere is not there; mount it, or make it if it is new" in line
    assert "warning" not in rest


def test_a_persist_interval_that_is_no_multiple_of_the_stage_interval_is_refused(
    keepstep: Keepstep,
) -> None:
    options = ("--stage-every", "3", "--persist-every", "10")
    output = keepstep("run", "--run", "a", *options, "--", "true", code=2).stderr
    assert "10 is no multiple of --stage-every 3" in output
    assert "for example --persist-every 12" in output
    output = keepstep("run", "--run", "a", *options[:3], "21", "--", "true").stderr
    assert "every 3rd step is staged, every 21st step is made durable" in output


def test_the_start_message_names_an_automatic_stage_interval(keepstep: Keepstep) -> None:
    output = keepstep("run", "--run", "a", "--stage-every", "auto", "--", "true").stderr
    assert "as many steps as cost 1 % of the training time are staged, as many as pay" in output


def test_a_clean_end_leaves_no_process_and_no_memory(keepstep: Keepstep) -> None:
    keepstep("run", "--run", "a", "--", PYTHON, "-c", "import keepstep")
    assert keepstep.family() == []
    assert not keepstep.memory("a").exists()


def test_processes_that_the_command_left_running_are_killed(keepstep: Keepstep) -> None:
    # as a worker of a killed torchrun: another session, its parent gone, deaf to SIGTERM
    keepstep.script("worker.sh", "trap '' TERM; echo $$ > worker.pid; exec sleep 600")
    text = "setsid sh worker.sh & while [ ! -s worker.pid ]; do sleep 0.01; done"
    keepstep("run", "--run", "a", "--", "sh", "-c", text)
    assert not psutil.pid_exists(int((keepstep.home / "worker.pid").read_text()))
    assert keepstep.family() == []


BEHIND_A_ZOMBIE = """
import ctypes, os, pathlib, threading, time
pid = os.fork()
if pid == 0:
    os.setsid()
    if os.fork() == 0:
        time.sleep(600)
    threading.Thread(target=time.sleep, args=(600,)).start()
    # as when SIGKILL has ended the first thread, and the others give back their memory yet
    ctypes.CDLL(None).syscall({"x86_64": 60, "aarch64": 93}[os.uname().machine], 0)
while pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z":
    time.sleep(0.01)
"""


def test_child_processes_of_a_zombie_are_killed(keepstep: Keepstep) -> None:
    keepstep("run", "--run", "a", "--", PYTHON, "-S", "-c", BEHIND_A_ZOMBIE)
    assert keepstep.family() == []


def test_a_leftover_process_that_the_first_search_misses_is_killed() -> None:
    checks = iter([()])
    with subprocess.Popen(["sleep", "600"]) as child:

        def find() -> tuple[Process, ...]:
            process = Process.of(child.pid)
            return next(checks, () if process is None else (process,))

        processes.end_processes(find, grace_s=60.0)
        try:
            assert child.poll() == -signal.SIGTERM
        finally:
            child.kill()


def test_a_failed_command_is_restarted_and_resumes_from_memory(keepstep: Keepstep) -> None:
    keepstep.script("train.py", TRAIN)
    done = keepstep("run", "--restarts", "1", "--", warm.python(), "train.py", "6", "3")
    assert done.stdout.splitlines() == ["from None", "from 3"]
    (line,) = [line for line in done.stderr.splitlines() if "restart 1 of 1" in line]
    assert "was killed by SIGKILL (137)" in line
    assert "step 3 of epoch 1 (memory" in line
    assert "newest committed: step 5 of epoch 2 in " in done.stderr
    assert keepstep.family() == []


def test_memory_is_kept_after_a_failure_and_a_second_run_resumes_from_it(
    keepstep: Keepstep,
) -> None:
    command = ("run", "--", warm.python(), keepstep.script("train.py", TRAIN), "6", "3")
    failed = keepstep(*command, code=137)
    assert "keepstep stop --dir" in failed.stderr
    lingering = keepstep.sidecar().pid
    assert keepstep.json("status")["sidecar"]["pid"] == lingering
    again = keepstep(*command)
    assert again.stdout.splitlines() == ["from 3"]
    assert "adopted the sidecar and its memory" in again.stderr
    assert keepstep.family() == []


def test_a_sidecar_that_is_killed_is_replaced_while_the_command_runs(keepstep: Keepstep) -> None:
    wait = "touch ready; while [ ! -e go ]; do sleep 0.01; done"
    with keepstep.start("run", "--run", "a", "--", "sh", "-c", wait) as running:
        eventually((keepstep.home / "ready").exists)
        first = keepstep.sidecar()
        first.kill()
        second = eventually(
            lambda: next((sidecar for sidecar in keepstep.sidecars() if sidecar != first), None)
        )
        assert os.getsid(second.pid) == second.pid, "it must outlive the supervisor's session"
        (keepstep.home / "go").touch()
        _, err = running.communicate(timeout=60)
    assert running.returncode == 0
    assert "the sidecar ended and is started again" in err
    assert keepstep.family() == []


# --- signals ---------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_reaches_the_command_exactly_once(
    keepstep: Keepstep, number: signal.Signals
) -> None:
    script = keepstep.script("listener.py", LISTENER)
    with keepstep.start("run", "--", PYTHON, script) as running:
        eventually((keepstep.home / "ready").exists)
        running.send_signal(number)
        eventually((keepstep.home / "got").exists)
        # sent later and deadly: a second delivery of the first would have come before it
        running.send_signal(signal.SIGUSR2)
        running.communicate(timeout=60)
    assert running.returncode == 128 + signal.SIGUSR2
    assert (keepstep.home / "got").read_text() == str(int(number))


def test_a_command_that_exits_on_sigterm_is_not_restarted_and_its_exit_code_is_returned(
    keepstep: Keepstep,
) -> None:
    script = keepstep.script("listener.py", LISTENER)
    with keepstep.start("run", "--restarts", "5", "--", PYTHON, script) as running:
        eventually((keepstep.home / "ready").exists)
        running.terminate()
        eventually((keepstep.home / "got").exists)
        (keepstep.home / "end").touch()
        _, err = running.communicate(timeout=60)
    assert running.returncode == 3
    assert "restart 1" not in err


def test_ctrl_c_on_a_terminal_reaches_the_command_once_and_it_can_read_from_it(
    keepstep: Keepstep,
) -> None:
    """The terminal signals the whole group, so the supervisor must not forward it again."""
    text = "line = input()\n" + LISTENER.replace('"ready").touch()', '"ready").write_text(line)')
    with keepstep.on_terminal("run", "--", PYTHON, keepstep.script("listener.py", text)) as (
        running,
        terminal,
    ):
        os.write(terminal, b"hello\n")
        eventually(lambda: _text(keepstep.home / "ready") == "hello")
        os.write(terminal, b"\x03")
        eventually((keepstep.home / "got").exists)
        (keepstep.home / "end").touch()
        assert running.wait(60) == 3
        assert _text(keepstep.home / "got") == str(int(signal.SIGINT))


def _text(path: Path) -> str:
    return path.read_text() if path.exists() else ""


# --- wrong use -------------------------------------------------------------------------------


def test_a_missing_command_fails_before_a_sidecar_starts(keepstep: Keepstep) -> None:
    assert "command not found" in keepstep("run", "--", "no-such-program", code=127).stderr
    (keepstep.home / "data").touch()
    assert "not executable" in keepstep("run", "--", "./data", code=126).stderr
    assert not keepstep.directory.exists()


def test_two_supervisors_of_one_run_are_refused(keepstep: Keepstep) -> None:
    with keepstep.start("run", "--run", "a", "--", "sleep", "600") as running:
        eventually((keepstep.memory("a") / "sidecar.sock").exists)
        for words in (("run", "--run", "a", "--", "true"), ("stop", "--run", "a")):
            assert f"pid {running.pid} supervises it" in keepstep(*words, code=2).stderr
        running.terminate()
        running.communicate(timeout=60)
    assert running.returncode == 128 + signal.SIGTERM


def test_the_next_run_is_refused_until_the_trainer_of_a_killed_run_is_ended(
    keepstep: Keepstep,
) -> None:
    stays = 'open("there", "w").write(str(os.getpid())); import time; time.sleep(600)'
    keepstep.script("train.py", TRAIN.replace("os.kill(os.getpid(), 9)", stays))
    launcher = f"echo $$ > launcher; {warm.python()} train.py 6 3; exit 3"
    with keepstep.start("run", "--run", "train", "--", "sh", "-c", launcher) as running:
        eventually(lambda: _text(keepstep.home / "there"))
        running.kill()
    pids = f"{_text(keepstep.home / 'launcher').strip()} {_text(keepstep.home / 'there')}"
    words = ("run", "--run", "train", "--", warm.python(), "train.py", "6", "-1")
    output = keepstep(*words, code=2).stderr
    assert f"is training (pid {pids}, whose `keepstep run` was killed); end that first" in output
    asked = re.search(r"with `(kill [0-9 ]+)`", output)
    assert asked
    subprocess.run(asked[1].split(), check=True)
    killed = {int(pid) for pid in pids.split()}
    eventually(
        lambda: killed.isdisjoint(process.pid for process in keepstep.family()), what="their end"
    )
    assert keepstep(*words).stdout == "from 3\n"
    assert keepstep.family() == []


@pytest.mark.parametrize(
    ("words", "advice"),
    [
        (["--run", "a/b"], "cannot name a run"),
        (["--config", "absent.toml"], "absent.toml cannot be read (no such file)"),
        (["--dir", "/proc/nowhere"], "choose --dir DIR"),
    ],
)
def test_wrong_options_are_usage_errors_that_say_what_to_write(
    keepstep: Keepstep, words: list[str], advice: str
) -> None:
    assert advice in keepstep("run", *words, "--", "true", code=2).stderr


def test_a_sidecar_that_cannot_start_ends_the_run_with_its_log(keepstep: Keepstep) -> None:
    (keepstep.home / "file").touch()
    done = keepstep("run", "--volume", "file/below", "--run", "a", "--", "touch", "ran", code=125)
    assert "the sidecar does not start" in done.stderr
    assert "file/below" in done.stderr
    assert not (keepstep.home / "ran").exists()


def test_help_loads_nothing_heavy() -> None:
    """Help must be quick: tables, HTTP servers and digests are loaded where they are used."""
    heavy = "{'rich', 'aiohttp', 'prometheus_client', 'torch', 'numpy', 'jinja2', 'webbrowser'}"
    code = f"import sys, keepstep_sidecar.cli.main; print({heavy} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


def test_run_prints_that_it_waits_for_the_archive_at_the_end(keepstep: Keepstep) -> None:
    (keepstep.home / "archive").mkdir()
    gone = 'os.rename("archive", "gone"); checkpointer.close(timeout=20)'
    keepstep.script("train.py", TRAIN.replace("checkpointer.close()", gone))
    options = ("--archive", "archive", "--archive-every", "1000", "--persist-every", "1")
    command = ("run", *options, "--", warm.python(), "train.py", "3", "-1")
    with keepstep.start(*command) as process:
        assert process.stderr is not None
        line = next(line for line in process.stderr if "waiting until" in line)
        process.send_signal(signal.SIGINT)
        _, rest = process.communicate(timeout=60)
    assert "shards are in archive" in line
    assert "is not there" in line
    assert "newest committed: step 2" in rest
    assert process.returncode == 0


def test_a_run_that_is_stopped_for_a_while_goes_on(keepstep: Keepstep) -> None:
    """As by Ctrl-Z and `fg`."""
    command = ("run", "--", warm.python(), keepstep.script("listen.py", LISTENER))
    with keepstep.start(*command) as process:
        eventually((keepstep.home / "ready").exists)
        for _ in range(3):
            process.send_signal(signal.SIGSTOP)
            time.sleep(1.0)
            process.send_signal(signal.SIGCONT)
            time.sleep(0.3)
            assert process.poll() is None
        (keepstep.home / "end").touch()
        process.communicate(timeout=60)
    assert process.returncode == 3
