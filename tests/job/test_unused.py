"""What a job file says in vain is said."""

from __future__ import annotations

import re
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic.alias_generators import to_camel

import fake
import outlast
from outlast import cli
from outlast.job import spec
from outlast.job.spec import unused_fields
from outlast.job.spec.validation import Checked
from outlast.kubernetes import manifests

JOB = """\
apiVersion: outlast.dev/v1alpha1
kind: ElasticJob
metadata: {name: job}
spec:
  module: outlast.recipes.smoke
  image: i
"""

READ = {
    "api_version": ("job/spec/model.py: api_version: Literal", "kubernetes/api/kinds.py: API_VERSION"),
    "kind": ("job/spec/model.py: kind: Literal", "kubernetes/api/kinds.py: KIND"),
    "metadata.name": ("local/backend.py: metadata.name", "kubernetes/manifests/variables.py: metadata.name"),
    "metadata.namespace": (None, "kubernetes/manifests/topologies.py: namespace"),
    "metadata.labels": (None, "kubernetes/manifests/labels.py: metadata.labels"),
    "metadata.annotations": (None, "kubernetes/manifests/labels.py: metadata.annotations"),
    "image": (None, "kubernetes/manifests/worker_pod.py: .image"),
    "inject": (None, "kubernetes/manifests/injected_agent.py: .inject"),
    "module": ("worker/prepare/phases.py: .module", "worker/prepare/phases.py: .module"),
    "script": ("worker/prepare/phases.py: .script", "worker/prepare/phases.py: .script"),
    "args": ("worker/prepare/phases.py: .args", "worker/prepare/phases.py: .args"),
    "code": ("worker/prepare/phases.py: spec.code", "kubernetes/manifests/configmaps_and_service.py: spec.code"),
    "data.from_": ("worker/prepare/phases.py: .from_", "kubernetes/manifests/volumes.py: .from_"),
    "data.to": ("worker/prepare/phases.py: .to", "kubernetes/manifests/volumes.py: data.to"),
    "models.from_": ("worker/prepare/phases.py: .from_", "kubernetes/manifests/volumes.py: .from_"),
    "models.name": ("worker/prepare/phases.py: .name", "kubernetes/manifests/volumes.py: model.name"),
    "output": ("local/output_dir.py: spec.output", "kubernetes/manifests/volumes.py: .output"),
    "workers.replicas": (
        "local/worker_processes.py: workers.replicas",
        "kubernetes/manifests/topologies.py: replicas",
    ),
    "workers.step": ("job/spec/model.py: self.step", "job/spec/model.py: self.step"),
    "workers.sizes": ("job/spec/model.py: self.sizes", "job/spec/model.py: self.sizes"),
    "workers.min": ("job/spec/model.py: self.min", "job/spec/model.py: self.min"),
    "workers.max": ("job/spec/model.py: self.max", "job/spec/model.py: self.max"),
    "processes_per_worker": ("local/worker_processes.py: .processes()", "kubernetes/manifests/resources.py: .processes()"),
    "resources.cpu": ("local/worker_processes.py: resources.cpu", "kubernetes/manifests/resources.py: .cpu"),
    "resources.cpu_limit": (None, "kubernetes/manifests/resources.py: .cpu_limit"),
    "resources.memory": (None, "kubernetes/manifests/resources.py: .memory"),
    "resources.gpu": ("local/worker_processes.py: resources.gpu", "kubernetes/manifests/resources.py: .gpu"),
    "resources.accelerator": (None, "kubernetes/manifests/resources.py: .accelerator"),
    "resources.efa": (None, "kubernetes/manifests/resources.py: requested.efa"),
    "resources.shared_memory": (None, "kubernetes/manifests/volumes.py: .shared_memory"),
    "rendezvous.backend": (None, "kubernetes/manifests/rendezvous_endpoint.py: .backend"),
    "rendezvous.endpoint": (None, "kubernetes/manifests/rendezvous_endpoint.py: .endpoint"),
    "checkpoint.every": ("job/spec/model.py: self.every", "job/spec/model.py: self.every"),
    "checkpoint.keep": ("job/spec/model.py: self.keep", "job/spec/model.py: self.keep"),
    "checkpoint.best": ("job/spec/model.py: {self.best}", "job/spec/model.py: {self.best}"),
    "checkpoint.mode": ("job/spec/model.py: {self.mode}", "job/spec/model.py: {self.mode}"),
    "checkpoint.by": ("job/spec/model.py: {self.by}", "job/spec/model.py: {self.by}"),
    "checkpoint.memory": ("job/spec/model.py: self.memory", "kubernetes/manifests/resources.py: checkpoint.reserved"),
    "checkpoint.go_back": ("job/spec/model.py: self.go_back", "job/spec/model.py: self.go_back"),
    "checkpoint.replicas": ("job/spec/model.py: self.replicas", "job/spec/model.py: self.replicas"),
    "sync.every": ("worker/agent/upload.py: sync.every", "worker/agent/upload.py: sync.every"),
    "restarts.limit": ("rendezvous/coordinator.py: restarts.limit", "kubernetes/operator/reconcile_pass.py: restarts.limit"),
    "restarts.window": ("rendezvous/coordinator.py: restarts.window", "kubernetes/operator/reconcile_pass.py: restarts.window"),
    "interruption.grace": ("worker/agent/agent.py: interruption.grace", "kubernetes/manifests/worker_pod.py: interruption.grace"),
    "hang.limit": ("worker/agent/agent.py: hang.limit", "worker/agent/agent.py: hang.limit"),
    "scheduling.queue": (None, "kubernetes/manifests/labels.py: .queue"),
    "scheduling.gang": (None, "kubernetes/manifests/scheduling/gang.py: .gang"),
    "scheduling.priority_class_name": (None, "kubernetes/manifests/scheduling/placement.py: .priority_class_name"),
    "scheduling.spot": (None, "kubernetes/manifests/scheduling/placement.py: .spot"),
    "scheduling.worker0": (None, "kubernetes/manifests/scheduling/placement.py: .worker0"),
    "environment.requirements": ("worker/prepare/phases.py: .requirements", "worker/prepare/phases.py: .requirements"),
    "environment.conda": ("worker/prepare/phases.py: .conda", "worker/prepare/phases.py: .conda"),
    "compile.cache": ("worker/prepare/phases.py: compile.cache", "worker/prepare/phases.py: compile.cache"),
    "compile.warm_up": ("worker/prepare/phases.py: compile.warm_up", "worker/prepare/phases.py: compile.warm_up"),
    "env": ("local/worker_processes.py: self._job.spec.env", "kubernetes/manifests/variables.py: request.spec.env"),
    "suspend": ("local/backend.py: spec.suspend", "kubernetes/manifests/worker_pod.py: .suspend"),
    "active_deadline_seconds": (
        "local/launcher.py: .active_deadline_seconds",
        "kubernetes/operator/rules/job_end.py: .active_deadline_seconds",
    ),
    "startup_deadline_seconds": (
        "local/launcher.py: .startup_deadline_seconds",
        "kubernetes/operator/rules/job_end.py: .startup_deadline_seconds",
    ),
    "ttl_seconds_after_finished": (None, "kubernetes/operator/rules/job_end.py: .ttl_seconds_after_finished"),
    "clean_pod_policy": (None, "kubernetes/operator/rules/job_end.py: .clean_pod_policy"),
    "managed_by": (None, 'kubernetes/operator/decide.py: "managedBy"'),
    "volumes.claim": (None, "kubernetes/manifests/volumes.py: .claim"),
    "volumes.to": (None, "kubernetes/manifests/volumes.py: volume.to"),
    "volumes.size": (None, "kubernetes/manifests/volumes.py: .size"),
    "volumes.storage_class": (None, "kubernetes/manifests/volumes.py: .storage_class"),
    "volumes.access_mode": (None, "kubernetes/manifests/volumes.py: .access_mode"),
    "volumes.sub_path": (None, "kubernetes/manifests/volumes.py: .sub_path"),
    "volumes.read_only": (None, "kubernetes/manifests/volumes.py: .read_only"),
    "node_selector": (None, "kubernetes/manifests/scheduling/placement.py: .node_selector"),
    "tolerations": (None, "kubernetes/manifests/scheduling/placement.py: fields.tolerations"),
    "secrets.name": (None, "kubernetes/manifests/worker_pod.py: secret.name"),
    "secrets.to": (None, "kubernetes/manifests/worker_pod.py: secret.to"),
    "tracking.tensorboard": ("job/spec/model.py: self.tensorboard", "job/spec/model.py: self.tensorboard"),
    "tracking.mlflow": ("job/spec/model.py: self.mlflow", "job/spec/model.py: self.mlflow"),
    "tracking.experiment": ("job/spec/model.py: self.experiment", "job/spec/model.py: self.experiment"),
    "template": (None, "kubernetes/manifests/worker_pod.py: .template"),
}
"""For each field of a job file the file of ours, and the text in it, that reads the field on this machine and for pods. None:
nothing does on this machine, so `validate` says that. A new field needs a row here, and with it a reader."""
THROUGH = {
    "self.step": "workers.allowed()",
    "self.sizes": "workers.allowed()",
    "self.min": "workers.min",
    "self.max": "workers.max",
    "self.every": "checkpoint.variables()",
    "self.keep": "checkpoint.variables()",
    "{self.best}": "checkpoint.variables()",
    "{self.mode}": "checkpoint.variables()",
    "{self.by}": "checkpoint.variables()",
    "self.memory": "checkpoint.variables()",
    "self.go_back": "checkpoint.variables()",
    "self.replicas": "checkpoint.variables()",
    "self.tensorboard": "tracking.variables()",
    "self.mlflow": "tracking.variables()",
    "self.experiment": "tracking.variables()",
}
"""What callers ask instead, where the model itself makes something of a field: on both sides."""
SAMPLES: dict[str, object] = {
    "metadata.namespace": "team",
    "metadata.labels": {"a": "b"},
    "metadata.annotations": {"a": "b"},
    "image": "i:1",
    "inject": True,
    "resources.cpu_limit": 2,
    "resources.memory": "1Gi",
    "resources.accelerator": "amd",
    "resources.efa": 1,
    "resources.shared_memory": "1Gi",
    "rendezvous": {"backend": "c10d"},
    "scheduling": {"queue": "q"},
    "ttl_seconds_after_finished": 60,
    "clean_pod_policy": "All",
    "managed_by": "kueue.x-k8s.io/multikueue",
    "node_selector": {"a": "b"},
    "tolerations": [{"operator": "Exists"}],
    "template": {"spec": {"hostNetwork": True}},
    "volumes": [{"claim": "c", "to": "/big"}],
    "secrets": [{"name": "keys"}],
}
"""Values for the fields that `validate` has to mention."""
SOURCE = Path(outlast.__file__).parent


def leaves(model: type[Checked] = spec.Job, above: str = "") -> Iterator[str]:
    """The paths of all fields without parts of their own; those of `spec` without `spec.`."""
    for name, field in model.model_fields.items():
        if part := part_of(field.annotation):
            yield from leaves(part, f"{above}{name}." if name != "spec" else "")
        else:
            yield above + name


def part_of(annotation: object) -> type[Checked] | None:
    """The model in an annotation such as `tuple[Data, ...]`."""
    if isinstance(annotation, type) and issubclass(annotation, Checked):
        return annotation
    return next((part for each in typing.get_args(annotation) if (part := part_of(each))), None)


def test_every_field_has_readers_or_validate_says_that_it_has_none() -> None:
    assert set(leaves()) - {f"tolerations.{name}" for name in spec.model.Toleration.model_fields} == set(READ) - {"tolerations"}
    text = {
        path: (SOURCE / path).read_text()
        for path in {str(each).partition(":")[0] for row in READ.values() for each in row if each}
    }
    for field, row in READ.items():
        for reader in filter(None, row):
            file, _, words = reader.partition(": ")
            assert words in text[file], f"{field} is not read by {words} in {file}"
            if words in THROUGH:
                assert re.search(
                    re.escape(THROUGH[words]), "".join(p.read_text() for p in SOURCE.rglob("*.py") if p.parent.name != "spec")
                )
    said = {*unused_fields.PODS, "volumes", "secrets"}
    unread = {field for field, (here, _) in READ.items() if here is None}
    assert {field for field in unread if not any(field == each or field.startswith(f"{each}.") for each in said)} == set()
    assert {each for each in said if not any(field == each or field.startswith(f"{each}.") for field in unread)} == set()


@pytest.mark.parametrize("path", SAMPLES)
def test_validate_names_every_field_without_effect_on_this_machine(path: str) -> None:
    document: dict[str, Any] = yaml.safe_load(JOB)
    del document["spec"]["image"]
    assert [*unused_fields.here(spec.Job.model_validate(document)), *unused_fields.pods(spec.Job.model_validate(document))] == []
    part = document if path.startswith("metadata.") else document["spec"]
    *above, last = map(to_camel, path.split("."))
    for name in above:
        part = part.setdefault(name, {})
    part[last] = SAMPLES[path]
    [sentence] = [*unused_fields.here(job := spec.Job.model_validate(document)), *unused_fields.pods(job)]
    assert sentence.startswith(".".join([*above, last]))
    assert set(SAMPLES) == {*unused_fields.PODS, "volumes", "secrets"}


@pytest.mark.parametrize("topology", ["elasticjob", "job", "indexed-job", "statefulset"])
def test_what_only_the_operator_reads_is_said_of_other_topologies(topology: str) -> None:
    job = spec.parse(
        f"{JOB}  output: s3://b/runs\n  env: {{AWS_PROFILE: team}}\n  cleanPodPolicy: All\n"
        "  startupDeadlineSeconds: 60\n  managedBy: kueue.x-k8s.io/multikueue\n"
    )
    fields = () if topology == "elasticjob" else ("startupDeadlineSeconds", "cleanPodPolicy", "managedBy")
    assert sorted(manifests.warnings(job, topology)) == sorted(
        f"{field} has no meaning in the topology {topology}" for field in fields
    )


def printed(capsys: pytest.CaptureFixture[str], backend: fake.FakeBackend, *words: object) -> tuple[int, str]:
    with pytest.raises(SystemExit) as ended:
        cli.main([str(word) for word in words], backend=backend)
    return int(ended.value.code or 0), capsys.readouterr().err


def test_a_variable_that_refers_to_itself_is_said() -> None:
    job = spec.parse(f"{JOB}  env: {{PATH: /opt:$(PATH), A: $(B), B: x}}\n")
    assert list(unused_fields.anywhere(job)) == [
        "env.PATH (/opt:$(PATH)) refers to itself and stays as it is; write the whole value"
    ]


def test_fields_without_effect_are_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    backend = fake.FakeBackend(tmp_path, steps=1)
    path = tmp_path / "job.yaml"
    path.write_text(JOB.replace("  image: i\n", ""))
    assert printed(capsys, backend, "validate", path) == (0, "")
    path.write_text(f"{JOB}  env: {{A: $(A)}}\n  secrets: [{{name: keys}}]\n  volumes: [{{claim: c, to: /big}}]\n")
    secrets = "secrets (keys) are for pods; on this machine set their variables in the shell, or keep their values in files"
    volumes = "volumes (/big) are for pods; on this machine these are ordinary directories"
    circular = "env.A ($(A)) refers to itself and stays as it is; write the whole value"
    pods = "image is for pods and has no effect here"
    local = "".join(f"{path}: with outlast run: {sentence}\n" for sentence in (secrets, volumes, pods))
    assert printed(capsys, backend, "validate", path) == (0, f"{path}: warning: {circular}\n{local}")
    assert f"outlast | job: {circular}\n" in printed(capsys, backend, "render", path, "--as", "job")[1]
    said = printed(capsys, backend, "run", path)[1]
    assert f"outlast | job: {circular}\noutlast | job: {secrets}\noutlast | job: {volumes}\n" in said
