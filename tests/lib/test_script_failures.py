"""What counts as a script's own failure, and that its sidecar hears of it."""

from __future__ import annotations

import errno
import http.client
import socket
import ssl
import subprocess
import sys
import time
import types
import urllib.error

import pytest
import torch
from torch import nn

import keepstep
from keepstep.save.script_failures import is_script_failure
from tests.lib.training import begun


def raised(error: BaseException, cause: BaseException | None = None) -> BaseException:
    try:
        raise error from cause
    except BaseException as caught:
        return caught


def client_error(module: str, name: str, base: type, status_code: int | None = None) -> Exception:
    """An error as a network client defines it, of a package that need not be installed."""
    error = type(name, (base,), {"__module__": module})("outside")
    if status_code is not None:
        error.response = types.SimpleNamespace(status_code=status_code)
    return error


@pytest.mark.parametrize(
    ("error", "own"),
    [
        (ValueError("wrong"), True),
        (RuntimeError("CUDA error: device-side assert triggered"), True),
        (RuntimeError("CUDA error: an illegal memory access was encountered"), True),
        (RuntimeError("Caught RuntimeError in DataLoader worker process 0.\nwrong"), True),
        (FileNotFoundError(errno.ENOENT, "no such file"), True),
        (PermissionError(errno.EACCES, "denied"), True),
        (KeyError("x"), True),
        (ZeroDivisionError(), True),
        (urllib.error.HTTPError("http://x", 404, "Not Found", {}, None), True),
        (urllib.error.HTTPError("http://x", 503, "Unavailable", {}, None), False),
        (urllib.error.URLError("unreachable"), False),
        (socket.gaierror(-3, "Temporary failure in name resolution"), False),
        (ssl.SSLEOFError(8, "EOF occurred in violation of protocol"), False),
        (ssl.SSLCertVerificationError("expired"), False),
        (http.client.IncompleteRead(b""), False),
        (http.client.RemoteDisconnected("closed"), False),
        *(
            (OSError(number, "outside"), False)
            for number in (
                *(errno.EIO, errno.ESTALE, errno.EHOSTUNREACH, errno.ENETUNREACH, errno.ENOSPC),
                *(errno.EDQUOT, errno.EROFS, errno.ENODEV, errno.EFBIG, errno.EREMOTEIO),
            )
        ),
        (OSError("Caught OSError in DataLoader worker process 0.\n[Errno 116] Stale"), False),
        (client_error("requests.exceptions", "HTTPError", OSError, status_code=502), False),
        (client_error("requests.exceptions", "HTTPError", OSError, status_code=404), True),
        (client_error("requests.exceptions", "ConnectionError", OSError), False),
        (client_error("aiohttp.client_exceptions", "ServerDisconnectedError", Exception), False),
        (client_error("aiohttp.client_exceptions", "InvalidURL", ValueError), True),
        (client_error("botocore.exceptions", "EndpointConnectionError", Exception), False),
        (client_error("huggingface_hub.errors", "HfHubHTTPError", OSError), False),
        (torch.OutOfMemoryError("too large"), False),
        (MemoryError(), False),
        (EOFError(), False),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory"), False),
        (RuntimeError("CUDA error: uncorrectable ECC error encountered"), False),
        (RuntimeError("CUDA error: unspecified launch failure"), False),
        (RuntimeError("DataLoader worker (pid 7) is killed by signal: Killed."), False),
        (KeyboardInterrupt(), False),
        (SystemExit(1), False),
        (ConnectionResetError(), False),
        (TimeoutError(), False),
        (torch.distributed.DistBackendError("NCCL error"), False),
        (RuntimeError("[gloo/transport/tcp/pair.cc:547] Connection closed by peer"), False),
        (raised(ValueError("no batch"), ConnectionError()), False),
        (keepstep.NotDurableError("the drive is full"), False),
    ],
)
def test_errors_with_an_external_cause_do_not_count_as_failures_of_the_script(
    error: BaseException, own: bool
) -> None:
    assert is_script_failure(error) is own


def failing(end: str) -> subprocess.CompletedProcess[str]:
    text = f"""
import sys, torch, keepstep
def mine(kind, error, at):
    print("mine:", kind.__name__, error, file=sys.stderr)
    sys.__excepthook__(kind, error, at)
sys.excepthook = mine
checkpointer = keepstep.Checkpointer({{"model": torch.nn.Linear(2, 2)}})
checkpointer.restore()
checkpointer.save(3)
{end}
"""
    return subprocess.run(
        [sys.executable, "-c", text], capture_output=True, text=True, timeout=100, check=False
    )


def test_an_error_that_ends_the_script_is_reported_to_the_sidecar_and_printed_as_usual(sidecar):
    ended = failing("raise ValueError('wrong')")
    assert ended.returncode == 1
    assert "mine: ValueError wrong" in ended.stderr
    assert ended.stderr.rstrip().endswith("ValueError: wrong")
    (line,) = [line for line in sidecar.text().splitlines() if "script.failed" in line]
    assert "000000003" in line
    assert "ValueError: wrong" in line


HANGS = """
import ctypes
from keepstep.save import script_failures
script_failures._ENDS_WITHIN_S = 1.0
class Group:
    # as gloo's destructor joins a thread that waits for the lost peer
    def __del__(self, sleep=ctypes.CDLL(None).sleep):
        sleep(60)
group = Group()
"""


@pytest.mark.parametrize(
    "error",
    [
        "RuntimeError('[gloo/transport/tcp/pair.cc:553] Connection closed by peer')",
        "torch.distributed.DistBackendError('NCCL error')",
    ],
)
def test_a_rank_that_lost_its_peer_exits_although_interpreter_shutdown_hangs(sidecar, error):
    began = time.monotonic()
    ended = failing(f"{HANGS}\nraise {error}")
    assert time.monotonic() - began < 50
    assert ended.returncode == 1
    assert error.split("(")[0] in ended.stderr
    assert "Timeout (0:00:01)!" in ended.stderr
    assert "script.failed" not in sidecar.text()


def test_a_slow_interpreter_shutdown_after_other_errors_is_not_aborted(sidecar):
    ended = failing(f"{HANGS.replace('sleep(60)', 'sleep(3)')}\nraise ConnectionError('a store')")
    assert ended.returncode == 1
    assert "Timeout" not in ended.stderr


PREEMPTED = """
import os, signal
class Preempted(Exception): pass
class Handler:
    asked = False
    def __call__(self, *_):
        Handler.asked = True
        if RAISES: raise Preempted("asked to end")
RAISES = {raises}
signal.signal(signal.{name}, Handler())
os.kill(os.getpid(), signal.{name})
if Handler.asked: raise RuntimeError("the loop ends early")
"""


@pytest.mark.parametrize("raises", [True, False])
@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT"])
def test_errors_after_a_termination_signal_are_not_reported_to_the_sidecar(sidecar, raises, name):
    ended = failing(PREEMPTED.format(raises=raises, name=name))
    assert ended.returncode == 1
    assert ("Preempted" if raises else "ends early") in ended.stderr
    assert "script.failed" not in sidecar.text()


def test_a_signal_to_a_forked_worker_does_not_count_as_a_signal_to_the_trainer(sidecar):
    failing(
        """
import os, signal
signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
ready, begun = os.pipe()
if (worker := os.fork()) == 0:
    os.write(begun, b"!")  # Python forgets the signals that a child gets before this
    while True:
        signal.pause()
os.read(ready, 1)
os.kill(worker, signal.SIGTERM)
os.waitpid(worker, 0)
raise ValueError("wrong")
"""
    )
    assert "script.failed" in sidecar.text()


@pytest.mark.parametrize(
    "end", ["raise KeyboardInterrupt", "sys.exit(3)", "raise ConnectionError('gone')"]
)
def test_exits_without_an_error_of_the_script_are_not_reported_to_the_sidecar(sidecar, end):
    assert failing(end).returncode != 0
    assert "script.failed" not in sidecar.text()


def test_an_error_that_ends_the_with_block_is_reported_to_the_sidecar(sidecar):
    def train():
        with begun({"model": nn.Linear(2, 2)}) as checkpointer:
            checkpointer.save(0)
            raise ValueError("wrong")

    with pytest.raises(ValueError, match="wrong"):
        train()
    assert "ValueError: wrong" in sidecar.text()
