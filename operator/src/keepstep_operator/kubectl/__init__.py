"""`kubectl keepstep ui`: the page of a run, with the user's own rights.

What `kubectl get`, `describe`, `logs` and `patch` do is not here.
"""
