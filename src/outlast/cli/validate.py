"""`outlast validate`: checks job files, and prints every mistake in them."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from outlast.errors import OutlastError

if TYPE_CHECKING:
    from outlast import spec


def validate(files: Sequence[Path]) -> int:
    """Print `cifar10: ok (2 workers, 1–4)` for each right file, every mistake of the others to stderr; returns the exit code."""
    from outlast import spec
    from outlast.spec import unused

    code = 0
    for file in files:
        try:
            job = spec.load(file, code=True)
        except OutlastError as error:
            print(error, file=sys.stderr)
            code = error.exit_code
        else:
            print(f"{job.metadata.name}: ok ({_size(job.spec.workers)})")
            for sentence in unused.anywhere(job):
                print(f"{file}: warning: {sentence}", file=sys.stderr)
            for sentence in unused.here(job):
                print(f"{file}: with outlast run: {sentence}", file=sys.stderr)
    return code


def schema() -> str:
    """The JSON schema of job files, for editors; `outlast validate --schema` prints it."""
    from outlast import spec

    return json.dumps(spec.schema(), indent=2)


def _size(workers: spec.Workers) -> str:
    """How many workers, and how many there may be: `2 workers, 1–4`."""
    wanted = f"{workers.replicas} worker{'' if workers.replicas == 1 else 's'}"
    allowed = workers.allowed()
    if len(allowed) == 1:
        return wanted
    if allowed == tuple(range(allowed[0], allowed[-1] + 1)):
        return f"{wanted}, {allowed[0]}–{allowed[-1]}"
    return f"{wanted} of {', '.join(map(str, allowed))}"
