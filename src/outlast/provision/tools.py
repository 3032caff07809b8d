"""The programs that carry out a plan: which are needed, in which version, and how to run them."""

from __future__ import annotations

import collections
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from outlast.errors import OutlastError

_ASK_S = 120.0
"""How long a question may take."""
_KEPT = 5
"""Last lines of a program's output that an error repeats."""
Tell = Callable[[str], None]


@dataclass(frozen=True)
class Tool:
    """A program of others."""

    least: tuple[int, int]
    """The oldest version that will do."""
    ask: tuple[str, ...]
    """How to ask for its version."""
    get: str
    """Where to get it."""


TOOLS: Mapping[str, Tool] = {
    "eksctl": Tool((0, 200), ("eksctl", "version"), "https://eksctl.io/installation"),
    "kubectl": Tool((1, 29), ("kubectl", "version", "--client"), "https://kubernetes.io/docs/tasks/tools"),
    "helm": Tool((3, 14), ("helm", "version", "--short"), "https://helm.sh/docs/intro/install"),
}


@dataclass(frozen=True)
class Ran:
    """How a program has ended."""

    code: int
    output: str
    """Of a question all that it printed; of a command the last lines."""

    @property
    def why(self) -> str:
        """The last line, as the end of a sentence; empty if it said nothing."""
        last = self.output.splitlines()
        return f": {last[-1]}" if last else ""


class Tools:
    """Runs programs in one directory, with its kubeconfig."""

    def __init__(self, directory: Path, environ: Mapping[str, str], tell: Tell) -> None:
        """`tell` is called with each line that a command prints."""
        self._directory, self._tell = directory, tell
        self._environ = dict(environ)

    def ask(self, command: Sequence[str]) -> Ran:
        """Run what changes nothing. A program that does not answer has failed."""
        try:
            found = subprocess.run(
                _ours(command),
                cwd=self._directory,
                env=self._environ,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                errors="replace",
                timeout=_ASK_S,
            )
        except subprocess.TimeoutExpired:
            return Ran(124, f"no answer within {_ASK_S:g} s")
        return Ran(found.returncode, found.stdout if found.returncode == 0 else found.stdout + found.stderr)

    def run(self, command: Sequence[str]) -> Ran:
        """Run what changes something, and pass on what it prints. Ctrl-C reaches it, too; we wait until it has ended."""
        last: collections.deque[str] = collections.deque(maxlen=_KEPT)
        process = subprocess.Popen(
            _ours(command),
            cwd=self._directory,
            env=self._environ,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        )
        assert process.stdout is not None
        try:
            for line in process.stdout:
                last.append(line.rstrip())
                self._tell(line.rstrip())
        finally:
            process.stdout.close()
            code = process.wait()
        return Ran(code, "\n".join(last))


def items(text: str) -> list[dict[str, Any]]:
    """The objects in what `kubectl get -o json` has printed; of other text none."""
    try:
        found: list[dict[str, Any]] = json.loads(text)["items"]
    except (ValueError, KeyError, TypeError):
        return []
    return found


def check(kinds: Iterable[str], path: str | None = None) -> None:
    """Raise OutlastError if one of these programs is missing or too old; all of them are named. `path` as $PATH."""
    problems = []
    for name in sorted(set(kinds) & TOOLS.keys()):
        tool = TOOLS[name]
        least = ".".join(map(str, tool.least))
        program = shutil.which(name, path=path)
        found = version(_answer(program, tool)) if program else None
        if program is None:
            problems.append(f"{name} is not installed (get {least} or newer: {tool.get})")
        elif found is None:
            problems.append(f"{program} does not say its version (get {least} or newer: {tool.get})")
        elif found < tool.least:
            problems.append(f"{program} is {found[0]}.{found[1]}, {least} is needed ({tool.get})")
    if problems:
        raise OutlastError("; ".join(problems))


def version(text: str) -> tuple[int, int] | None:
    """The first version in what a program says: `v3.14.2+gc309b6f`, `0.210.0`."""
    found = re.search(r"\bv?(\d+)\.(\d+)\.\d", text)
    return (int(found[1]), int(found[2])) if found else None


def _answer(program: str, tool: Tool) -> str:
    try:
        return subprocess.run((program, *tool.ask[1:]), capture_output=True, text=True, timeout=_ASK_S, check=False).stdout
    except (OSError, subprocess.TimeoutExpired):
        return ""


def _ours(command: Sequence[str]) -> Sequence[str]:
    """`outlast` is this installation, whatever $PATH says."""
    return [sys.executable, "-c", "from outlast.cli import main; main()", *command[1:]] if command[0] == "outlast" else command


def environment(kubeconfig: Path) -> dict[str, str]:
    """That of this process, with the kubeconfig of the cluster. In a pod, programs that find no kubeconfig would take the cluster
    that the pod is in."""
    ours = {name: value for name, value in os.environ.items() if not name.startswith("KUBERNETES_SERVICE_")}
    return {**ours, "KUBECONFIG": str(kubeconfig)}
