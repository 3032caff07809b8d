"""Provides the command, environment and token for JupyterLab in `outlast notebook` (decision 0052). No other module
depends on Jupyter."""

from __future__ import annotations

import contextlib
import dataclasses
import http.client
import importlib.util
import json
import os
import secrets
import sys
from collections.abc import Mapping
from importlib import resources
from pathlib import Path

from outlast.base.errors import OutlastError

PORT = 8888
FIRST = "first.ipynb"
TOKEN = "OUTLAST_NOTEBOOK_TOKEN"
PREFIX = "NB_PREFIX"
"""Kubeflow's environment variable for the URL path under which its gateway serves the notebook."""
_DEFAULTS = {"@jupyterlab/apputils-extension:notification": {"fetchNews": "false", "checkForUpdates": False}}
_BITS = 256
_SHORTEST = 16
"""Minimum length of the user's token. Arbitrary."""
_ANSWER_S = 5.0


@dataclasses.dataclass(frozen=True)
class Server:
    """Command line options for a server. Everybody on the machine can read them, so they contain no secrets."""

    directory: Path = Path()
    port: int = PORT
    bind: str = "127.0.0.1"
    open: bool = False
    """Whether to open a browser. It gets the token in a private file, not on its command line."""
    base: str = "/"
    """Prefix of URL paths for a proxy in front of the server, with a slash at both ends."""

    @property
    def host(self) -> str:
        """The server's address as seen from this machine."""
        return {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self.bind, self.bind)


def check() -> None:
    if importlib.util.find_spec("jupyterlab") is None:
        raise OutlastError("JupyterLab is not installed; pip install 'outlast[notebook]'")


def token(file: Path | None, environ: Mapping[str, str]) -> tuple[str, bool]:
    """Return the token (from `file`, `TOKEN` in `environ`, or 256 random bits), and whether it is random. Raises OutlastError."""
    if file is None and TOKEN not in environ:
        return secrets.token_hex(_BITS // 8), True
    try:
        text = (environ[TOKEN] if file is None else file.read_text()).strip()
    except (OSError, UnicodeDecodeError) as error:
        raise OutlastError(f"--token-file {file} cannot be read: {error}; name a file with one line, the token") from error
    if len(text) < _SHORTEST or not text.isprintable() or " " in text:
        raise OutlastError(
            f"the token in {file or f'the variable {TOKEN}'} must have at least {_SHORTEST} characters, without spaces; "
            "make one with: python3 -c 'import secrets; print(secrets.token_hex(32))'"
        )
    return text, False


def base(environ: Mapping[str, str]) -> str:
    """Return the prefix for URL paths: the one that Kubeflow's controller sets in its pods, or `/` elsewhere."""
    return f"/{prefix}/" if (prefix := environ.get(PREFIX, "").strip("/")) else "/"


def command(server: Server, *, root: bool) -> list[str]:
    """Return a server's command line. If `root` is set, the server may run as root, which Jupyter refuses by default."""
    options = {
        "ServerApp.ip": server.bind,
        "ServerApp.port": server.port,
        "ServerApp.port_retries": 0,
        "ServerApp.root_dir": server.directory,
        "ServerApp.base_url": server.base,
        "ServerApp.open_browser": server.open,
        "ServerApp.allow_root": root,
        "LabApp.default_url": f"/lab/tree/{FIRST}",
    }
    return [sys.executable, "-P", "-m", "jupyterlab", *(f"--{name}={value}" for name, value in options.items())]


def environment(environ: Mapping[str, str], directory: Path, private: Path, *, home: bool) -> dict[str, str]:
    """Return the environment for a server and its kernels, in which Jupyter finds the files that `prepare` has written to
    `private`. If `home` is not set, as in a pod where HOME is read-only, HOME becomes `.home` in the work directory."""
    where = Path(environ["HOME"]) if home else directory / ".home"
    return {
        **{name: value for name, value in environ.items() if name not in (TOKEN, "JUPYTER_TOKEN")},
        "HOME": str(where),
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), environ.get("PATH", os.defpath)]),
        "JUPYTER_PATH": os.pathsep.join([str(private), *filter(None, [environ.get("JUPYTER_PATH")])]),
        "JUPYTER_CONFIG_PATH": os.pathsep.join([str(private), *filter(None, [environ.get("JUPYTER_CONFIG_PATH")])]),
        "JUPYTER_TOKEN_FILE": str(private / "token"),
    }


def prepare(private: Path, token: str) -> None:
    """Write a server's token, kernel and default settings to `private`, a directory that only this user can read."""
    file = os.open(private / "token", os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(file, "w") as opened:
        opened.write(token)
    kernel = private / "kernels" / "python3"
    kernel.mkdir(parents=True)
    spec = {
        "argv": [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"],
        "display_name": "Python 3 (Outlast)",
        "language": "python",
        "metadata": {"debugger": True},
    }
    (kernel / "kernel.json").write_text(json.dumps(spec))
    (private / "labconfig").mkdir()
    (private / "labconfig" / "default_setting_overrides.json").write_text(json.dumps(_DEFAULTS))


def place(directory: Path) -> bool:
    """Create the work directory with the first notebook. Returns whether the notebook was copied now. Raises OutlastError."""
    text = resources.files("outlast.local").joinpath(FIRST).read_bytes()
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileExistsError), (directory / FIRST).open("xb") as file:
            file.write(text)
            return True
        if not os.access(directory, os.W_OK):
            raise PermissionError(13, os.strerror(13))
    except OSError as error:
        raise OutlastError(
            f"{directory} cannot be written: {error.strerror}; name another directory for the notebooks"
        ) from error
    return False


def url(server: Server, host: str, token: str) -> str:
    """Return the URL for a browser. Without a `token`, the page prompts for it."""
    return f"http://{host}:{server.port}{server.base}lab/tree/{FIRST}{f'?token={token}' if token else ''}"


def ready(server: Server, token: str) -> bool:
    """Return whether the server accepts `token`, which may be empty. Raises OutlastError if it also answers without a token."""
    if _status(server.host, server.port, server.base, token) != http.client.OK:
        return False
    if token and _status(server.host, server.port, server.base, "") == http.client.OK:
        raise OutlastError(
            "JupyterLab answers without a token: your Jupyter settings switch authentication off; "
            "`jupyter --paths` says where they are, remove allow_unauthenticated_access and an empty token there"
        )
    return True


def _status(host: str, port: int, base: str, token: str) -> int:
    with contextlib.closing(http.client.HTTPConnection(host, port, timeout=_ANSWER_S)) as connection:  # uses no proxy
        try:
            connection.request("GET", f"{base}api/status", headers={"Authorization": f"token {token}"} if token else {})
            return connection.getresponse().status
        except (OSError, http.client.HTTPException):
            return 0
