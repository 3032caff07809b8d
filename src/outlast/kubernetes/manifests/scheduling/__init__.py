"""When and where pods run, and what may evict them: placement, gangs, Kueue's queues, disruption budgets."""
