"""The node watcher: tells Kubernetes that the machine beneath it is about to go, and moves its pods while there is time.

`notices` is what clouds announce, `sources` asks their metadata services, `node` is how a node says that it leaves, `drain`
decides which pods go when, `watch` does it, `process` is `outlast node-watch`. Decision: docs/decisions/0046-node-watch.md.
"""
