"""The mesh: direct connections by which a world's agents detect silent members and agree on attempts.

    watched_peers   the peers that each member watches, and the state of a peer: heard, in doubt, unheard (pure)
    connection      one socket with sealed lines
    peer            the connection to one peer, and its unacknowledged messages
    mesh            all connections of a member, in one thread

Members report where their mesh listens, and a `World` carries its members' addresses. See docs/decisions/0039-the-mesh.md.
"""
