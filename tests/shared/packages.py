"""Archives, packages and package managers for tests."""

from __future__ import annotations

import io
import sys
import tarfile
import zipfile
from collections.abc import Mapping
from pathlib import Path


def a_wheel(directory: Path, name: str, version: str = "1.0", *, requires: tuple[str, ...] = (), code: str = "") -> Path:
    path, info = directory / f"{name}-{version}-py3-none-any.whl", f"{name}-{version}.dist-info"
    metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n" + "".join(f"Requires-Dist: {r}\n" for r in requires)
    with zipfile.ZipFile(path, "w") as wheel:
        wheel.writestr(f"{name}.py", f"{code}\nVERSION = {version!r}\n")
        wheel.writestr(f"{info}/METADATA", metadata)
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", f"{name}.py,,\n{info}/METADATA,,\n{info}/WHEEL,,\n{info}/RECORD,,\n")
    return path


FAKE = """#!{python}
# Stands in for micromamba: makes an environment with the torch that we have, but without Outlast.
import json, os, subprocess, sys, venv
from pathlib import Path
args = sys.argv[1:]
assert args[0] == "create", args
prefix, file = Path(args[args.index("--prefix") + 1]), Path(args[args.index("--file") + 1])
text = file.read_text()
print("solving", text)
if "impossible" in text:
    print("error    libmamba Could not solve for environment specs")
    print("critical libmamba Could not solve for environment specs")
    sys.exit(1)
venv.create(prefix, with_pip=False, symlinks=True)
if "old" in text:
    (prefix / "bin" / "python").unlink()
    (prefix / "bin" / "python").write_text("#!/bin/sh\\necho '{{\\"version\\": [3, 9, 1]}}'\\n")
    (prefix / "bin" / "python").chmod(0o755)
elif "torch" in text:
    (packages,) = prefix.glob("lib/python*/site-packages")
    for entry in Path({packages!r}).iterdir():
        if "outlast" not in entry.name and not entry.name.startswith(("pydantic", "psutil", "typer", "yaml", "distutils")):
            (packages / entry.name).symlink_to(entry)
"""


def a_micromamba(directory: Path) -> Path:
    """Create a directory with a micromamba, for PATH."""
    import torch

    directory.mkdir(exist_ok=True)
    program = directory / "micromamba"
    program.write_text(FAKE.format(python=sys.executable, packages=str(Path(torch.__file__).parents[1])))
    program.chmod(0o755)
    return directory


def tar(files: Mapping[str, str | bytes], mode: str = "w:gz") -> bytes:
    """Return a tar archive of files, by their names in it. The tar inside always has the same bytes."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode=mode) as archive:
        for name, content in files.items():
            data = content if isinstance(content, bytes) else content.encode()
            info = tarfile.TarInfo(name)
            info.size, info.mtime = len(data), 1_000_000_000
            archive.addfile(info, io.BytesIO(data))
    return out.getvalue()
