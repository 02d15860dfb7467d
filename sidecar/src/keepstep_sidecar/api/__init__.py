"""What trainers ask over the unix socket.

listening, server  the socket and the ports; the routes
saving             leases, layouts, slots, staged images
restoring          a vote (and what it waits for), an image, the epoch that began
restarts           what each restart cost
step_waits         `wait(step)`, and the flush at the end
status, metrics    what people and Prometheus read
service            ties one run together
"""
