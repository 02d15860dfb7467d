"""A save: `snapshot` immediately copies what the forward pass may change. The thread of
`save_thread` copies the rest while training goes on. Then it is decided whether the tensors stayed
unchanged.
"""
