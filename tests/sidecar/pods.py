"""Pods of one run: each a real sidecar with a memory, a volume and a token of its own."""

from __future__ import annotations

from pathlib import Path

from tests.harness import SidecarProcess


class Pod(SidecarProcess):
    """`report`: environment that names the operator."""

    def __init__(self, node: int, *, memory: Path, home: Path, url: str, ca: str) -> None:
        home.mkdir(parents=True, exist_ok=True)
        memory.mkdir(parents=True, exist_ok=True)
        super().__init__("run", memory, home / "volume", home / "log")
        self.node = node
        self.token = home / "token"
        self.token.write_text(f"node-{node}\n")
        self.report = {
            "KEEPSTEP_REPORT_URL": url,
            "KEEPSTEP_REPORT_CA": ca,
            "KEEPSTEP_REPORT_TOKEN_FILE": str(self.token),
        }

    def start(self, *options: str, **environment: str) -> Pod:
        super().start(*options, **{**self.report, **environment})
        return self

    def steps(self) -> set[int]:
        """Steps of which shards lie on the volume, published or not."""
        found = [*self.root.glob("0*"), *self.root.glob("pending/0*")]
        return {int(path.name.rsplit("-", 1)[1]) for path in found if any(path.iterdir())}
