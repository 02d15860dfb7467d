"""Tiers beyond this machine.

`tier` is their common interface, `replicator` sends what they should have, `source` is one copy of
a shard, `transfer` the loop that moves and verifies its chunks, `receive` a copy that comes in.
`peer` and `archive` are the two implementations.
"""
