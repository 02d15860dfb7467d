"""Shared memory.

`slot_file` is one slot, `slot_pool` the slots of all ranks. `slot_allocator` makes them within the
memory limit. `slot_directories` has the places of slots, and keeps a second sidecar out.
"""
