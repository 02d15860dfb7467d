"""The mutating webhook: an aiohttp server over the pure `keepstep_operator.injection`.

It always answers `allowed: true`. Whatever goes wrong, the pod starts as it was written, with a
warning for whoever created it, a log line, a counter, and the reason on the pod.
"""
