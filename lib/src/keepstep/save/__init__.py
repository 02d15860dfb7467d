"""A save: `snapshot` copies at once what the forward pass may change, the `agent` thread copies the
rest beside it, and `pending` says whether the tensors kept still meanwhile. `stats` counts.
"""
