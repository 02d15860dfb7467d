"""Tiers beyond this machine.

`tier` is their common interface, `source` one copy of a shard, `transfer` the loop that moves and
verifies its chunks. `peer` and `archive` are the two implementations.
"""
