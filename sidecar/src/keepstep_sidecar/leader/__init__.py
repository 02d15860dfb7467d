"""The leader of a run: the sidecar of node rank 0, to which the other machines are connected.

hub    the leader's side of all connections
link   a member's side of its connection
"""
