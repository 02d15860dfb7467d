"""A gone run's directory goes, whole or not at all, and nothing else does."""

from __future__ import annotations

import http.server
import json
import math
import os
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from keepstep.directory import OpenDirectory
from keepstep.errors import StorageError
from keepstep_sidecar.agent.clean import ApiServer, Cleaner, StillUsedError, remove_run_directory
from keepstep_sidecar.agent.run_directories import prepare_directory
from keepstep_sidecar.volume.volume import FileLock
from tests.certificates import make_certificate
from tests.harness import eventually


def _run(tmp_path: Path, name: str = "gpt") -> Path:
    """`<volume>/<namespace>/<run>` with two node ranks; returns the run's directory."""
    for rank in ("0", "1"):
        step = tmp_path / "team" / name / rank / name / "0001.aaaaaaaa-000000040"
        step.mkdir(parents=True)
        (step / "rank-00000-of-00002.safetensors").write_bytes(b"x")
        FileLock(step.parent / ".lock").release()
    return tmp_path / "team" / name


def _clean(run: Path, *, gone_since: float = math.inf) -> int:
    return remove_run_directory(
        OpenDirectory.open_path(run.parent), run.name, gone_since=gone_since
    )


def test_a_run_that_a_sidecar_still_uses_is_not_removed(tmp_path: Path) -> None:
    run = _run(tmp_path)
    lock = FileLock(run / "1" / "gpt" / ".lock")
    with pytest.raises(StillUsedError, match=r"1/gpt: a sidecar uses it.*nothing was removed"):
        _clean(run)
    assert len(list(run.rglob("*.safetensors"))) == 2
    lock.release()
    _clean(run)
    assert not run.exists()


def test_a_run_that_wrote_files_after_its_object_was_deleted_is_not_removed(
    tmp_path: Path,
) -> None:
    run = _run(tmp_path)
    gone = time.time() + 3600.0
    (run / "0" / "gpt" / "run.json").write_text("{}")
    for path in (run / "1" / "gpt", run / "0" / "gpt" / "run.json"):
        os.utime(path, (gone + 900.0, gone + 900.0))
        with pytest.raises(StillUsedError, match="written to after the run was gone"):
            _clean(run, gone_since=gone)
        os.utime(path, (gone - 1.0, gone - 1.0))
    assert _clean(run, gone_since=gone) == 5


def test_no_link_within_a_run_is_followed(tmp_path: Path) -> None:
    run, precious = _run(tmp_path), tmp_path / "precious"
    precious.mkdir()
    (precious / "file").write_bytes(b"x")
    (run / "0" / "gpt" / "link").symlink_to(precious)
    (run / "1" / "gpt" / "0001.aaaaaaaa-000000040" / "link").symlink_to(precious)
    _clean(run)
    assert not run.exists()
    assert (precious / "file").exists()


def test_compile_caches_are_removed_with_their_run_and_do_not_delay_its_removal(
    tmp_path: Path,
) -> None:
    run = _run(tmp_path)
    cache = run / "0" / ".compile-cache" / "1000" / "inductor"
    cache.mkdir(parents=True)
    (cache / "one.so").write_bytes(b"x")
    _clean(run)
    assert not run.exists()


@pytest.fixture
def deep(tmp_path: Path) -> Iterator[Path]:
    """A run with a tree of 2,000 levels, which pytest itself could not remove."""
    run = _run(tmp_path)
    fd = os.open(run / "0" / "gpt", os.O_RDONLY)
    for depth in range(2000):
        os.mkdir("0", dir_fd=fd)
        if depth % 500 == 0:
            os.close(os.open("file", os.O_WRONLY | os.O_CREAT, 0o600, dir_fd=fd))
        deeper = os.open("0", os.O_RDONLY, dir_fd=fd)
        os.close(fd)
        fd = deeper
    os.close(fd)
    yield run
    subprocess.run(["rm", "-rf", str(tmp_path)], check=True)


def test_a_directory_tree_of_any_depth_is_removed_without_leaking_descriptors(deep: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    assert _clean(deep) == 4 + 4
    assert list(deep.parent.iterdir()) == []
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize("name", ["A..b", ".gpt", "gpt_2", "x" * 64])
def test_only_directories_with_a_valid_run_name_are_removed(tmp_path: Path, name: str) -> None:
    run, node = _run(tmp_path, name), Node(tmp_path, grace_s=0.0)
    node.round()
    assert node.asked == []
    assert len(list(run.rglob("*.safetensors"))) == 2


@pytest.mark.parametrize(
    ("place", "kind"),
    [
        *((place, kind) for place in ("file", "2", "0/gpt-2") for kind in ("file", "link", "pipe")),
        *((place, "directory") for place in ("others", "0/gpt-2")),
    ],
)
def test_a_run_directory_with_foreign_files_beside_its_node_ranks_is_not_removed(
    tmp_path: Path, place: str, kind: str
) -> None:
    run, precious = _run(tmp_path), tmp_path / "precious"
    precious.mkdir()
    match kind:
        case "file":
            (run / place).write_bytes(b"a data set of others")
        case "link":
            (run / place).symlink_to(precious)
        case "pipe":
            os.mkfifo(run / place)
        case _:
            (run / place).mkdir()
    with pytest.raises(StorageError, match=rf"/gpt/{place} is no.*nothing was removed"):
        _clean(run)
    assert (run / place).lstat()
    assert len(list(run.rglob("*.safetensors"))) == 2


def test_a_directory_at_the_wrong_level_is_not_removed_even_with_numeric_run_names(
    tmp_path: Path,
) -> None:
    run = _run(tmp_path / "volume", "0")
    for directory in (run / "0", run.parent):
        with pytest.raises(StorageError, match="nothing was removed"):
            _clean(directory)
    assert len(list(run.rglob("*.safetensors"))) == 2


def test_a_rank_directory_with_files_but_no_lock_is_not_removed(tmp_path: Path) -> None:
    run = _run(tmp_path)
    (run / "1" / "gpt" / ".lock").unlink()
    with pytest.raises(StorageError, match=r"1/gpt.*no \.lock.*nothing was removed"):
        _clean(run)
    assert len(list(run.rglob("*.safetensors"))) == 2


@pytest.mark.parametrize("kind", ["link", "pipe", "directory"])
def test_a_lock_that_is_not_a_regular_file_prevents_any_removal(tmp_path: Path, kind: str) -> None:
    run, precious = _run(tmp_path), tmp_path / "precious"
    precious.touch()
    lock = run / "1" / "gpt" / ".lock"
    lock.unlink()
    match kind:
        case "link":
            lock.symlink_to(precious)
        case "pipe":
            os.mkfifo(lock)
        case _:
            lock.mkdir()
    with pytest.raises(OSError, match="not a regular file"):
        _clean(run)
    assert len(list(run.rglob("*.safetensors"))) == 2


# --- all runs of a node --------------------------------------------------------------------------

GRACE_S = 100.0


class Node:
    """A node's cleaner, with the clock and the cluster's runs in hand."""

    def __init__(self, top: Path, *, grace_s: float = GRACE_S) -> None:
        self.now = time.time() + 3600.0  # all that was written is older
        self.there: set[tuple[str, str]] = set()
        self.silent = False
        self.asked: list[str] = []
        self._cleaner = Cleaner([top], exists=self._exists, grace_s=grace_s, clock=lambda: self.now)

    def _exists(self, namespace: str, run: str) -> bool:
        self.asked.append(f"{namespace}/{run}")
        if self.silent:
            raise StorageError("it does not say")
        return (namespace, run) in self.there

    def round(self, *, after_s: float = 0.0) -> None:
        self.now += after_s
        self._cleaner.round()


def test_a_deleted_run_is_removed_after_its_grace_period_and_other_runs_are_not(
    tmp_path: Path,
) -> None:
    run, other = _run(tmp_path), _run(tmp_path / "Fast_1", "gpt-2")
    node = Node(tmp_path)
    node.there.add(("team", "gpt-2"))
    node.round()
    node.round(after_s=GRACE_S - 1)
    assert run.exists()
    node.round(after_s=1)
    assert not run.exists()
    assert len(list(other.rglob("*.safetensors"))) == 2
    node.there.clear()
    node.round()
    node.round(after_s=GRACE_S)
    assert not other.exists()
    node.round()
    assert (tmp_path / "Fast_1" / "team").exists(), "the namespace's may be in use by others"


def test_the_grace_period_restarts_when_a_run_object_exists_again(tmp_path: Path) -> None:
    run, node = _run(tmp_path), Node(tmp_path)
    node.round()
    node.there.add(("team", "gpt"))
    node.round(after_s=GRACE_S)
    node.there.clear()
    node.round(after_s=GRACE_S)
    node.round(after_s=GRACE_S - 1)
    assert run.exists()
    node.round(after_s=1)
    assert not run.exists()


def test_an_api_server_outage_does_not_restart_the_grace_period(
    tmp_path: Path,
) -> None:
    run, node = _run(tmp_path), Node(tmp_path)
    node.round()
    node.silent = True
    node.round(after_s=GRACE_S)
    assert run.exists()
    node.silent = False
    node.round()
    assert not run.exists()


def test_a_restarted_agent_waits_for_the_full_grace_period_again(tmp_path: Path) -> None:
    run, node = _run(tmp_path), Node(tmp_path)
    node.round()
    again = Node(tmp_path)
    again.now = node.now + GRACE_S
    again.round()
    assert run.exists()
    again.round(after_s=GRACE_S)
    assert not run.exists()


def test_the_grace_period_restarts_when_a_sidecar_is_running_or_has_written_files(
    tmp_path: Path,
) -> None:
    run, node = _run(tmp_path), Node(tmp_path)
    lock = FileLock(run / "1" / "gpt" / ".lock")
    node.round()
    node.round(after_s=GRACE_S)
    lock.release()
    node.round(after_s=GRACE_S - 1)
    assert run.exists(), "its sidecar lived when the first time of grace was over"
    os.utime(run / "0" / "gpt", (node.now, node.now))
    node.round(after_s=1)
    node.round(after_s=GRACE_S - 1)
    assert run.exists(), "something was written after the run was gone"
    node.round(after_s=1)
    assert not run.exists()


def test_a_pod_that_is_recreated_during_the_grace_period_keeps_its_directory(
    tmp_path: Path,
) -> None:
    run, node = _run(tmp_path), Node(tmp_path)
    node.now = time.time()
    node.round()
    time.sleep(0.02)  # the kernel's time stamps are that coarse
    prepare_directory(run / "0", uid=os.getuid(), gid=os.getgid())
    node.round(after_s=GRACE_S)
    assert len(list(run.rglob("*.safetensors"))) == 2, "its sidecar has not begun yet"


def test_a_pod_that_starts_during_the_removal_of_its_directory_gets_a_new_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rename, seen = OpenDirectory.rename, []

    def interrupted(
        self: OpenDirectory, name: str, new: str, into: OpenDirectory | None = None
    ) -> None:
        if not seen:
            seen.append(subprocess.Popen([sys.executable, "-c", _PREPARE, str(run / "0")]))
            eventually(lambda: _waits_for_a_lock(seen[0].pid), what="the pod waits for cleaning")
        rename(self, name, new, into)

    run = _run(tmp_path)
    monkeypatch.setattr(OpenDirectory, "rename", interrupted)
    assert _clean(run) == 4
    (pod,) = seen
    assert pod.wait(timeout=10.0) == 0
    assert [path.name for path in run.iterdir()] == ["0"]
    assert list((run / "0").iterdir()) == []


def _waits_for_a_lock(pid: int) -> bool:
    waiting = (line.split() for line in Path("/proc/locks").read_text().splitlines())
    return any(words[1] == "->" and str(pid) in words for words in waiting)


_PREPARE = """
import os, sys
from pathlib import Path
from keepstep_sidecar.agent.run_directories import prepare_directory
prepare_directory(Path(sys.argv[1]), uid=os.getuid(), gid=os.getgid())
"""


@pytest.mark.root
def test_the_directory_of_a_pod_that_died_before_its_sidecar_started_is_removed(
    tmp_path: Path,
) -> None:
    run, node = tmp_path / "team" / "gpt", Node(tmp_path, grace_s=0.0)
    prepare_directory(run / "0")
    node.round()
    assert not run.exists()


def test_a_removal_that_an_earlier_agent_began_is_completed_although_the_run_exists_again(
    tmp_path: Path,
) -> None:
    run, node = _run(tmp_path), Node(tmp_path)
    run.rename(run.with_name(".gpt.keepstep-removed"))
    again = _run(tmp_path)
    node.there.add(("team", "gpt"))
    node.round()
    assert list(run.parent.iterdir()) == [again]
    assert len(list(again.rglob("*.safetensors"))) == 2


@pytest.mark.root
def test_directories_that_another_user_owns_are_never_removed(tmp_path: Path) -> None:
    namespace, node = tmp_path / "team", Node(tmp_path, grace_s=0.0)
    aside, run = namespace / ".gpt.keepstep-removed", namespace / "data"
    for path in (aside, run / "0"):
        path.mkdir(parents=True)
        (path / "file").write_bytes(b"x")
        os.chown(path, 1000, 1000)
    node.round()
    assert node.asked == []
    assert (aside / "file").exists()
    assert (run / "0" / "file").exists()


def test_foreign_directories_below_the_prefix_cause_no_request_to_the_api_server(
    tmp_path: Path,
) -> None:
    precious = tmp_path / "precious"
    for path in ("a/b/c/d", "team/data/0", "team/data/1/other", "Team/gpt/0/gpt", "x_y/gpt/0/gpt"):
        (tmp_path / path).mkdir(parents=True)
        (tmp_path / path / "file").write_bytes(b"x")
    outside = tmp_path.parent / f"{tmp_path.name}-outside"
    _run(outside)
    (tmp_path / "team" / "gpt").symlink_to(outside / "team" / "gpt")
    (tmp_path / "link").symlink_to(outside)
    precious.mkdir()
    before = sorted(tmp_path.rglob("*"))
    node = Node(tmp_path, grace_s=0.0)
    node.round()
    assert node.asked == []
    assert sorted(tmp_path.rglob("*")) == before
    assert len(list(outside.rglob("*.safetensors"))) == 2


def test_a_run_with_foreign_files_is_logged_once_and_does_not_block_the_removal_of_others(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    odd, run, node = _run(tmp_path, "a"), _run(tmp_path, "b"), Node(tmp_path, grace_s=0.0)
    (odd / "data").mkdir()
    node.round()
    node.round()
    assert (odd.exists(), run.exists()) == (True, False)
    assert caplog.text.count("directory.clean_failed") == 1


@pytest.mark.root
def test_a_full_disk_is_cleaned_like_any_other(tmp_path: Path) -> None:
    subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=64k,nr_inodes=40", "tmpfs", str(tmp_path)], check=True
    )
    try:
        run = _run(tmp_path)
        with pytest.raises(OSError, match="No space"):
            (run / "0" / "gpt" / "fill").write_bytes(b"x" * (1 << 20))
        names = iter(range(40))
        with pytest.raises(OSError, match="No space"):
            all((run / "0" / "gpt" / f"fill-{name}").touch() is None for name in names)
        Node(tmp_path, grace_s=0.0).round()
        assert not run.exists()
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)


# --- what the API server says --------------------------------------------------------------------


@pytest.fixture
def answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[dict[str, tuple[int, object]]]:
    """An API server, and what it answers by path."""
    given: dict[str, tuple[int, object]] = {}

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            assert self.headers["Authorization"] == "Bearer secret"
            status, body = given[self.path.partition("?")[0].rpartition("/")[2]]
            data = body if isinstance(body, bytes) else json.dumps(body).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, text: str, *args: object) -> None:
            pass

    authority = make_certificate(tmp_path)
    (tmp_path / "ca.crt").write_bytes(authority)
    (tmp_path / "token").write_text("secret\n")
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(tmp_path / "tls.crt", tmp_path / "tls.key")
    server.socket = context.wrap_socket(server.socket, server_side=True)
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "127.0.0.1")
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT", str(server.server_port))
    serving = threading.Thread(target=server.serve_forever)
    serving.start()
    yield given
    server.shutdown()
    server.server_close()
    serving.join()


def test_a_run_counts_as_deleted_only_after_a_not_found_response_that_names_it(
    tmp_path: Path, answers: dict[str, tuple[int, object]]
) -> None:
    api = ApiServer(tmp_path)
    gone = {"kind": "checkpointruns", "name": "gone"}
    answers |= {
        "there": (200, {"metadata": {"name": "there"}}),
        "gone": (404, {"kind": "Status", "reason": "NotFound", "details": gone}),
        "no-kind": (404, b"404 page not found\n"),
        "other": (404, {"reason": "NotFound", "details": gone}),
        "forbidden": (403, {"reason": "Forbidden", "details": gone | {"name": "forbidden"}}),
        "broken": (500, b""),
    }
    assert api.exists("team", "there")
    assert not api.exists("team", "gone")
    for run in ("no-kind", "other", "forbidden", "broken"):
        with pytest.raises(StorageError, match="does not say whether it exists"):
            api.exists("team", run)


def test_an_unreachable_api_server_does_not_make_a_run_count_as_deleted(
    tmp_path: Path, answers: dict[str, tuple[int, object]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT", "1")
    with pytest.raises(StorageError, match="does not say"):
        ApiServer(tmp_path).exists("team", "gpt")
    (tmp_path / "token").unlink()
    with pytest.raises(StorageError, match="does not say"):
        ApiServer(tmp_path).exists("team", "gpt")
