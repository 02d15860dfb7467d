"""What the chart fixes for every injected pod. Nothing of it can come from a pod's annotations."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

CONTRACT: Final = 1
"""Which arguments and variables a sidecar gets. Raise it when an image that understood the one
before would not start with them: such an image is then not given to pods that join its run."""


@dataclass(frozen=True, kw_only=True)
class Defaults:
    """`reports_ca`: PEM bundle that reports' TLS is checked with. `host_paths`: prefixes of the
    node's directories that policies may use. `version`: of the sidecar image. `root_image`: of the
    container that prepares directories as root, '' for the same one."""

    sidecar_image: str
    reports_url: str
    reports_ca: str
    sidecar_pull_policy: str = "IfNotPresent"
    host_paths: tuple[str, ...] = ()
    version: str = ""
    root_image: str = ""

    def with_sidecar(self, image: str, version: str) -> Defaults:
        """With another sidecar, as the rest of the pod's run has it; '' for none. What runs as
        root stays the chart's."""
        if not image or image == self.sidecar_image:
            return self
        return replace(self, sidecar_image=image, version=version, root_image=self.sidecar_image)
