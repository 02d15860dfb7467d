"""`keepstep-operator ui`: a page of the cluster's runs, for those who may read them.

It listens only on its pod's loopback, which `kubectl port-forward` reaches. Every request needs a
token of the viewer: the API server says whose it is (TokenReview), and whether this user may list
runs and checkpoints of the namespace (SubjectAccessReview). The page writes nothing.

viewers    who the viewers are, and what they may see
pages      what the page shows of a CheckpointRun
server     routes and refusals
main       the process
"""
