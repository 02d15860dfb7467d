"""The configuration of a sidecar, set at its start.

`sidecar` declares all settings, and what groups of them mean; `settings` says how one is declared,
read and checked.
"""
