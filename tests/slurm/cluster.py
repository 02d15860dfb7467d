"""A real Slurm on this machine: each node is a network namespace with a slurmd of its own.

A node also has a name, a /dev/shm and a directory `local` of its own; all other files are shared,
as on a cluster with one file system. Needs root and Debian's slurm-wlm and munge.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

from tests.harness import eventually

_CONTROLLER = "ctl"
_FIRST_NODE = 10  # of the last number of an address
_CONF = """\
ClusterName=keepstep
SlurmctldHost={controller}(10.77.0.1)
SlurmUser=root
SlurmdUser=root
AuthInfo=socket={scratch}/munge/socket
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=batch_sched_delay=0,sched_interval=1,bf_interval=1
ReturnToService=2
StateSaveLocation={scratch}/state
SlurmdSpoolDir={scratch}/spool-%n
SlurmctldPidFile={scratch}/slurmctld.pid
SlurmdPidFile={scratch}/slurmd-%n.pid
MailProg=/bin/true
KillWait=30
JobRequeue=1
{nodes}
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""
_NODE = (
    "NodeName={name} NodeAddr=10.77.0.{number} CPUs=2 Boards=1 SocketsPerBoard=1 CoresPerSocket=2"
    " ThreadsPerCore=1 RealMemory=2000 State=UNKNOWN"
)
_ENTER = """\
mount --bind {scratch}/hosts /etc/hosts
mount --bind {scratch}/munge-{name} {scratch}/munge
mount --bind {scratch}/local-{name} {scratch}/local
mount -t tmpfs -o size=1g tmpfs /dev/shm
hostname {name}
exec "$@"
"""


class Slurm:
    """A cluster below `scratch`, as a context; jobs see `environment`."""

    def __init__(
        self, scratch: Path, *, nodes: Sequence[str], environment: Mapping[str, str]
    ) -> None:
        self.scratch = scratch
        self.nodes = nodes
        self.local = scratch / "local"
        self._places = (_CONTROLLER, *nodes)
        self._prefix = f"keepstep-{os.getpid()}"
        self._environment = {**environment, "SLURM_CONF": str(scratch / "slurm.conf")}
        self._daemons: list[subprocess.Popen[bytes]] = []
        self._undo = ExitStack()

    def __enter__(self) -> Slurm:
        try:
            self._write_files()
            self._make_network()
            for place in self._places:
                self._start(place, "munged", *self._munge_options(place))
            for place in self._places:
                socket = self.scratch / f"munge-{place}" / "socket"
                eventually(socket.exists, what=f"munged of {place} listens", within_s=20)
            self._start(_CONTROLLER, "slurmctld", "-D")
            for node in self.nodes:
                self._start(node, "slurmd", "-D", "-N", node)
            eventually(self.idle, what=lambda: f"all nodes are idle: {self.logs()}")
        except BaseException:
            self._undo.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._undo.close()

    # --- jobs ----------------------------------------------------------------------------------

    def submit(self, script: str, *options: str) -> str:
        """The id of a job that runs a shell script; its output is in `output`."""
        file = self.scratch / f"job-{secrets.token_hex(4)}.sh"
        file.write_text(f"#!/bin/sh\n{script}\n")
        return self.command("sbatch", "--parsable", f"--output={self.scratch}/%j.out",
                            "--open-mode=append", *options, str(file)).strip()  # fmt: skip

    def output(self, job: str) -> str:
        """What a job has printed so far, in all its lives."""
        file = self.scratch / f"{job}.out"
        return file.read_text() if file.exists() else ""

    def state(self, job: str) -> str:
        """RUNNING, COMPLETED and so on."""
        return self._field(job, "JobState")

    def idle(self) -> bool:
        """Whether no node runs a job or still ends one."""
        return self._sinfo() == f"{len(self.nodes)} idle"

    def restarts(self, job: str) -> int:
        """How often a job was requeued."""
        return int(self._field(job, "Restarts"))

    def nodes_of(self, job: str) -> str:
        """Where it runs, in Slurm's notation."""
        return self._field(job, "NodeList")

    def story(self, job: str) -> str:
        """The job and the nodes as Slurm sees them, and what the job has printed."""
        shown = self.command("scontrol", "--oneliner", "show", "job", job)
        return f"{self._sinfo()}: {shown}{self.output(job)}"

    def _field(self, job: str, name: str) -> str:
        shown = self.command("scontrol", "--oneliner", "show", "job", job)
        return dict(word.partition("=")[::2] for word in shown.split())[name]

    def lose(self, node: str) -> None:
        """Kill all that runs on a node, and say so to Slurm, which notices after minutes."""
        self._kill_all(node)
        self.command("scontrol", "update", f"NodeName={node}", "State=DOWN", "Reason=lost")

    def command(self, *arguments: str) -> str:
        """The output of one of Slurm's commands, at the controller."""
        return self._run(*self._inside(_CONTROLLER, *arguments))

    def begin_soon(self, job: str) -> None:
        """A job that is back in the queue would wait there for two minutes. It cannot begin at
        once: a node refuses the credential of a job that it may still be ending."""
        self.command("scontrol", "update", f"JobId={job}", "StartTime=now+5")

    def logs(self) -> str:
        """The end of what each daemon said."""
        logs = sorted(self.scratch.glob("*.log"))
        return "\n".join(f"--- {log.name}\n{log.read_text()[-2000:]}" for log in logs)

    # --- parts ---------------------------------------------------------------------------------

    def _write_files(self) -> None:
        for directory in ("state", "munge", "local"):
            (self.scratch / directory).mkdir(parents=True)
        for place in self._places:
            for directory in ("munge", "spool", "local"):
                (self.scratch / f"{directory}-{place}").mkdir(mode=0o755)
        key = self.scratch / "munge.key"
        key.write_bytes(secrets.token_bytes(1024))
        key.chmod(0o400)
        numbers = {node: _FIRST_NODE + at for at, node in enumerate(self.nodes)}
        hosts = ["127.0.0.1 localhost", f"10.77.0.1 {_CONTROLLER}"]
        hosts += [f"10.77.0.{number} {node}" for node, number in numbers.items()]
        (self.scratch / "hosts").write_text("\n".join(hosts) + "\n")
        nodes = "\n".join(_NODE.format(name=name, number=n) for name, n in numbers.items())
        conf = _CONF.format(controller=_CONTROLLER, scratch=self.scratch, nodes=nodes)
        (self.scratch / "slurm.conf").write_text(conf)

    def _make_network(self) -> None:
        """A bridge in the controller's namespace, where no firewall of this machine counts."""
        for place in self._places:
            self._ip("netns", "add", self._namespace(place))
            self._undo.callback(self._ip, "netns", "delete", self._namespace(place))
            self._undo.callback(self._kill_all, place)
            self._ip("-n", self._namespace(place), "link", "set", "lo", "up")
        controller = self._namespace(_CONTROLLER)
        self._ip("-n", controller, "link", "add", "bridge", "type", "bridge")
        self._ip("-n", controller, "address", "add", "10.77.0.1/24", "dev", "bridge")
        self._ip("-n", controller, "link", "set", "bridge", "up")
        for at, node in enumerate(self.nodes):
            own, port = self._namespace(node), f"port{at}"
            self._ip("link", "add", port, "netns", controller, "type", "veth",
                "peer", "name", "eth0", "netns", own)  # fmt: skip
            self._ip("-n", controller, "link", "set", port, "master", "bridge", "up")
            self._ip("-n", own, "address", "add", f"10.77.0.{_FIRST_NODE + at}/24", "dev", "eth0")
            self._ip("-n", own, "link", "set", "eth0", "up")

    def _namespace(self, place: str) -> str:
        return f"{self._prefix}-{place}"

    def _inside(self, place: str, *command: str) -> list[str]:
        script = _ENTER.format(scratch=self.scratch, name=place)
        return ["nsenter", f"--net=/run/netns/{self._namespace(place)}",
                "unshare", "--mount", "--uts", "sh", "-ec", script, "sh", *command]  # fmt: skip

    def _start(self, place: str, *command: str) -> None:
        with open(self.scratch / f"{command[0]}-{place}.log", "wb") as log:
            daemon = subprocess.Popen(
                self._inside(place, *command), env=self._environment,
                stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT,
            )  # fmt: skip
        self._undo.callback(daemon.wait)
        self._undo.callback(daemon.kill)

    def _ip(self, *arguments: str) -> str:
        return self._run("ip", *arguments)

    def _run(self, *command: str) -> str:
        done = subprocess.run(
            command, env=self._environment, capture_output=True, text=True, timeout=60
        )
        if done.returncode:
            raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip()}")
        return done.stdout

    def _kill_all(self, place: str) -> None:
        """Kill what runs in a namespace, jobs and what they left behind, too."""
        pids = self._ip("netns", "pids", self._namespace(place))
        for pid in pids.split():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)

    def _munge_options(self, place: str) -> list[str]:
        own = self.scratch / f"munge-{place}"
        return ["--foreground", "--force", "--num-threads=2",
                f"--socket={self.scratch}/munge/socket", f"--key-file={self.scratch}/munge.key",
                f"--pid-file={own}/pid", f"--seed-file={own}/seed",
                f"--log-file={own}/log"]  # fmt: skip

    def _sinfo(self) -> str:
        try:
            return self.command("sinfo", "--noheader", "--format=%D %T").strip()
        except RuntimeError:
            return ""  # the controller does not answer yet
