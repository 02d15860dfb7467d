"""`kubectl keepstep`: shows runs and their steps, and asks for changes, with the user's own rights.

Except for `logs` and `ui`, it only reads and patches objects of the API. This can be done with
`kubectl get` and `kubectl patch`, too; the operator cannot tell the difference.
"""
