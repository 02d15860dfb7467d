"""A save in three parts.

`snapshot` immediately copies what the forward pass may change. The thread of `agent` copies the
rest while training goes on. `pending` decides whether the tensors stayed unchanged during the copy.
`stats` counts.
"""
