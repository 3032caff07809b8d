"""Checks that torch and Outlast have compiled bytecode, without which a worker takes at least 15 s longer to start."""

from __future__ import annotations

import importlib.util
import os
import sys


def warning(*, image: bool) -> str:
    """Return a warning with a remedy if training processes start slowly in this Python, or an empty string."""
    slow = missing("torch", "outlast")
    if not slow:
        return ""
    packages = f"{' and '.join(slow)} {'has' if len(slow) == 1 else 'have'} no compiled bytecode"
    return f"{packages}: each start takes longer; {remedy(slow, image=image)}"


def missing(*packages: str) -> dict[str, str]:
    """Return the directories of packages whose bytecode is missing or stale and cannot be written, keyed by package."""
    directories = {}
    for package in packages:
        spec = importlib.util.find_spec(package)
        if spec is None or spec.origin is None:
            continue
        cached = importlib.util.cache_from_source(spec.origin)
        place = os.path.dirname(cached) if os.path.isdir(os.path.dirname(cached)) else os.path.dirname(spec.origin)
        if not _valid(spec.origin, cached) and (sys.dont_write_bytecode or not os.access(place, os.W_OK)):
            directories[package] = os.path.dirname(spec.origin)
    return directories


def _valid(source: str, cached: str) -> bool:
    """Return whether this Python would use this bytecode for this source (PEP 552)."""
    try:
        with open(cached, "rb") as file:
            head = file.read(16)
        stat = os.stat(source)
    except OSError:
        return False
    by_hash = head[4:8] != bytes(4)
    stamp = int(stat.st_mtime).to_bytes(8, "little")[:4] + (stat.st_size & 0xFFFFFFFF).to_bytes(4, "little")
    return head[:4] == importlib.util.MAGIC_NUMBER and (by_hash or head[8:] == stamp)


def remedy(packages: dict[str, str], *, image: bool = True) -> str:
    """Return advice on compiling these `packages` (directories keyed by name), in a pod's `image` or on this machine."""
    where = " ".join(sorted({os.path.dirname(path) for path in packages.values()}))
    how = "compile in the Dockerfile: RUN" if image else "compile once:"
    return f"{how} python3 -m compileall -q {where} (pip does so by itself, uv with UV_COMPILE_BYTECODE=1)"
