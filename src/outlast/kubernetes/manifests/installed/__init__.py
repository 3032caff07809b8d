"""Documents that a cluster gets once: definitions, rights, the operator, the node watcher."""
