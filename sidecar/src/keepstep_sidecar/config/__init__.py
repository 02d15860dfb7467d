"""The configuration of a sidecar, set at its start.

`sidecar` declares all settings; `settings` says how one is declared, read and checked
(`quantities`: sizes and times). `archive`, `peers` and `restore_from` are what groups of settings
mean.
"""
