"""The rendezvous through etcd: its keys, a member's side, and the election of a coordinator."""
