"""What trainers ask over the unix socket.

server             the routes; the socket and the ports
saving             leases, layouts, slots, staged images; `wait(step)`, and the flush at the end
restoring          a vote (and what it waits for), an image, the epoch that began
status, metrics    what people and Prometheus read
lifecycle          ties one run together
"""
