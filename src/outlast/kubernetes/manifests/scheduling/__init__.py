"""When and on which nodes pods run, and what may evict them: placement, gangs, Kueue's queues, disruption budgets."""
