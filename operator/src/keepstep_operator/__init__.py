"""The Kubernetes operator. One program: admission, reconcile, certificates, and a page."""

__version__ = "0.1.0"
