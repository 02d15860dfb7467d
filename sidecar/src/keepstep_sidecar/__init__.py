"""The sidecar owns local volumes and shared-memory slots, and persists what trainers stage."""

__version__ = "0.1.0"
