"""`python -m outlast.tracking OUTPUT [--end STATUS]`: follows a run's metrics at the lowest priority, see `follower`."""

import os
import sys

if __name__ == "__main__":
    os.nice(19)  # before the imports, which are most of the work
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    from outlast.tracking import follower

    code = follower.main(sys.argv[1:])
    sys.stderr.flush()
    os._exit(code)  # a thread may wait for a server that does not answer
