"""When and where pods run: placement, gangs, Kueue's queues."""
