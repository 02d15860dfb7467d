"""What the chart fixes for every injected pod. Nothing of it can come from a pod's annotations."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Defaults:
    """`reports_ca`: PEM bundle that reports' TLS is checked with. `host_paths`: prefixes of the
    node's directories that policies may use. `version`: of the sidecar image."""

    sidecar_image: str
    reports_url: str
    reports_ca: str
    sidecar_pull_policy: str = "IfNotPresent"
    host_paths: tuple[str, ...] = ()
    version: str = ""
