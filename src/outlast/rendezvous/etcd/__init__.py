"""The rendezvous through etcd: its keys, a member's client, and the election of a coordinator."""
