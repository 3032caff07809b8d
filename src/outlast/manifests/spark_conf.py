"""Spark's configuration on Kubernetes: what Outlast sets, what the user may set, and what executors then ask for. Pure.

Ours are defaults (`spark-defaults.conf`): what the user gives wins, but for what would break the arrangement of driver and
executors, which is refused. https://spark.apache.org/docs/latest/running-on-kubernetes.html#spark-properties
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass

from outlast import spec, units
from outlast.contract import Env, Pod
from outlast.errors import OutlastError
from outlast.manifests import resources

MASTER = "k8s://https://kubernetes.default.svc"
"""The API server, as a pod reaches it."""
ACCOUNT = "spark"
TEMPLATE = "executor.json"
"""The executors' pod template, in the driver's directory of configuration, `contract.Pod.CONFIG`."""
INSTANCES, MOST = "spark.executor.instances", "spark.dynamicAllocation.maxExecutors"
_MOST = 50
"""Most executors, where the user gives no number."""
_FAILURES = 20
"""Executors that may fail within an hour, or four per executor where that is more. Spark's own limit is two per executor (3 at
least) in all its life, and those of machines that are taken away count. Those that end as they start reach ours in minutes."""
_DRIVER_PORT, _BLOCK_PORT = 7078, 7079
"""Spark's own in a cluster; fixed, for NetworkPolicies."""
_HEAP = 1 << 30
"""Default heap of a JVM, bytes. The work is done by Python beside it."""
_MEMORY, _OVERHEAD, _PYTHON = "spark.executor.memory", "spark.executor.memoryOverhead", "spark.executor.pyspark.memory"
_CORES, _REQUEST, _LIMIT = (
    "spark.executor.cores",
    "spark.kubernetes.executor.request.cores",
    "spark.kubernetes.executor.limit.cores",
)
_DRIVER_MEMORY, _DRIVER_OVERHEAD = "spark.driver.memory", "spark.driver.memoryOverhead"
_DRIVER_REQUEST, _DRIVER_LIMIT = "spark.kubernetes.driver.request.cores", "spark.kubernetes.driver.limit.cores"

_PODS = f"the account {ACCOUNT} may create and delete pods, nothing else"
_REFUSED = {
    r"spark\.master": "give --master",
    r"spark\.submit\..*": "the driver's pod runs in client mode",
    r"spark\.kubernetes\.namespace": "give -n",
    r"spark\.kubernetes\.((driver|executor)\.)?container\.image": "give --image",
    r"spark\.driver\.(host|port|bindAddress|blockManager\.port)": "executors find the driver by the address of its pod",
    r"spark\.kubernetes\.driver\.pod\.name": "the Job names its pods",
    r"spark\.kubernetes\.executor\.podNamePrefix": "a driver that is made again would find these names taken",
    r"spark\.kubernetes\.(driver|executor)\.podTemplate\w+": "give `template` in a job file, by --job",
    r"spark\.kubernetes\.authenticate\..*": f"driver and executors use the account {ACCOUNT}, whose rights Outlast sets",
    r"spark\.kubernetes\.allocation\.pods\.allocator": _PODS,
    r"spark\.kubernetes\.executor\.(disableConfigMap|deleteOnTermination|decommissionLabel\w*)": _PODS,
    r"spark\.kubernetes\.driver\.(service\.deleteOnTermination|\w*PersistentVolumeClaim)": _PODS,
    r"spark\.kubernetes\.(driver|executor)\.(secrets|secretKeyRef|volumes)\..*": "give --secret, --claim, or --job FILE",
}
"""Keys that the user may not change, and what to do instead."""
_ACCEPTED = {
    "spark.kubernetes.authenticate.driver.serviceAccountName": (ACCOUNT,),
}
"""Values that say what is so anyway."""


@dataclass(frozen=True)
class Executor:
    """What an executor's container asks for."""

    requests: resources.Quantities
    limits: resources.Quantities


def defaults(fields: spec.Spec, conf: Mapping[str, str], namespace: str) -> dict[str, str]:
    """What Outlast sets, for the job file `fields` and the user's `conf`."""
    return {
        "spark.kubernetes.namespace": namespace,
        "spark.kubernetes.container.image": fields.image or "",
        "spark.kubernetes.driver.pod.name": f"${{env:{Env.POD}}}",
        "spark.driver.host": f"${{env:{Env.ADDRESS}}}",
        "spark.driver.port": str(_DRIVER_PORT),
        "spark.driver.blockManager.port": str(_BLOCK_PORT),
        "spark.blockManager.port": str(_BLOCK_PORT),
        "spark.driver.memory": f"{_HEAP >> 20}m",
        "spark.authenticate": "true",
        "spark.kubernetes.executor.podTemplateFile": f"{Pod.CONFIG}/{TEMPLATE}",
        "spark.kubernetes.executor.podTemplateContainerName": Pod.CONTAINER,
        "spark.kubernetes.executor.disableConfigMap": "true",
        "spark.kubernetes.driver.service.deleteOnTermination": "false",
        "spark.kubernetes.driver.ownPersistentVolumeClaim": "false",
        "spark.kubernetes.driver.reusePersistentVolumeClaim": "false",
        "spark.decommission.enabled": "true",
        "spark.executor.decommission.signal": "TERM",
        "spark.kubernetes.decommission.script": "/bin/true",
        "spark.storage.decommission.enabled": "true",
        "spark.storage.decommission.rddBlocks.enabled": "true",
        "spark.storage.decommission.shuffleBlocks.enabled": "true",
        "spark.executor.maxNumFailures": str(_failures(conf)),
        "spark.executor.failuresValidityInterval": "1h",
        **_number(conf),
        **_sizes(fields.resources, conf),
    }


def checked(conf: Mapping[str, str], ours: Mapping[str, str]) -> None:
    """Raise OutlastError for a key that the user may not change, unless its value is what is set anyway."""
    for key, value in conf.items():
        remedy = next((remedy for pattern, remedy in _REFUSED.items() if re.fullmatch(pattern, key)), "")
        if remedy and ours.get(key) != value and value not in _ACCEPTED.get(key, ()):
            raise OutlastError(f"--conf {key}={value} cannot be given with --master k8s://: {remedy}")


def text(conf: Mapping[str, str]) -> str:
    """The content of `spark-defaults.conf`."""
    return "".join(f"{key} {value}\n" for key, value in conf.items())


def executor(conf: Mapping[str, str]) -> Executor:
    """What an executor asks for, computed as Spark does; `conf` is all of it. Raises OutlastError."""
    heap = _mebibytes(conf, _MEMORY, "1g")
    overhead = _mebibytes(conf, _OVERHEAD, f"{max(384, heap // 10)}m")
    memory = f"{heap + overhead + _mebibytes(conf, _PYTHON, '0')}Mi"
    requests: resources.Quantities = {"cpu": conf.get(_REQUEST) or conf.get(_CORES, "1"), "memory": memory}
    limits: resources.Quantities = {**({"cpu": conf[_LIMIT]} if _LIMIT in conf else {}), "memory": memory}
    return Executor(requests, limits)


def driver(conf: Mapping[str, str]) -> dict[str, resources.Quantities]:
    """The `resources` of the driver's container: its JVM, and the Python that plans and finishes. Raises OutlastError."""
    memory = _mebibytes(conf, _DRIVER_MEMORY, "1g") + _mebibytes(conf, _DRIVER_OVERHEAD, "1g")
    limits: resources.Quantities = {"cpu": conf[_DRIVER_LIMIT]} if _DRIVER_LIMIT in conf else {}
    return {
        "requests": {"cpu": conf.get(_DRIVER_REQUEST, "1"), "memory": f"{memory}Mi"},
        **({"limits": limits} if limits else {}),
    }


def of_pods(conf: Mapping[str, str], role: str, what: str) -> dict[str, str]:
    """The labels or annotations (`what`: label, annotation) that the user's configuration gives the pods of a role."""
    prefix = f"spark.kubernetes.{role}.{what}."
    return {key.removeprefix(prefix): value for key, value in conf.items() if key.startswith(prefix)}


def _number(conf: Mapping[str, str]) -> dict[str, str]:
    """How many executors there are: as many as the user says, or as there is work for."""
    if INSTANCES in conf and conf.get("spark.dynamicAllocation.enabled") != "true":
        return {"spark.dynamicAllocation.enabled": "false"}
    return {
        "spark.dynamicAllocation.enabled": "true",
        "spark.dynamicAllocation.shuffleTracking.enabled": "true",
        MOST: str(_MOST),
    }


def _failures(conf: Mapping[str, str]) -> int:
    """How many executors may fail within the interval. Raises OutlastError for a number of executors that is none."""
    given = {key: conf[key] for key in (INSTANCES, MOST) if key in conf}
    for key, value in given.items():
        if not value.isdecimal() or int(value) < 1:
            raise OutlastError(f"--conf {key}={value} is no number of executors; give 1 or more")
    most = max(map(int, given.values())) if given else _MOST
    return max(_FAILURES, 4 * most)


def _sizes(wanted: spec.Resources, conf: Mapping[str, str]) -> dict[str, str]:
    """What the job file's `resources` are as Spark's configuration: at most a gibibyte of the memory is the JVM's, and as many
    tasks run at once as cores are reserved. Raises OutlastError."""
    memory = wanted.memory or 2 * _HEAP
    heap = min(_HEAP, memory // 2)
    cores = wanted.cpu or wanted.cpu_limit or 1.0
    try:
        reserved = units.cores(conf.get(_REQUEST, cores))
    except ValueError as error:
        raise OutlastError(f"--conf {_REQUEST}={conf[_REQUEST]} {error}") from error
    return {
        _CORES: str(max(1, math.floor(reserved))),
        _REQUEST: units.cores_text(cores),
        **({_LIMIT: units.cores_text(wanted.cpu_limit)} if wanted.cpu_limit else {}),
        _MEMORY: f"{heap >> 20}m",
        _OVERHEAD: f"{(memory - heap) >> 20}m",
    }


def _mebibytes(conf: Mapping[str, str], key: str, default: str) -> int:
    """A size as Spark writes it, `512m` or `2g`; without a unit it is mebibytes."""
    value = conf.get(key, default)
    found = re.fullmatch(r"(\d+)\s*([kmgtp]?)b?", value.strip().lower())
    if not found:
        raise OutlastError(f"--conf {key}={value} is no size as Spark reads it; write 512m or 2g")
    return int(found[1]) << {"k": 0, "": 10, "m": 10, "g": 20, "t": 30, "p": 40}[found[2]] >> 10
