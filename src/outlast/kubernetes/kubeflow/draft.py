"""A job file in the making: what a document of Kubeflow becomes, and what must be said of it. Pure."""

from __future__ import annotations

import dataclasses
import posixpath
from pathlib import Path
from typing import Any

from outlast.base import units
from outlast.base.errors import InvalidJob
from outlast.job import accelerators, contract
from outlast.kubernetes.kubeflow import command_line

Document = dict[str, Any]
_SHORT = {resource: name for name, resource in accelerators.RESOURCES.items()}
_OURS = ("startupProbe", "livenessProbe", "readinessProbe", "lifecycle")
_COPIED = {"tolerations": "tolerations", "nodeSelector": "nodeSelector", "priorityClassName": "scheduling.priorityClassName"}


@dataclasses.dataclass
class Draft:
    """The fields of an ElasticJob as far as they are known, and a sentence for each field that is assumed or dropped."""

    source: str
    directory: Path
    """Directory of the document, which may hold the code."""
    spec: Document = dataclasses.field(default_factory=dict)
    said: list[str] = dataclasses.field(default_factory=list)
    launcher: dict[str, str] = dataclasses.field(default_factory=dict)
    """Options of torchrun by name, such as `nnodes`; `python` if the training starts without it."""

    def say(self, field: str, sentence: str) -> None:
        self.said.append(f"{field} {sentence}")

    def put(self, path: str, value: Any) -> None:
        """Set the field at a path in `spec`, such as `restarts.limit`."""
        *above, name = path.split(".")
        part = self.spec
        for each in above:
            part = part.setdefault(each, {})
        part[name] = value

    def refusal(self, field: str, sentence: str) -> InvalidJob:
        return InvalidJob([(None, f"{field} {sentence}")], source=self.source)

    def take_pod(self, pod: Document, field: str) -> None:
        """Translate a pod template with the container `trainer`; what a job file has no field for stays in its `template`.
        Raises InvalidJob."""
        fields = dict(pod.get("spec") or {})
        containers = fields.pop("containers", None) or []
        trainer = next((dict(each) for each in containers if each.get("name") == contract.Pod.TRAINER), None)
        if trainer is None:
            raise self.refusal(f"{field}.spec.containers", "has none for the training; Kubeflow calls it node, or pytorch")
        self.spec["image"] = trainer.pop("image", None)
        self._take_resources(trainer, field)
        self._take_env(trainer, field)
        self._take_command(trainer, field)
        if dropped := [name for name in _OURS if trainer.pop(name, None)]:
            self.say(f"{field}: {', '.join(dropped)}", "is dropped: Outlast's agent has its own")
        fields.pop("restartPolicy", None)
        for name, path in _COPIED.items():
            self.put(path, fields.pop(name, None))
        if grace := fields.pop("terminationGracePeriodSeconds", None):
            self.put("interruption.grace", f"{grace}s")
        others = [each for each in containers if each.get("name") != contract.Pod.TRAINER]
        fields["containers"] = [*([trainer] if len(trainer) > 1 else []), *others]
        self.spec["template"] = {"metadata": pod.get("metadata"), "spec": fields}

    def _take_resources(self, trainer: Document, field: str) -> None:
        given = trainer.pop("resources", None) or {}
        requests, limits = given.get("requests") or {}, given.get("limits") or {}
        both = {**requests, **limits}
        taken = {"cpu": requests.get("cpu"), "cpuLimit": limits.get("cpu"), "memory": both.get("memory")}
        if device := next(filter(accelerators.is_accelerator, both), ""):
            count = int(both[device]) if str(both[device]).isdecimal() else both[device]
            taken |= {"gpu": count, "accelerator": _SHORT.get(device, device)}
        if requests.get("memory", taken["memory"]) != limits.get("memory"):
            self.say(f"{field}: memory ({taken['memory']})", "is requested and the limit: a job file has one number")
        self.spec["resources"] = taken
        for part, amounts in (("requests", requests), ("limits", limits)):
            if rest := {name: amount for name, amount in amounts.items() if name not in ("cpu", "memory", device)}:
                trainer.setdefault("resources", {})[part] = rest

    def _take_env(self, trainer: Document, field: str) -> None:
        others, dropped = [], []
        for variable in trainer.pop("env", None) or ():
            name, value = variable["name"], variable.get("value") or ""
            if name in ("PET_NNODES", "PET_NPROC_PER_NODE"):
                self.launcher[name.removeprefix("PET_").lower().replace("_", "-")] = value
            elif contract.RESERVED_ENV.search(name):
                dropped.append(name)
            elif "valueFrom" in variable:
                others.append(variable)
            else:
                self.spec.setdefault("env", {})[name] = value
        if others:
            trainer["env"] = others
        if dropped:
            self.say(f"{field}: env {', '.join(dropped)}", "is dropped: Outlast sets what training processes need")

    def _take_command(self, trainer: Document, field: str) -> None:
        """Translate what the container starts. Files beside the document are the job's code, all others are the image's."""
        words = [*(trainer.pop("command", None) or ()), *(trainer.pop("args", None) or ())]
        try:
            program = command_line.read(words)
        except command_line.Unknown as error:
            raise self.refusal(f"{field}.command{f' ({command_line.short(words)})' if words else ''}", str(error)) from error
        script = posixpath.normpath(program.script)
        in_image = posixpath.join(trainer.pop("workingDir", None) or "", program.directory, script)
        runs: Document = {"module": "outlast.command"}
        if program.code:
            runs["args"] = ["-c", program.code, *program.args]
        elif program.module:
            top = self.directory / program.module.partition(".")[0]
            here = top.is_dir() or top.with_suffix(".py").is_file()
            runs = {"module": program.module, "args": [*program.args], "code": "." if here else None}
        elif posixpath.isabs(in_image):
            runs["args"] = [in_image, *program.args]
        else:
            beside = (self.directory / script).is_file()
            runs = {"script": script, "args": [*program.args], "code": "." if beside else contract.Pod.CODE}
            where = f"not beside this file: it is looked for in {contract.Pod.CODE} of the image"
            self.say(f"{field}.command: {script}", f"is {'beside this file, whose directory is the code' if beside else where}")
        self.spec |= {**runs, "env": {**self.spec.get("env", {}), **program.env}}
        if dropped := sorted({*(program.options or {})} - {*command_line.HONOURED}):
            self.say(f"{field}.command: --{', --'.join(dropped)}", "is dropped: workers find one another without it")
        self.launcher |= {"python": ""} if program.options is None else program.options

    def take_sizes(self, replicas: int, field: str) -> None:
        """Set the numbers of workers: those of torchrun's `--nnodes` if it is a range, else `replicas`."""
        least, colon, most = self.launcher.get("nnodes", "").partition(":")
        if colon and least.isdecimal() and most.isdecimal():
            inside = min(max(replicas, int(least)), int(most))
            self.spec["workers"] = {"replicas": inside, "min": int(least), "max": int(most)}
            return
        self.spec["workers"] = {"replicas": replicas}
        if replicas > 1:
            ways = "a lost worker is replaced, and training waits for it; --set workers.min=1 trains on without it"
            self.say(f"{field} ({replicas})", f"is workers.replicas, and so workers.min and workers.max: {ways}")

    def take_processes(self, given: str, field: str, *, cores: bool) -> None:
        """Set the processes of a worker. With `cores`, `auto` means one for each core where there are no GPUs."""
        count, resources = self.launcher.get("nproc-per-node") or given, self.spec["resources"]
        if "python" in self.launcher:
            self.spec["processesPerWorker"] = 1
            if count != "auto":
                self.say(f"{field} ({count})", "has no effect: without torchrun, each worker has one process")
        elif count == "cpu" or (count == "auto" and cores and not resources.get("gpu")):
            self.spec["processesPerWorker"] = max(1, int(units.cores(resources["cpu"] or resources["cpuLimit"] or 1)))
        elif count.isdecimal():
            self.spec["processesPerWorker"] = int(count)
        elif not resources.get("gpu"):
            self.say(f"{field} ({count})", "is one process of each worker, which has no GPUs")
