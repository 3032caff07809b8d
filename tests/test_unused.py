"""What a job file says in vain is said."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import fake
import outlast
from outlast import cli, spec
from outlast.spec import unused

JOB = """\
apiVersion: outlast.dev/v1alpha1
kind: ElasticJob
metadata: {name: job}
spec:
  module: outlast.recipes.smoke
  image: i
"""
SAID = "tracking has no effect yet: metrics go to metrics.jsonl in the output, and nowhere else"


def test_every_field_is_read_by_something_or_said_to_be_in_vain() -> None:
    source = Path(outlast.__file__).parent
    describe = ("cel.py", "crd.py")  # they translate the model
    others = [path.read_text() for path in source.rglob("*.py") if path.parent.name != "spec" and path.name not in describe]
    text = "\n".join(others)
    names = {field: info.alias or field for field, info in spec.Spec.model_fields.items()}
    asked = {"processes_per_worker": "processes"}  # by a method of the model
    mute = [field for field, alias in names.items() if not re.search(rf"\.{asked.get(field, field)}\b|\"{alias}\"", text)]
    assert mute == [*unused.FIELDS]


def printed(capsys: pytest.CaptureFixture[str], backend: fake.FakeBackend, *words: object) -> tuple[int, str]:
    with pytest.raises(SystemExit) as ended:
        cli.main([str(word) for word in words], backend=backend)
    return int(ended.value.code or 0), capsys.readouterr().err


def test_a_variable_that_refers_to_itself_is_said() -> None:
    job = spec.parse(f"{JOB}  env: {{PATH: /opt:$(PATH), A: $(B), B: x}}\n")
    assert list(unused.anywhere(job)) == ["env.PATH (/opt:$(PATH)) refers to itself and stays as it is; write the whole value"]


def test_fields_without_effect_are_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    backend = fake.FakeBackend(tmp_path, steps=1)
    path = tmp_path / "job.yaml"
    path.write_text(JOB)
    assert printed(capsys, backend, "validate", path) == (0, "")
    path.write_text(
        f"{JOB}  tracking: {{mlflow: http://flow}}\n  secrets: [{{name: keys}}]\n  volumes: [{{claim: c, to: /big}}]\n"
    )
    secrets = "secrets (keys) are for pods; on this machine set their variables in the shell, or keep their values in files"
    volumes = "volumes (/big) are for pods; on this machine these are ordinary directories"
    local = f"{path}: with outlast run: {secrets}\n{path}: with outlast run: {volumes}\n"
    assert printed(capsys, backend, "validate", path) == (0, f"{path}: warning: {SAID}\n{local}")
    assert f"outlast | job: {SAID}\n" in printed(capsys, backend, "render", path, "--as", "job")[1]
    said = printed(capsys, backend, "run", path)[1]
    assert f"outlast | job: {SAID}\n" in said
    assert f"outlast | job: {secrets}\noutlast | job: {volumes}\n" in said
