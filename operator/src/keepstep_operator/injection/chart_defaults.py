"""The settings that the chart fixes for every injected pod. No annotation of a pod can change
them."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True, kw_only=True)
class InjectionDefaults:
    """The settings. `reports_ca`: PEM bundle with which sidecars check the TLS of the reports API.
    `host_paths`: prefixes of the node's directories that policies may use. `version`: of the
    sidecar image. `root_image`: image of the container that prepares directories as root; '' for
    the sidecar's."""

    sidecar_image: str
    reports_url: str
    reports_ca: str
    sidecar_pull_policy: str = "IfNotPresent"
    host_paths: tuple[str, ...] = ()
    version: str = ""
    root_image: str = ""

    def with_sidecar_image(self, image: str, version: str) -> InjectionDefaults:
        """The settings with the sidecar image that the other pods of the run have; '' for no
        change. The container that runs as root keeps the chart's image."""
        if not image or image == self.sidecar_image:
            return self
        return replace(self, sidecar_image=image, version=version, root_image=self.sidecar_image)
