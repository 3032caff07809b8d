"""What a job file says in vain is said."""

from __future__ import annotations

import re
import typing
from collections.abc import Iterator
from pathlib import Path

import pytest

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


def test_every_field_is_read_somewhere() -> None:
    text = "".join(path.read_text() for path in SOURCE.rglob("*.py"))
    unread = {path for path in leaves() if not re.search(rf"\.{path.rpartition('.')[2]}\b", text)}
    assert unread == {"managed_by"}, "which the operator reads in the document"


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
    path.write_text(JOB)
    assert printed(capsys, backend, "validate", path) == (0, "")
    path.write_text(f"{JOB}  env: {{A: $(A)}}\n  secrets: [{{name: keys}}]\n  volumes: [{{claim: c, to: /big}}]\n")
    secrets = "secrets (keys) are for pods; on this machine set their variables in the shell, or keep their values in files"
    volumes = "volumes (/big) are for pods; on this machine these are ordinary directories"
    circular = "env.A ($(A)) refers to itself and stays as it is; write the whole value"
    local = "".join(f"{path}: with outlast run: {sentence}\n" for sentence in (secrets, volumes))
    assert printed(capsys, backend, "validate", path) == (0, f"{path}: warning: {circular}\n{local}")
    assert f"outlast | job: {circular}\n" in printed(capsys, backend, "render", path, "--as", "job")[1]
    said = printed(capsys, backend, "run", path)[1]
    assert f"outlast | job: {circular}\noutlast | job: {secrets}\noutlast | job: {volumes}\n" in said
