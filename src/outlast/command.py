"""Runs a program that is not in the job's code: a script in the image, or Python code given as text. Workers run this module.

    module: outlast.command, args: [/opt/mnist/mnist.py, --epochs=1]
    module: outlast.command, args: [-c, "import torch; ..."]

A job file's `script` is a file in the job's code, but manifests of other systems refer to files in the container image.
"""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path


def main(argv: Sequence[str]) -> None:
    """Run a script, or the code after `-c`, as the module `__main__`, like Python itself."""
    if argv[:1] == ["-c"] and len(argv) > 1:
        sys.argv = ["-c", *argv[2:]]
        exec(compile(argv[1], "<string>", "exec"), sys.modules["__main__"].__dict__)
    elif argv and Path(argv[0]).is_file():
        sys.argv = [*argv]
        sys.path.insert(0, os.path.dirname(os.path.abspath(argv[0])))
        runpy.run_path(argv[0], run_name="__main__")
    else:
        sys.exit(f"outlast | {argv[0] if argv else 'no file'} is not in this image; give the path of a script, or -c and code")


if __name__ == "__main__":
    main(sys.argv[1:])
