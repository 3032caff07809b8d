"""The agents of a world connected to one another directly: who is silent is noticed by its peers, and they can agree without a
coordinator. Design: docs/decisions/0039-the-mesh.md.

    neighbours   whom each member watches (pure)
    hearing      what a member knows of one peer: heard, in doubt, unheard (pure)
    connection   one socket with sealed lines
    mesh         all connections of a member, in one thread
    exchange     the members' addresses, by way of the world's store

Used by `rendezvous.handler`. The sockets of training (gloo, NCCL) and of snapshots are others.
"""
