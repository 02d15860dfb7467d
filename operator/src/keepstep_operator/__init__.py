"""The Kubernetes operator: admission, reconcile, certificates; three processes of one program."""

__version__ = "0.1.0"
