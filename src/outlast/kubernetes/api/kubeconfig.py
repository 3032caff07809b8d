"""The kubeconfig, found and read as kubectl does it.

The configuration is `$KUBECONFIG` (several files are merged, and the first file that sets a value wins), else `~/.kube/config`,
else the account of the pod in which this process runs. Called by `api.connect`. Only reads files, without asking a server.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote

from outlast.base.errors import NoCluster

ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
"""Directory with the token of a pod's account."""
_PATHS = {
    "clusters": ("cluster", ("certificate-authority",)),
    "users": ("user", ("client-certificate", "client-key", "tokenFile")),
    "contexts": ("context", ()),
}
"""By section of a kubeconfig: the key of an entry's value, and the fields of the value that are paths relative to the file's
directory."""


def files(environ: Mapping[str, str]) -> list[Path]:
    """The existing kubeconfigs. Raises NoCluster if `$KUBECONFIG` names none that exists."""
    named = [Path(part).expanduser() for part in environ.get("KUBECONFIG", "").split(os.pathsep) if part]
    if not named:
        usual = Path("~/.kube/config").expanduser()
        return [usual] if usual.is_file() else []
    if not (found := [path for path in named if path.is_file()]):
        missing = ", ".join(map(str, named))
        raise NoCluster(f"KUBECONFIG names {missing}, which does not exist; correct it, or log in to a cluster to make one")
    return found


def inside(environ: Mapping[str, str]) -> bool:
    """Whether this process runs in a pod with an account."""
    return "KUBERNETES_SERVICE_HOST" in environ and (ACCOUNT / "token").is_file()


def any_(environ: Mapping[str, str]) -> bool:
    """Whether any configuration names a cluster. Raises NoCluster if `$KUBECONFIG` is wrong."""
    return bool(files(environ)) or inside(environ)


def read(paths: list[Path]) -> dict[str, Any]:
    """The merged kubeconfigs. Raises NoCluster if a file cannot be read."""
    import yaml

    whole: dict[str, Any] = {"current-context": None, **{section: [] for section in _PATHS}}
    for path in paths:
        try:
            found = yaml.safe_load(path.read_text()) or {}
        except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
            raise NoCluster(f"the kubeconfig {path} cannot be read: {str(error).splitlines()[0]}; correct it") from error
        if not isinstance(found, dict):
            raise NoCluster(f"{path} is no kubeconfig; it must be a mapping with clusters, contexts and users")
        whole["current-context"] = whole["current-context"] or found.get("current-context")
        for section, (key, fields) in _PATHS.items():
            known = {entry["name"] for entry in whole[section]}
            for entry in found.get(section) or []:
                if entry["name"] not in known:
                    value = dict(entry.get(key) or {})
                    value |= {field: str(path.parent.absolute() / value[field]) for field in fields if value.get(field)}
                    whole[section].append({"name": entry["name"], key: value})
    return whole


def chosen(whole: Mapping[str, Any], context: str | None) -> str:
    """The name of the selected context. Raises NoCluster, with the existing names, if there is none."""
    known = [entry["name"] for entry in whole["contexts"]]
    selected = context or whole["current-context"]
    names = f"there are {', '.join(known)}" if known else "the kubeconfig has none"
    if not selected:
        raise NoCluster(f"the kubeconfig has no current context; choose one with --context: {names}")
    if selected not in known:
        near = difflib.get_close_matches(selected, known, n=1)
        hint = f"did you mean {near[0]}? " if near else ""
        raise NoCluster(f"there is no context {selected} in the kubeconfig; {hint}{names}")
    here = next(entry["context"] for entry in whole["contexts"] if entry["name"] == selected)
    for section, key in (("clusters", "cluster"), ("users", "user")):
        named = here.get(key)
        if (named or section == "clusters") and named not in {entry["name"] for entry in whole[section]}:
            raise NoCluster(f"context {selected} of the kubeconfig means the {key} {named}, which is not in it; correct it")
    return str(selected)


def impersonated(whole: Mapping[str, Any], context: str) -> list[tuple[str, str]]:
    """The HTTP headers with which the user of a context impersonates another user; empty if the context does not ask for that.

    https://kubernetes.io/docs/reference/access-authn-authz/user-impersonation/
    """
    named = next(entry["context"].get("user") for entry in whole["contexts"] if entry["name"] == context)
    user: Mapping[str, Any] = next((entry["user"] for entry in whole["users"] if entry["name"] == named), {})
    headers = [("Impersonate-User", user["as"])] if user.get("as") else []
    headers += [("Impersonate-Uid", user["as-uid"])] if user.get("as-uid") else []
    headers += [("Impersonate-Group", group) for group in user.get("as-groups") or ()]
    for key, values in (user.get("as-user-extra") or {}).items():
        headers += [(f"Impersonate-Extra-{quote(key.lower(), safe='')}", value) for value in values]
    return headers
