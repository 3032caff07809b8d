"""A worker without torch: restores from the store, then commits a checkpoint of random bytes every few hundredths of a second.

    python writer.py OUTPUT URL RUN GENERATION

Prints `restored STEP` and `committed STEP` lines.
"""

from __future__ import annotations

import os
import random
import sys
import time
from pathlib import Path

from outlast.job import contract
from outlast.storage import checkpoints, store
from outlast.storage.checkpoints import both_places

output, url, run, generation = Path(sys.argv[1]), sys.argv[2], sys.argv[3], int(sys.argv[4])
directory = output / contract.CHECKPOINTS
both_places.restore(output, store.open_(url), run, lambda text: print(text, flush=True))
checkpoints.acquire(directory, run, generation)
newest = checkpoints.latest(checkpoints.list_(directory), run)
step = newest.step if newest else 0
print(f"restored {step}", flush=True)
(output / contract.LOGS).mkdir(exist_ok=True)
while True:
    step += 1
    target = checkpoints.saving(directory, step, generation)
    target.mkdir()
    files = {}
    for name in (".metadata", "__0_0.distcp", "__1_0.distcp"):
        path = target / name
        with path.open("wb") as file:
            file.write(os.urandom(random.choice([0, 1000, 300_000])))
            file.flush()
            os.fsync(file.fileno())
        files[name] = {"size": path.stat().st_size, "crc32": checkpoints.checksum(path)}
    new = checkpoints.Checkpoint(step, directory / contract.checkpoint_name(step), run, generation, 2, time.time())
    done = checkpoints.commit(target, new, files)
    print(f"committed {step}", flush=True)
    with open(output / contract.LOGS / "worker-0.log", "a") as log:
        log.write(f"step {step} of generation {generation}\n")
    (output / "state.json").write_text(str(step))
    checkpoints.sweep(directory, done, checkpoints.Retention(3))
    time.sleep(random.uniform(0.02, 0.1))
