"""Tiers beyond this machine: `tier` is what each of them can do, `source` one copy of a shard,
`peer` and `archive` the two.
"""
