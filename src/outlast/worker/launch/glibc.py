"""A setting of the C library for training processes: large copies in memory bypass the caches.

To write memory in the usual way, a core reads it first. `memcpy` avoids that for copies that are too large for the caches, and
derives what is too large from the cache that the processor reports. A virtual machine often reports that of its whole host, 480
MB for 2 cores for instance, and then no copy is large enough. With this the state of a training is copied in 0.6 of the time
(decision 0043).
"""

from __future__ import annotations

from collections.abc import Mapping

VARIABLE = "GLIBC_TUNABLES"
"""https://sourceware.org/glibc/manual/latest/html_node/Tunables.html; read when a program starts, unknown names are ignored."""
_NAME = "glibc.cpu.x86_non_temporal_threshold"
LARGE = 1 << 20
"""Bytes from which on a copy bypasses the caches. What glibc takes where cores share 1.5 MB each; half of a large core's L2."""


def streaming(environ: Mapping[str, str]) -> dict[str, str]:
    """The variables that make copies of `LARGE` bytes bypass the caches, unless `environ` sets another limit."""
    given = [each for each in environ.get(VARIABLE, "").split(":") if each]
    if any(each.partition("=")[0] == _NAME for each in given):
        return {}
    return {VARIABLE: ":".join([*given, f"{_NAME}={LARGE:#x}"])}
