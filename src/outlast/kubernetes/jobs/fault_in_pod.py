"""Injects a fault into one training process of this pod. `jobs.fault_injection` sends this source to Python in the pod.

    python3 - ACTION PICK TURNS STOPPED_S RUNNING_S      PICK in [0, 1) chooses the process

The program needs only the standard library of Python 3.9. It prints the rank and the pid of the process, or exits with code 3 if
there is no training process.
"""

import glob
import json
import os
import signal
import sys
import time

SIGNALS = {"kill-process": signal.SIGKILL, "stop": signal.SIGSTOP, "slow": signal.SIGSTOP}


def agent_pids(state: str) -> dict[int, int]:
    """Return the pids of an Outlast worker's training processes, keyed by rank."""
    pids = {}
    for path in glob.glob(os.path.join(state, "progress-*.json")):
        try:
            with open(path) as file:
                record = json.load(file)
            os.kill(record["pid"], 0)
            pids[record["rank"]] = record["pid"]
        except (OSError, ValueError, KeyError):  # the file is being written, or the process has ended
            continue
    return pids


def torchrun_pids(proc: str = "/proc") -> dict[int, int]:
    """Return the pids of plain torchrun's training processes, keyed by rank. Data loaders, which inherit a rank, are left out,
    because their parent process has a rank, too."""
    ranks, parents = {}, {}
    for entry in filter(str.isdecimal, os.listdir(proc)):
        try:
            with open(f"{proc}/{entry}/environ", "rb") as file:
                environ = dict(part.partition(b"=")[::2] for part in file.read().split(b"\0"))
            with open(f"{proc}/{entry}/stat") as file:
                parent = int(file.read().rpartition(")")[2].split()[1])
        except OSError:  # the process has ended, or is another user's
            continue
        if environ.get(b"RANK", b"").isdigit() and b"LOCAL_RANK" in environ:
            ranks[int(entry)], parents[int(entry)] = int(environ[b"RANK"]), parent
    return {rank: pid for pid, rank in ranks.items() if parents[pid] not in ranks}


def main(action: str, pick: float, turns: int, stopped_s: float, running_s: float) -> int:
    state = os.environ.get("OUTLAST_WORKER_STATE")
    pids = agent_pids(state) if state else torchrun_pids()
    if not pids:
        return 3
    rank = sorted(pids)[int(pick * len(pids))]
    pid = pids[rank]
    print(json.dumps({"rank": rank, "pid": pid}), flush=True)
    os.kill(pid, SIGNALS[action])
    if action != "slow" or os.fork():  # a child continues, so that the connection can be closed
        return 0
    os.setsid()
    for descriptor in (0, 1, 2):
        os.dup2(os.open(os.devnull, os.O_RDWR), descriptor)
    try:
        for _ in range(turns):
            os.kill(pid, signal.SIGSTOP)
            time.sleep(stopped_s)
            os.kill(pid, signal.SIGCONT)
            time.sleep(running_s)
    except ProcessLookupError:
        pass
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], float(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4]), float(sys.argv[5])))
