"""`keepstep ui`: a page of the runs on this machine, in a separate process.

It reads what any command reads. It asks a sidecar once a second, however many people look at the
page, and only while someone does. It changes nothing: there are only GET routes.
"""
