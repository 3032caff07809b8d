"""Finds and reads the kubeconfig as kubectl does, without sending requests.

The configuration is `$KUBECONFIG`, else `~/.kube/config`, else this pod's service account. Several files in `$KUBECONFIG` are
merged, and the first file that sets a value wins.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote

from outlast.base.errors import NoCluster

ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
"""Directory of a pod's service account token."""
_PATHS = {
    "clusters": ("cluster", ("certificate-authority",)),
    "users": ("user", ("client-certificate", "client-key", "tokenFile")),
    "contexts": ("context", ()),
}
"""Sections of a kubeconfig, each with the key of an entry's value, and the fields of the value that are paths relative to the
file."""


def files(environ: Mapping[str, str]) -> list[Path]:
    """Return the existing kubeconfigs. Raises NoCluster if `$KUBECONFIG` lists only missing files."""
    paths = [Path(part).expanduser() for part in environ.get("KUBECONFIG", "").split(os.pathsep) if part]
    if not paths:
        default = Path("~/.kube/config").expanduser()
        return [default] if default.is_file() else []
    if not (existing := [path for path in paths if path.is_file()]):
        names = ", ".join(map(str, paths))
        raise NoCluster(f"KUBECONFIG names {names}, which does not exist; correct it, or log in to a cluster to make one")
    return existing


def in_pod(environ: Mapping[str, str]) -> bool:
    """Return whether this process runs in a pod with a service account."""
    return "KUBERNETES_SERVICE_HOST" in environ and (ACCOUNT / "token").is_file()


def available(environ: Mapping[str, str]) -> bool:
    """Return whether there is a configuration for a cluster. Raises NoCluster if `$KUBECONFIG` is wrong."""
    return bool(files(environ)) or in_pod(environ)


def read(paths: list[Path]) -> dict[str, Any]:
    """Read and merge kubeconfigs. Raises NoCluster if a file cannot be read."""
    import yaml

    merged: dict[str, Any] = {"current-context": None, **{section: [] for section in _PATHS}}
    for path in paths:
        try:
            config = yaml.safe_load(path.read_text()) or {}
        except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
            raise NoCluster(f"the kubeconfig {path} cannot be read: {str(error).splitlines()[0]}; correct it") from error
        if not isinstance(config, dict):
            raise NoCluster(f"{path} is no kubeconfig; it must be a mapping with clusters, contexts and users")
        merged["current-context"] = merged["current-context"] or config.get("current-context")
        for section, (key, fields) in _PATHS.items():
            names = {entry["name"] for entry in merged[section]}
            for entry in config.get(section) or []:
                if entry["name"] not in names:
                    value = dict(entry.get(key) or {})
                    value |= {field: str(path.parent.absolute() / value[field]) for field in fields if value.get(field)}
                    merged[section].append({"name": entry["name"], key: value})
    return merged


def context_name(config: Mapping[str, Any], context: str | None) -> str:
    """Return the selected context's name. Raises NoCluster if the context does not exist or is incomplete."""
    contexts = [entry["name"] for entry in config["contexts"]]
    selected = context or config["current-context"]
    names = f"there are {', '.join(contexts)}" if contexts else "the kubeconfig has none"
    if not selected:
        raise NoCluster(f"the kubeconfig has no current context; choose one with --context: {names}")
    if selected not in contexts:
        raise NoCluster(f"there is no context {selected} in the kubeconfig; {names}")
    fields = next(entry["context"] for entry in config["contexts"] if entry["name"] == selected)
    for key in ("cluster", "user"):
        if (value := fields.get(key)) and value not in [entry["name"] for entry in config[f"{key}s"]]:
            raise NoCluster(
                f"context {selected} names the {key} {value}, which the kubeconfig lacks; correct it, or log in again"
            )
    return str(selected)


def impersonation_headers(config: Mapping[str, Any], context: str) -> list[tuple[str, str]]:
    """Return the HTTP headers that make a context's user impersonate another.

    https://kubernetes.io/docs/reference/access-authn-authz/user-impersonation/
    """
    user_name = next(entry["context"].get("user") for entry in config["contexts"] if entry["name"] == context)
    user: Mapping[str, Any] = next((entry["user"] for entry in config["users"] if entry["name"] == user_name), {})
    headers = [("Impersonate-User", user["as"])] if user.get("as") else []
    headers += [("Impersonate-Uid", user["as-uid"])] if user.get("as-uid") else []
    headers += [("Impersonate-Group", group) for group in user.get("as-groups") or ()]
    for key, values in (user.get("as-user-extra") or {}).items():
        headers += [(f"Impersonate-Extra-{quote(key.lower(), safe='')}", value) for value in values]
    return headers
