"""`keepstep-operator ui`: a page of the cluster's runs, for those who may read them.

It listens on its pod's loopback alone, where `kubectl port-forward` leads, and answers nobody who
brings no token of their own: the API server says whose it is (TokenReview) and whether they may
list runs and checkpoints of the namespace (SubjectAccessReview). It writes nothing.

viewers    who asks, and what they may see
pages      what is shown of a CheckpointRun
server     routes, refusals
main       the process
"""
