"""`kubectl keepstep`: runs, their steps, and what people ask of them, with the user's own rights.

It reads and patches the objects of the API and nothing else: what it does can be done with
`kubectl get` and `kubectl patch`, too, and the operator cannot tell the two apart.
"""
