"""Tiers beyond this machine: `tier` is what each of them can do, `source` one copy of a shard,
`transfer` the loop that moves and verifies its chunks, `peer` and `archive` the two.
"""
