"""Archives for tests."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Mapping


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
