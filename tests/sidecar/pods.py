"""Pods of one run: each a real sidecar with a memory, a volume and a token of its own."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from keepstep.wire.run_reports import MemberPod
from tests.harness import SidecarProcess, free_port, matching


class Pod(SidecarProcess):
    """`report`: environment that names the operator. `leader`: the port of node rank 0; None: this
    is it. `uid`, `node_name`: of this pod."""

    def __init__(
        self, node: int, *, memory: Path, home: Path, url: str, ca: str, leader: int | None = None
    ) -> None:
        home.mkdir(parents=True, exist_ok=True)
        memory.mkdir(parents=True, exist_ok=True)
        super().__init__("run", memory, home / "volume", home / "log")
        self.node = node
        self.port = free_port() if node or leader is None else leader
        self.leader = self.port if leader is None else leader
        self.uid, self.node_name = f"pod-{node}", f"node-{node}"
        self.token = home / "token"
        self.token.write_text(f"node-{node}\n")
        (home / "trust").mkdir(exist_ok=True)
        self.report = {
            "KEEPSTEP_REPORT_URL": url,
            "KEEPSTEP_REPORT_CA": ca,
            "KEEPSTEP_REPORT_CA_FILE": str(home / "trust/ca.crt"),
            "KEEPSTEP_REPORT_TOKEN_FILE": str(self.token),
        }

    def start(self, *options: str, **environment: str) -> Pod:
        places = {
            "KEEPSTEP_LEADER": f"127.0.0.1:{self.leader}",
            "KEEPSTEP_NODE_RANK": str(self.node),
            "KEEPSTEP_PEER_LISTEN": f"127.0.0.1:{self.port}",
            "KEEPSTEP_PEER_REPLICAS": "0",
            "KEEPSTEP_POD": self.uid,
            "KEEPSTEP_NODE": self.node_name,
        }
        super().start(*options, **{**self.report, **places, **environment})
        return self

    def member(self, **state: Any) -> MemberPod:
        """The pod as the operator names it."""
        return MemberPod(
            node_rank=self.node, pod=self.uid, name=f"worker-{self.node}", node=self.node_name,
            **state,
        )  # fmt: skip

    def steps(self) -> set[int]:
        """Steps of which shards lie on the volume, published or not."""
        found = matching(self.root, "0*/*", "pending/0*/*")
        return {int(path.parent.name.rsplit("-", 1)[1]) for path in found}


def members(pods: Iterable[Pod]) -> tuple[MemberPod, ...]:
    """The pods as the operator names them."""
    return tuple(pod.member() for pod in pods)
