"""`outlast pipeline`: a step that trains, for Argo Workflows and Kubeflow Pipelines."""

from __future__ import annotations

import ast
import base64
import copy
import functools
import gzip
import json
import os
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from kubernetes_validate import utils as schemas

import apiserver
from outlast import kube, spec
from outlast.cli import pipeline
from outlast.cluster import waiting
from outlast.errors import OutlastError
from outlast.kube import pods
from outlast.manifests import rbac
from outlast.manifests.pipelines import OUTPUTS, step
from outlast.manifests.pipelines.step import INPUTS
from outlast.units import Every
from rights import Right, needed, rights
from test_fleet import closed

ROOT = Path(__file__).parent.parent
EXAMPLES = ROOT / "examples" / "pipelines"
NEWEST = max(schemas.all_versions(), key=lambda version: [int(part) for part in version.split(".")])
Document = dict[str, Any]
Outlast = Callable[..., tuple[int, str, str]]
JOB = """\
apiVersion: outlast.dev/v1alpha1
kind: ElasticJob
metadata: {name: digits}
spec:
  image: example.org/outlast:1
  module: outlast.recipes.smoke
  secrets: [{name: s3}, {name: files, to: /etc/files}]
  workers: {replicas: 2}
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with a job file, and one with a script."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "job.yaml").write_text(JOB)
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "train.py").write_text("print('hello')\n")
    text = JOB.replace("module: outlast.recipes.smoke", "script: train.py\n  code: code")
    (tmp_path / "script.yaml").write_text(text)
    return tmp_path


@pytest.fixture
def api(here: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[apiserver.ApiServer]:
    api = apiserver.ApiServer(unserved=("batch.volcano.sh", "scheduling.x-k8s.io"))
    with apiserver.serving(api) as url:
        monkeypatch.setenv("KUBECONFIG", str(apiserver.kubeconfig(here / "config", url)))
        yield api


@pytest.fixture(scope="module")
def template_schema() -> jsonschema.Draft7Validator:
    """Of Argo's WorkflowTemplate, with unknown fields as errors."""
    whole = json.loads(gzip.decompress((ROOT / "tests" / "published" / "argoproj.io_workflowtemplates.json.gz").read_bytes()))
    return jsonschema.Draft7Validator(closed(whole))


def documents(text: str) -> list[Document]:
    return list(yaml.safe_load_all(text))


def of_kind(found: list[Document], wanted: str) -> Document:
    (document,) = [each for each in found if each["kind"] == wanted]
    return document


# Argo Workflows


@pytest.mark.parametrize(("file", "topology"), [("job.yaml", "elasticjob"), ("script.yaml", "indexed-job")])
def test_argos_documents_are_valid_and_restricted(
    here: Path, outlast: Outlast, template_schema: jsonschema.Draft7Validator, file: str, topology: str
) -> None:
    code, out, _ = outlast("pipeline", "argo", file, "-n", "team-a", "--as", topology)
    assert code == 0
    found = documents(out)
    for document in found[:-1]:
        schemas.validate(document, NEWEST, strict=True)
    assert [each["kind"] for each in found if each["kind"] != "ConfigMap"] == [
        "ServiceAccount",
        "Role",
        "RoleBinding",
        "WorkflowTemplate",
    ]
    assert {each["metadata"]["namespace"] for each in found} == {"team-a"}
    assert [error.message for error in template_schema.iter_errors(found[-1])] == []
    (template,) = found[-1]["spec"]["templates"]
    pod = {"securityContext": template["securityContext"], "containers": [{"name": "main", **template["container"]}]}
    whole = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "p"}, "spec": {**pod, "volumes": template["volumes"]}}
    schemas.validate(whole, NEWEST, strict=True)
    assert template["container"]["securityContext"]["readOnlyRootFilesystem"] is template["securityContext"]["runAsNonRoot"]
    assert template["container"]["envFrom"] == [{"secretRef": {"name": "s3", "optional": True}}]
    assert {each["name"]: each["valueFrom"]["default"] for each in template["outputs"]["parameters"]} == dict.fromkeys(
        OUTPUTS, ""
    )
    assert "activeDeadlineSeconds" not in template
    assert len(of_kind(found, "RoleBinding")["subjects"]) == 1


def test_the_schema_of_argo_finds_what_it_does_not_know(template_schema: jsonschema.Draft7Validator) -> None:
    document = yaml.safe_load((EXAMPLES / "argo-template.yaml").read_text().split("---\n")[-1])
    for change in ({"retryStrategy": {"limits": "3"}}, {"container": {"image": "i", "cmd": []}}, {"serviceaccount": "a"}):
        wrong = copy.deepcopy(document)
        wrong["spec"]["templates"][0] |= change
        assert list(template_schema.iter_errors(wrong)), change


def test_templates_and_components_share_their_accounts_and_not_their_roles(here: Path, outlast: Outlast) -> None:
    """Applying one must not take away rights that another needs."""
    roles, bindings, accounts = [], [], set()
    for words in (("argo", "--as", "elasticjob"), ("argo", "--as", "indexed-job", "--name", "other"), ("kfp", "--rights")):
        found = documents(outlast("pipeline", words[0], "job.yaml", "-n", "team-a", *words[1:])[1])
        roles.append(of_kind(found, "Role")["metadata"]["name"])
        bindings.append(of_kind(found, "RoleBinding"))
        accounts.add(bindings[-1]["subjects"][0]["name"])
    assert roles == ["outlast-pipeline-train-digits", "outlast-pipeline-other", "outlast-kfp-train-digits"]
    assert [each["roleRef"]["name"] for each in bindings] == [each["metadata"]["name"] for each in bindings] == roles
    assert accounts == {"outlast-pipeline", "default-editor"}


@pytest.mark.parametrize("name", ["a" * 64, "a\nb: c", "A b", "-a"])
def test_a_name_that_the_cluster_refuses_is_not_printed(name: str) -> None:
    with pytest.raises(OutlastError, match="must be at most 63 lower-case letters, digits and dashes"):
        pipeline._title(name, spec.parse(JOB))


def test_what_is_missing_is_one_sentence(here: Path, outlast: Outlast) -> None:
    sentence = "the rights of a step name the namespace of its account; say which: -n NAMESPACE"
    for words in (("argo", "job.yaml"), ("kfp", "job.yaml", "--rights")):
        assert outlast("pipeline", *words)[2].splitlines()[-1] == f"Error: {sentence}"
    (here / "code" / "large.bin").write_bytes(os.urandom(300 << 10))
    code, _, err = outlast("pipeline", "kfp", "script.yaml")
    assert code == 2
    assert "put the code into the image" in err


# Kubeflow Pipelines


def placeholders(component: Document) -> tuple[list[str], list[str]]:
    """The inputs and outputs that the arguments name."""
    args = [each for each in component["implementation"]["container"]["args"] if isinstance(each, dict)]
    assert all(len(each) == 1 for each in args)
    return [each["inputValue"] for each in args if "inputValue" in each], [
        each["outputPath"] for each in args if "outputPath" in each
    ]


def test_the_component_has_what_kubeflow_pipelines_reads(here: Path, outlast: Outlast) -> None:
    """Its loader takes these keys and types, and refuses placeholders of what is not declared; see docs/guide/pipelines.md for
    the versions that it was loaded and compiled with."""
    component = yaml.safe_load(outlast("pipeline", "kfp", "script.yaml", "--as", "indexed-job", "--image", "mine:1")[1])
    assert set(component) == {"name", "description", "inputs", "outputs", "implementation"}
    for each in (*component["inputs"], *component["outputs"]):
        assert set(each) <= {"name", "type", "description", "default"}
        assert each["type"] in ("String", "Integer", "Float")
        assert isinstance(each.get("default", ""), str)
        assert each["name"].isidentifier(), "kfp makes a Python parameter of it"
    container = component["implementation"]["container"]
    assert set(container) == {"image", "command", "args", "env"}
    assert container["image"] == "mine:1"
    inputs, outputs = placeholders(component)
    assert sorted(inputs) == sorted(each["name"] for each in component["inputs"])
    assert outputs == [each["name"] for each in component["outputs"]] == list(OUTPUTS)
    assert not {each["name"] for each in component["inputs"]} & set(outputs)
    assert all(isinstance(each, str | dict) for each in container["args"])
    assert all(isinstance(value, str) for value in container["env"].values())
    assert max(len(each) for each in container["args"] if isinstance(each, str)) < 128 << 10, "Linux takes no longer argument"


def test_the_accounts_of_a_profile_are_given_the_same_rights(here: Path, outlast: Outlast) -> None:
    role, binding = documents(outlast("pipeline", "kfp", "job.yaml", "--rights", "-n", "profile")[1])
    argo = documents(outlast("pipeline", "argo", "job.yaml", "-n", "profile")[1])
    assert role["rules"] == of_kind(argo, "Role")["rules"]
    assert [each["name"] for each in binding["subjects"]] == ["default-editor", "pipeline-runner"]
    for document in (role, binding):
        schemas.validate(document, NEWEST, strict=True)


# What the container does


def ends(api: apiserver.ApiServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have an operator end every job at once when it has been submitted."""
    original = waiting.Waiter.submitted

    def submitted(waiter: waiting.Waiter, apply: Callable[[], Iterator[str]]) -> None:
        original(waiter, apply)
        job = api.documents[kube.ELASTIC_JOB.resource, "default", waiter.name]
        status = {"state": "Succeeded", "run": "digits-1", "step": 8, "finished": pods.seconds(apiserver.NOW) + 2.5}
        api.put({**copy.deepcopy(job), "status": status})

    monkeypatch.setattr(waiting.Waiter, "submitted", submitted)


def words(template: Document, **values: str) -> list[str]:
    """The container's arguments as Argo makes them."""
    known = {each["name"]: values.get(each["name"].replace("-", "_"), each["value"]) for each in template["inputs"]["parameters"]}
    found = template["container"]["args"]
    for name, value in known.items():
        found = [each.replace(f"{{{{inputs.parameters.{name}}}}}", value) for each in found]
    return [str(each) for each in found]


@pytest.fixture
def code_at(here: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory in place of that of the step's container."""
    monkeypatch.setattr(step, "CODE", str(here / "step"))
    return here / "step"


def test_the_container_submits_the_job_with_its_code_and_the_values_of_the_pipeline(
    api: apiserver.ApiServer, outlast: Outlast, monkeypatch: pytest.MonkeyPatch, here: Path, code_at: Path
) -> None:
    found = documents(outlast("pipeline", "argo", "script.yaml", "-n", "default")[1])
    (template,) = found[-1]["spec"]["templates"]
    (volume,) = [each for each in template["volumes"] if each["name"] == "code"]
    archive = of_kind(found, "ConfigMap")
    assert archive["metadata"]["name"] == volume["configMap"]["name"]
    code_at.mkdir()
    for name, content in archive["binaryData"].items():
        (code_at / name).write_bytes(base64.b64decode(content))
    ends(api, monkeypatch)
    args = words(template, key="run-1", workers="3", set="checkpoint.every=5m\nenv={A: b}", args="--lr 1e-3 'two words'")
    args = [each.replace("/tmp/outputs", str(here / "out")) for each in args]
    assert args[args.index("--on-terminate") + 1] == "cancel"
    args[args.index("--on-terminate") + 1] = ""  # an empty value is as none
    assert outlast(*template["container"]["command"][1:], *args)[0] == 0
    ((name, job),) = [(key[2], each) for key, each in api.documents.items() if key[0] == kube.ELASTIC_JOB.resource]
    made = spec.parse(text_of(job))
    assert name.startswith("digits-")
    assert (made.spec.workers.replicas, made.spec.args) == (3, ("--lr", "1e-3", "two words"))
    assert (made.spec.env, made.spec.checkpoint.every) == ({"A": "b"}, Every(duration=timedelta(minutes=5)))
    maps = {key[2] for key in api.documents if key[0] == "configmaps"}
    assert any(each.startswith(f"{name}-code-") for each in maps), "its code travels with the job"
    assert (here / "out" / "job").read_text() == name
    assert (here / "out" / "seconds").read_text() == "2.5"


def text_of(job: Document) -> str:
    """The job file of an ElasticJob."""
    meta = {"name": job["metadata"]["name"]}
    return json.dumps({"apiVersion": job["apiVersion"], "kind": job["kind"], "metadata": meta, "spec": job["spec"]})


def test_the_container_of_a_component_brings_its_code_along_and_writes_each_output_where_it_is_told(
    api: apiserver.ApiServer, outlast: Outlast, monkeypatch: pytest.MonkeyPatch, here: Path, code_at: Path
) -> None:
    component = yaml.safe_load(outlast("pipeline", "kfp", "script.yaml")[1])
    values = {each["name"]: each.get("default", "run-1") for each in component["inputs"]}

    def word(each: str | Document) -> str:
        if isinstance(each, str):
            return each
        return values[each["inputValue"]] if "inputValue" in each else str(here / "outputs" / each["outputPath"] / "data")

    ends(api, monkeypatch)
    container = component["implementation"]["container"]
    assert outlast(*container["command"][1:], *map(word, container["args"]))[0] == 0
    texts = {path.parent.name: path.read_text() for path in (here / "outputs").glob("*/data")}
    assert set(texts) == set(OUTPUTS)
    assert (texts["state"], texts["step"], texts["loss"]) == ("Succeeded", "8", "")
    for name, output in OUTPUTS.items():
        if output.type != "String":
            assert float(texts[name]) >= 0, "an empty number is an error in Kubeflow Pipelines"


@pytest.mark.parametrize(
    ("args", "sentence"),
    [
        ((), "--job is empty; give the text of a job file"),
        (("--job", JOB, "--workers", "two"), "--workers two is no number of workers; 0 leaves it to the job file"),
        (("--job", JOB, "--on-terminate", "stay"), "--on-terminate stay is neither cancel nor leave; choose one of them"),
        (("--job", JOB, "--args", "'"), "--args ': No closing quotation; quote it as in a shell"),
        (("--job", JOB, "--code", "eA=="), "--code is for a job with code in /tmp/outlast-step; print the component again"),
        (("--job", JOB, "state"), "1 words are no pairs of OUTPUT PATH; the last is state"),
        (("--job", JOB, "stat", "x"), "no output stat; did you mean state? there are job, "),
    ],
)
def test_a_mistake_of_the_container_is_one_sentence(
    api: apiserver.ApiServer, outlast: Outlast, args: tuple[str, ...], sentence: str
) -> None:
    code, out, err = outlast("pipeline", "step", *args)
    assert (code, out) == (2, "")
    assert sentence in err.splitlines()[-1]


def test_the_role_allows_what_a_step_does_and_nothing_else(
    api: apiserver.ApiServer, outlast: Outlast, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Submitting, waiting, the outputs, why it failed, SIGTERM. What is listed although it may not be is of no importance."""
    role, _ = rbac.step("s", "default", [kube.ELASTIC_JOB], ["s"])
    allowed = rights(role["rules"])
    refused: set[Right] = set()

    def may(asked: str) -> bool:
        if (found := needed(asked)) is None or found[0] in allowed:
            return True
        refused.add(found[0])
        return False

    api.may = may
    api.forbids = 'things is forbidden: User "s" cannot use resource "things" in API group "" in the namespace "default"'
    ends(api, monkeypatch)
    code, _, err = outlast("submit", "job.yaml", "--wait")
    assert code == 0, err
    cluster = kube.connect()
    waiter = waiting.Waiter(waiting.Workloads(cluster), "digits", lambda _: None)
    waiter.submitted(lambda: iter(()))
    (job,) = [each for key, each in api.documents.items() if key[0] == kube.ELASTIC_JOB.resource]
    api.put({**copy.deepcopy(job), "status": {"state": "Failed", "reason": "a bug"}})
    assert waiter.until_end().sentence.startswith("digits has failed")
    api.put({**copy.deepcopy(job), "status": {"state": "Running"}})
    look = functools.partial(waiting.own_pod, cluster, {})
    assert waiter.terminated("cancel", look).sentence == "SIGTERM: digits is cancelled; what it has saved stays"
    cluster.close()
    assert {right for right in refused if right[0] not in ("list", "get")} == set()
    assert {right for right in refused if right[0] == "get"} <= {("get", "", "namespaces")}


# Examples


def test_the_rendered_examples_are_what_is_printed_now(outlast: Outlast) -> None:
    file = str(EXAMPLES / "job.yaml")
    assert outlast("pipeline", "argo", file, "-n", "team-a")[1] == (EXAMPLES / "argo-template.yaml").read_text()
    assert outlast("pipeline", "kfp", file)[1] == (EXAMPLES / "kfp-component.yaml").read_text()


def test_the_workflow_uses_the_template_with_names_that_it_has(template_schema: jsonschema.Draft7Validator) -> None:
    workflow = yaml.safe_load((EXAMPLES / "workflow.yaml").read_text())
    errors = template_schema.iter_errors({**workflow, "kind": "WorkflowTemplate"})
    assert [error.message for error in errors] == []
    template = yaml.safe_load((EXAMPLES / "argo-template.yaml").read_text().split("---\n")[-1])
    (task,) = [each for each in workflow["spec"]["templates"][0]["dag"]["tasks"] if "templateRef" in each]
    assert task["templateRef"] == {"name": template["metadata"]["name"], "template": template["spec"]["templates"][0]["name"]}
    given = {each["name"] for each in task["arguments"]["parameters"]}
    assert given <= {each["name"] for each in template["spec"]["templates"][0]["inputs"]["parameters"]}
    scripts = [each["container"]["command"] for each in workflow["spec"]["templates"] if "container" in each]
    assert not any("{{" in word for words in scripts if words[0] == "sh" for word in words), "a shell would parse the values"
    used = [
        part.split("}}")[0] for part in (EXAMPLES / "workflow.yaml").read_text().split("{{tasks.train.outputs.parameters.")[1:]
    ]
    assert used
    assert set(used) <= set(OUTPUTS)
    assert workflow["spec"]["serviceAccountName"] == template["spec"]["serviceAccountName"]


def test_the_pipeline_of_kubeflow_names_inputs_and_outputs_that_the_component_has() -> None:
    tree = ast.parse((EXAMPLES / "pipeline.py").read_text())
    calls = [each for each in ast.walk(tree) if isinstance(each, ast.Call)]
    (train,) = [each for each in calls if isinstance(each.func, ast.Name) and each.func.id == "train"]
    assert {each.arg for each in train.keywords} <= {"key", *(name.replace("-", "_") for name in INPUTS)}
    outputs = {ast.literal_eval(each.slice) for each in ast.walk(tree) if isinstance(each, ast.Subscript)}
    assert outputs
    assert outputs <= set(OUTPUTS)
