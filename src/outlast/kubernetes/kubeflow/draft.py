"""A draft of the job file for a Kubeflow document, with sentences that tell the user what was assumed or dropped."""

from __future__ import annotations

import dataclasses
import posixpath
from pathlib import Path
from typing import Any

from outlast.base import units
from outlast.base.errors import InvalidJob
from outlast.job import accelerators, contract
from outlast.kubernetes.kubeflow import container_command

Document = dict[str, Any]
_SHORT = {resource: name for name, resource in accelerators.RESOURCES.items()}
_OURS = ("startupProbe", "livenessProbe", "readinessProbe", "lifecycle")
_COPIED = {"tolerations": "tolerations", "nodeSelector": "nodeSelector", "priorityClassName": "scheduling.priorityClassName"}


@dataclasses.dataclass
class Draft:
    """The ElasticJob's fields so far, and a sentence for each field that is assumed or dropped."""

    source: str
    directory: Path
    spec: Document = dataclasses.field(default_factory=dict)
    said: list[str] = dataclasses.field(default_factory=list)
    env: dict[str, str] = dataclasses.field(default_factory=dict)
    launcher: dict[str, str] = dataclasses.field(default_factory=dict)
    """torchrun's options, keyed by name. The key `python` means that training starts without torchrun."""

    def say(self, field: str, sentence: str) -> None:
        self.said.append(f"{field} {sentence}")

    def put(self, path: str, value: Any) -> None:
        """Set a field of `spec`, such as `restarts.limit`, unless the value is empty."""
        if value in (None, [], {}):
            return
        *above, name = path.split(".")
        part = self.spec
        for each in above:
            part = part.setdefault(each, {})
        part[name] = value

    def refusal(self, field: str, sentence: str) -> InvalidJob:
        return InvalidJob([(None, f"{field} {sentence}")], source=self.source)

    def take_pod(self, pod: Document, field: str) -> None:
        """Translate a pod template that has the container `trainer`. Fields without a counterpart in a job file are put into
        `template`. Raises InvalidJob."""
        fields = dict(pod.get("spec", {}))
        containers = fields.pop("containers", [])
        trainer = next((dict(each) for each in containers if each.get("name") == contract.Pod.TRAINER), None)
        if trainer is None:
            raise self.refusal(f"{field}.spec.containers", "has none for the training; Kubeflow calls it node, or pytorch")
        self.put("image", trainer.pop("image", None))
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
        self.put("template.metadata", pod.get("metadata"))
        self.put("template.spec", {name: value for name, value in fields.items() if value not in ([], {})})

    def _take_resources(self, trainer: Document, field: str) -> None:
        given = trainer.pop("resources", {})
        requests, limits = given.get("requests", {}), given.get("limits", {})
        both = {**requests, **limits}
        self.put("resources.cpu", requests.get("cpu"))
        self.put("resources.cpuLimit", limits.get("cpu"))
        self.put("resources.memory", both.get("memory"))
        if device := next(filter(accelerators.is_accelerator, both), ""):
            self.put("resources.gpu", int(both[device]) if str(both[device]).isdecimal() else both[device])
            self.put("resources.accelerator", _SHORT.get(device, device))
        if requests.get("memory", both.get("memory")) != limits.get("memory"):
            self.say(f"{field}: memory ({both['memory']})", "is requested and the limit: a job file has one number")
        for part, amounts in (("requests", requests), ("limits", limits)):
            if rest := {name: amount for name, amount in amounts.items() if name not in ("cpu", "memory", device)}:
                trainer.setdefault("resources", {})[part] = rest

    def _take_env(self, trainer: Document, field: str) -> None:
        others, dropped = [], []
        for variable in trainer.pop("env", ()):
            name, value = variable.get("name", ""), variable.get("value", "")
            if name in ("PET_NNODES", "PET_NPROC_PER_NODE"):
                self.launcher[name.removeprefix("PET_").lower().replace("_", "-")] = value
            elif contract.RESERVED_ENV.search(name):
                dropped.append(name)
            elif "valueFrom" in variable:
                others.append(variable)
            else:
                self.env[name] = value
        if others:
            trainer["env"] = others
        if dropped:
            self.say(f"{field}: env {', '.join(dropped)}", "is dropped: Outlast sets what training processes need")

    def _take_command(self, trainer: Document, field: str) -> None:
        """Translate the command. Files next to the document become the job's code; other files must be in the image."""
        words = [*trainer.pop("command", ()), *trainer.pop("args", ())]
        try:
            program = container_command.read(words)
        except container_command.Unknown as error:
            raise self.refusal(f"{field}.command{f' ({container_command.short(words)})' if words else ''}", str(error)) from error
        script = posixpath.normpath(program.script)
        in_image = posixpath.join(trainer.pop("workingDir", ""), program.directory, script)
        before: list[str] = []
        if program.module:
            self.put("module", program.module)
            top = self.directory / program.module.partition(".")[0]
            self.put("code", "." if top.is_dir() or top.with_suffix(".py").is_file() else None)
        elif program.code or posixpath.isabs(in_image):
            self.put("module", "outlast.command")
            before = ["-c", program.code] if program.code else [in_image]
        else:
            beside = (self.directory / script).is_file()
            self.spec |= {"script": script, "code": "." if beside else contract.Pod.CODE}
            where = f"not beside this file: it is looked for in {contract.Pod.CODE} of the image"
            self.say(f"{field}.command: {script}", f"is {'beside this file, whose directory is the code' if beside else where}")
        self.put("args", [*before, *program.args])
        self.put("env", self.env | program.env)
        if dropped := sorted({*(program.options or {})} - {*container_command.HONOURED}):
            self.say(f"{field}.command: --{', --'.join(dropped)}", "is dropped: workers find one another without it")
        self.launcher |= {"python": ""} if program.options is None else program.options

    def take_sizes(self, replicas: int, field: str, *, elastic: bool) -> None:
        """Set the numbers of workers from torchrun's `--nnodes` if that is a range, otherwise from `replicas`. In the latter
        case, `elastic` sets the minimum to 1."""
        least, colon, most = self.launcher.get("nnodes", "").partition(":")
        if colon and least.isdecimal() and most.isdecimal():
            inside = min(max(replicas, int(least)), int(most))
            self.spec["workers"] = {"replicas": inside, "min": int(least), "max": int(most)}
            return
        self.spec["workers"] = {"replicas": replicas, **({"min": 1} if elastic and replicas > 1 else {})}
        if replicas > 1 and elastic:
            ways = f"training goes on while a lost worker is replaced; --set workers.min={replicas} waits for it"
            self.say(f"{field} ({replicas})", f"is workers.replicas, and workers.min is 1: {ways}")
        elif replicas > 1:
            ways = "a lost worker is replaced, and training waits for it; --set workers.min=1 trains on without it"
            self.say(f"{field} ({replicas})", f"is workers.replicas, and so workers.min and workers.max: {ways}")

    def take_processes(self, given: str, field: str, *, cores: bool) -> None:
        """Set the number of processes per worker. With `cores`, `auto` means one per core if there are no GPUs."""
        count, resources = self.launcher.get("nproc-per-node") or given, self.spec.get("resources", {})
        if "python" in self.launcher:
            self.spec["processesPerWorker"] = 1
            if count != "auto":
                self.say(f"{field} ({count})", "has no effect: without torchrun, each worker has one process")
        elif count == "cpu" or (count == "auto" and cores and not resources.get("gpu")):
            cpu = resources.get("cpu", resources.get("cpuLimit", 1))
            try:
                self.spec["processesPerWorker"] = max(1, int(units.cores(cpu)))
            except ValueError as error:
                raise self.refusal(f"cpu ({cpu})", str(error)) from error
        elif count not in ("auto", "gpu"):
            self.spec["processesPerWorker"] = int(count) if count.isdecimal() else count
        elif not resources.get("gpu"):
            self.say(f"{field} ({count})", "is one process of each worker, which has no GPUs")
