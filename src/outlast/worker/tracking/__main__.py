"""Starts the follower as earlier versions do, which may still run. Today it is a role of `outlast.__main__`."""

import sys

from outlast.worker.tracking import follower

if __name__ == "__main__":
    follower.main(sys.argv[1:])
