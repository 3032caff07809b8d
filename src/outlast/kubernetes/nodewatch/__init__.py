"""The node watcher: marks a node whose AWS machine is about to be terminated, and evicts its pods. See
docs/decisions/0046-node-watch.md."""
