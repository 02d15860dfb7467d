"""The Kubernetes API for all components: the official client without its models.

    KubeError
      NotFound        404
      Conflict        409: it was written meanwhile, or it exists already; read again, decide again
      Denied          401, 403: a role lacks a rule
      Rejected        400, 422 and other 4xx: the request is wrong
      Unavailable     429, 5xx, no answer in time, no connection: try again later

The package does not know kinds: a `Resource` says where a kind is served, and objects are JSON.
Inside a cluster it uses the pod's service account, outside the context that KUBECONFIG names.
"""
