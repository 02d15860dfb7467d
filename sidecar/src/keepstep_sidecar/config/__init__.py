"""The configuration of a sidecar, set at its start.

`sidecar` declares all keys; `keys` reads and checks them (`quantities`: sizes and times).
`archive`, `peers`, `restore_from` and `verify` are what groups of keys mean.
"""
