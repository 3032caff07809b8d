"""The node watcher: marks a node whose AWS machine is about to go, and evicts its pods. docs/decisions/0046-node-watch.md."""
