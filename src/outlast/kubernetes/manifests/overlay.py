"""Strategic merge of a patch into a pod template, as with `kubectl patch --type strategic`.

Mappings merge key by key, and `null` removes a key. Lists whose items have a name (containers, volumes, variables, ports) merge
item by item; other lists are replaced. `$patch: delete` removes an item, and `$patch: replace` replaces a mapping.
https://kubernetes.io/docs/tasks/manage-kubernetes-objects/update-api-object-kubectl-patch/
"""

from __future__ import annotations

from typing import Any

from outlast.job.contract import Pod

KEYS = {
    "containers": "name",
    "initContainers": "name",
    "ephemeralContainers": "name",
    "volumes": "name",
    "env": "name",
    "imagePullSecrets": "name",
    "resourceClaims": "name",
    "volumeMounts": "mountPath",
    "volumeDevices": "devicePath",
    "ports": "containerPort",
    "hostAliases": "ip",
    "topologySpreadConstraints": "topologyKey",
}
"""Merge keys (`patchMergeKey` in the Kubernetes API), keyed by the name of the list."""
_UNIONS = ("volumes", "env")
"""Lists whose items are unions (`retainKeys`): a claim replaces an emptyDir, for example."""
_DIRECTIVES = ("merge", "replace", "delete")


def merge(base: dict[str, Any], patch: dict[str, Any], path: str = "template") -> dict[str, Any]:
    """Return `base` merged with `patch`. Raises ValueError for a part that cannot be merged."""
    if _directive(patch, path) == "replace":
        return _without_directive(patch)
    result = dict(base)
    for key, value in patch.items():
        if key == "$patch":
            continue
        key_path, old = f"{path}.{key}", result.get(key)
        if isinstance(old, list) and key in KEYS and not isinstance(value, list | None):
            raise ValueError(f"{key_path} must be a list of mappings, each with its {KEYS[key]}")
        if value is None:
            result.pop(key, None)
        elif isinstance(value, dict):
            result[key] = merge(old if isinstance(old, dict) else {}, value, key_path)
        elif isinstance(value, list) and key in KEYS:
            result[key] = _items(old if isinstance(old, list) else [], value, key, key_path)
        else:
            result[key] = value
    return result


def _items(base: list[Any], patch: list[Any], name: str, path: str) -> list[Any]:
    key = KEYS[name]
    for index, item in enumerate(patch):
        if not isinstance(item, dict) or not isinstance(item.get(key, "" if "$patch" in item else None), str | int):
            raise ValueError(f"{path}[{index}] has no {key}; give it")
    if any(item == {"$patch": "replace"} for item in patch):
        return [_without_directive(item) for item in patch if "$patch" not in item]
    merged = {item[key]: item for item in base}
    for index, item in enumerate(patch):
        item_path = f"{path}[{index}]"
        if name == "containers" and item.get(key) in Pod.AGENT:  # the agent's container has one of several names
            item = {**item, key: next((each for each in Pod.AGENT if each in merged), item[key])}
        if _directive(item, item_path) == "delete":
            merged.pop(item.get(key), None)
        else:
            old = merged.get(item[key], {})
            if name in _UNIONS:
                old = {part: value for part, value in old.items() if part in item}
            merged[item[key]] = merge(old, item, item_path)
    return list(merged.values())


def _directive(patch: dict[str, Any], path: str) -> str:
    directive = str(patch.get("$patch", "merge"))
    if directive not in _DIRECTIVES:
        raise ValueError(f"{path}.$patch ({directive}) must be one of {', '.join(_DIRECTIVES)}")
    return directive


def _without_directive(value: dict[str, Any]) -> dict[str, Any]:
    return {key: each for key, each in value.items() if key != "$patch"}
