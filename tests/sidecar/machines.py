"""Machines of one run without an operator: each a real sidecar, which knows the run's secret."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from trainer import FakeTrainer, Ranks

from tests.harness import SidecarProcess, free_port, matching

SECRET = "a secret of the tests"


class Machine(SidecarProcess):
    """`leader`: where node rank 0 listens."""

    def __init__(self, node_rank: int, *, memory: Path, home: Path, leader: str) -> None:
        home.mkdir(parents=True, exist_ok=True)
        memory.mkdir(parents=True, exist_ok=True)
        super().__init__("run", memory, home / "volume", home / "log")
        self.node_rank, self.leader, self.host = node_rank, leader, "127.0.0.1"
        self.port = int(leader.rpartition(":")[2]) if node_rank == 0 else free_port()

    def start(self, *options: str, nodes: int = 2, **environment: str) -> Machine:
        places = (
            *("--nodes", str(nodes), "--node-rank", str(self.node_rank)),
            *("--leader", self.leader, "--peer-listen", f"{self.host}:{self.port}"),
        )
        super().start(*places, *options, **{"KEEPSTEP_SECRET": SECRET, **environment})
        return self

    def status(self) -> Any:
        return self.get("/v1/status")

    def warnings(self) -> str:
        return "\n".join(self.status()["warnings"])

    def steps(self) -> set[int]:
        """Steps of which shards lie on the volume, published or not."""
        found = matching(self.root, "0*/rank-*", "pending/0*/rank-*")
        return {int(path.parent.name.rsplit("-", 1)[1]) for path in found}

    def copies(self) -> set[int]:
        """Steps of which it keeps whole copies for others."""
        found = matching(self.root, "peers/0*/rank-*.safetensors")
        return {int(path.parent.name.rsplit("-", 1)[1]) for path in found}


class Run(Ranks):
    """Some machines, and a rank on each."""

    def __init__(self, machines: list[Machine], trainers: Callable[..., FakeTrainer]) -> None:
        super().__init__(trainers)
        self.machines = machines

    def start(self, *options: str) -> Run:
        """All sidecars, and the ranks in their first epoch."""
        self.start_sidecars(*options)
        for machine in self.come_back():
            machine.restored(machine.epoch)
            machine.register()
        return self

    def start_sidecars(self, *options: str) -> None:
        for machine in self.machines:
            machine.start(*options, nodes=len(self.machines))

    def come_back(self) -> list[FakeTrainer]:
        """Ranks that have not restored yet."""
        return self.come([machine.socket for machine in self.machines])
