"""What a sidecar is told at its start, checked: `sidecar` has all of it, `peers` and `archive`
their parts, `restore_from` and `fork` where a run goes on from, `verify` how much is checked.
"""
