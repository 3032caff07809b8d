"""Documents installed once per cluster: definitions, rights, the operator and the node watcher."""
