"""The mutating webhook: an aiohttp server over the pure `keepstep_operator.injection`.

It always answers `allowed: true`. If anything goes wrong, the pod starts as it was written. Its
creator gets a warning, the reason is logged and counted, and the pod carries it.
"""
