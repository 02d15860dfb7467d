"""`keepstep ui`: a page of the runs on this machine, in a process of its own.

It reads what any command reads, and asks a sidecar once a second however many look, and only while
somebody does. It changes nothing: there are GET routes only.
"""
