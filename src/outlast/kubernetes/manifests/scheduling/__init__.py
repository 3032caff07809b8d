"""Which nodes pods go to, when, and what may evict them: placement, gangs, queues of Kueue, disruption budgets."""
