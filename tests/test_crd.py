"""The CustomResourceDefinition: what the API server asks of a schema, and that it takes what the job file takes."""

from __future__ import annotations

import re
import runpy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from kubernetes_validate import utils as schemas

from outlast import contract, spec
from outlast.errors import InvalidJob
from outlast.manifests import cel, crd, install, rbac
from outlast.manifests.request import Document

ROOT = Path(__file__).parents[1]
MINORS = sorted(set(schemas.all_versions()), key=lambda version: [int(part) for part in version.split(".")])[-4:]
DEPLOY = runpy.run_path(str(ROOT / "deploy" / "render.py"))
SCHEMA = crd.schema()
SPEC = SCHEMA["properties"]["spec"]

Schema = dict[str, Any]


def parts(schema: Schema, place: str = "") -> Iterator[tuple[str, Schema]]:
    """Every part of a schema that describes a value, and where it is."""
    yield place, schema
    for name, inner in schema.get("properties", {}).items():
        yield from parts(inner, f"{place}.{name}")
    if "items" in schema:
        yield from parts(schema["items"], f"{place}[]")
    if isinstance(schema.get("additionalProperties"), dict):
        yield from parts(schema["additionalProperties"], f"{place}.*")


PARTS = dict(parts(SCHEMA))


# The schema


@pytest.mark.parametrize("version", MINORS)
def test_kubernetes_takes_the_definition(version: str) -> None:
    schemas.validate(crd.definition(), version, strict=True)


@pytest.mark.parametrize("place", PARTS)
def test_the_schema_is_structural(place: str) -> None:
    part = PARTS[place]
    either = part.get("x-kubernetes-int-or-string", False)
    assert not part.keys() & {"$ref", "allOf", "oneOf", "not", "const", "title", "nullable", "definitions", "$defs", "examples"}
    assert ("type" in part) is not either
    assert part.get("anyOf") == ([{"type": "integer"}, {"type": "string"}] if either else None)
    assert part.get("additionalProperties") is not False
    if part.get("type") == "object":
        open_ = part.get("x-kubernetes-preserve-unknown-fields") or "additionalProperties" in part or place == ".metadata"
        assert "properties" in part or open_
    if "default" in part:
        assert place in (".spec.workers", ".spec.workers.replicas")


def test_metadata_says_nothing_but_the_name() -> None:
    assert set(SCHEMA["properties"]["metadata"]) == {"type", "properties"}
    assert set(SCHEMA["properties"]["metadata"]["properties"]) == {"name"}


def test_every_field_of_the_spec_is_explained() -> None:
    assert [place for place, part in parts(SPEC) if place and place[-1] not in "]*" and not part.get("description")] == []
    assert PARTS[".spec.checkpoint.every"]["description"].endswith("(`200 steps`). Default: 5m.")
    assert PARTS[".spec.workers.min"]["description"].count("Default: ") == 1


def test_every_field_of_the_job_file_is_in_the_schema() -> None:
    named = spec.schema()["$defs"]
    fields = {name: set(model["properties"]) for name, model in named.items() if name not in ("Metadata",)}
    known = [set(part["properties"]) for _, part in parts(SPEC) if "properties" in part]
    assert sorted(map(sorted, known)) == sorted(map(sorted, fields.values()))


def test_patterns_are_those_that_the_api_server_can_read() -> None:
    """RE2 knows no look-around and no references back."""
    for place, part in PARTS.items():
        if pattern := part.get("pattern"):
            re.compile(pattern)
            assert not re.search(r"\(\?[=!<]|\\[1-9]", pattern), place


def test_it_can_be_scaled_and_looked_at() -> None:
    (version,) = crd.definition()["spec"]["versions"]
    scale = version["subresources"]["scale"]
    assert scale == {
        "specReplicasPath": ".spec.workers.replicas",
        "statusReplicasPath": ".status.replicas",
        "labelSelectorPath": ".status.selector",
    }
    assert version["subresources"]["status"] == {}
    for path in [*scale.values(), *(column["jsonPath"] for column in version["additionalPrinterColumns"])]:
        assert path in PARTS or path == ".metadata.creationTimestamp"
    assert (PARTS[".spec.workers"]["default"], PARTS[".spec.workers.replicas"]["default"]) == ({}, 1)
    names = crd.definition()["spec"]["names"]
    assert (names["shortNames"], names["plural"], "all" in names["categories"]) == (["ej"], "elasticjobs", True)


# What it takes and refuses

HEAD: Document = {"apiVersion": contract.API_VERSION, "kind": contract.KIND, "metadata": {"name": "a"}}


def taken(document: Document) -> list[str]:
    """What the schema says against a document; it is what the API server would say, but for the rules in CEL."""
    return [error.message for error in jsonschema.Draft202012Validator(SCHEMA).iter_errors(document)]


RIGHT = {
    file: yaml.safe_load(file.read_text())
    for file in [*(ROOT / "examples").glob("*.yaml"), *(ROOT / "tests" / "golden" / "jobs").glob("*.yaml")]
}


@pytest.mark.parametrize("file", RIGHT, ids=lambda file: file.stem)
def test_a_job_file_that_is_right_is_taken(file: Path) -> None:
    document = RIGHT[file]
    document["spec"]["args"] = [str(arg) for arg in document["spec"].get("args", [])]
    assert taken(document) == []
    dumped = yaml.safe_load(spec.dump(spec.parse(file.read_text())))
    assert taken(dumped) == []
    assert list(broken_rules(dumped)) == []


@pytest.mark.parametrize(
    "fields",
    [
        {"workers": {"replicas": 0}},
        {"workers": {"replicas": "2"}},
        {"resources": {"gpu": -1}},
        {"resources": {"memory": "16 apples"}},
        {"resources": {"accelerator": "tpu"}},
        {"checkpoint": {"every": "soon"}},
        {"checkpoint": {"keep": 1}},
        {"processesPerWorker": "many"},
        {"scheduling": {"spot": "maybe"}},
        {"data": [{"to": "/data"}]},
        {"data": [{"from": "s3://b/c", "to": "data"}]},
        {"data": [{"from": "s3://b/c", "to": "/etc/../data"}]},
        {"volumes": [{"claim": "My_Data", "to": "/data"}]},
        {"volumes": [{"claim": "data", "to": "/data", "accessMode": "Any"}]},
        {"secrets": [{"name": ""}]},
        {"scheduling": {"queue": "a b"}},
        {"tolerations": [{"key": "a b"}]},
        {"suspend": "yes"},
        {"module": "not a module"},
        {"ttlSecondsAfterFinished": -1},
    ],
    ids=str,
)
def test_what_the_job_file_refuses_the_schema_refuses(fields: Document) -> None:
    document = {**HEAD, "spec": {"module": "m", **fields}}
    assert taken(document)
    with pytest.raises(InvalidJob):
        spec.parse(yaml.safe_dump(document))


# Rules between fields


def rules() -> Iterator[tuple[str, Schema, cel.Rule]]:
    for place, part in PARTS.items():
        for rule in part.get("x-kubernetes-validations", []):
            yield place, part, rule


def test_rules_are_where_the_models_have_some() -> None:
    assert {place for place, _, _ in rules()} == {".spec", ".spec.workers", ".spec.rendezvous", ".spec.environment"}


def test_rules_name_fields_that_there_are() -> None:
    for _, part, rule in rules():
        assert set(re.findall(r"self\.(\w+)", rule["rule"])) <= part["properties"].keys()
        assert rule.get("fieldPath", ".")[1:] in {"", *part["properties"]}
        assert rule["message"]
        assert "\n" not in rule["message"]


def test_what_rules_go_through_is_bounded_so_that_their_cost_is() -> None:
    """An estimate that is higher than the API server's: each comparison costs as much as the longest texts."""
    total = 0.0
    for _, part, rule in rules():
        walked = re.findall(r"self\.(\w+)\.(?:all|exists|exists_one|filter)\(|in self\.(\w+)", rule["rule"])
        cost = 10.0 + 20 * rule["rule"].count("self.")
        for each in map("".join, walked):
            items = part["properties"][each]
            cost *= items["maxItems"]
            for name in set(re.findall(r"\b[xy]\.(\w+)", rule["rule"])) & items["items"].get("properties", {}).keys():
                cost += items["items"]["properties"][name]["maxLength"] * items["maxItems"]
        assert cost < 10_000_000, rule
        total += cost
    assert total < 100_000_000


BROKEN: list[Document] = [
    {"module": "m", "script": "a.py"},
    {},
    {"module": "m", "workers": {"min": 9, "max": 2}},
    {"module": "m", "workers": {"replicas": 1, "min": 2}},
    {"module": "m", "workers": {"replicas": 5, "max": 4}},
    {"module": "m", "workers": {"replicas": 3, "sizes": [1, 2, 4]}},
    {"module": "m", "workers": {"replicas": 2, "min": 1, "sizes": [2, 4]}},
    {"module": "m", "workers": {"replicas": 2, "sizes": [2, 4], "step": 2}},
    {"module": "m", "workers": {"replicas": 4, "min": 1, "max": 7, "step": 2}},
    {"module": "m", "rendezvous": {"backend": "etcd"}},
    {"module": "m", "rendezvous": {"endpoint": "etcd:2379"}},
    {"module": "m", "rendezvous": {"backend": "auto", "endpoint": "etcd:2379"}},
    {"module": "m", "environment": {"requirements": "a", "conda": "b"}},
    {"module": "m", "processesPerWorker": 4, "resources": {"gpu": 2}},
    {"module": "m", "activeDeadlineSeconds": 5, "startupDeadlineSeconds": 6},
    {"module": "m", "data": [{"from": "a"}, {"from": "b"}]},
    {"module": "m", "data": [{"from": "a"}, {"from": "b", "to": "/data/b"}]},
    {"module": "m", "models": [{"from": "a", "name": "x"}, {"from": "b", "name": "x"}]},
    {"module": "m", "volumes": [{"claim": "a", "to": "/x"}, {"claim": "b", "to": "/x"}]},
    {"module": "m", "secrets": [{"name": "a", "to": "/x"}, {"name": "b", "to": "/x"}]},
    {"module": "m", "data": [{"from": "s3://b/c"}], "volumes": [{"claim": "b", "to": "/data"}]},
    {"module": "m", "data": [{"from": "a", "to": "/x"}], "secrets": [{"name": "b", "to": "/x"}]},
    {"module": "m", "volumes": [{"claim": "a", "to": "/x"}], "secrets": [{"name": "b", "to": "/x"}]},
    {"module": "m", "models": [{"from": "s3://b/c", "name": "x"}], "volumes": [{"claim": "b", "to": "/models/x"}]},
    {"module": "m", "models": [{"from": "a", "name": "x"}], "secrets": [{"name": "b", "to": "/models/x"}]},
    {"module": "m", "models": [{"from": "a", "name": "x"}], "data": [{"from": "b", "to": "/models/x"}]},
    {"module": "m", "data": [{"from": "a", "to": "/opt/outlast"}]},
    {"module": "m", "volumes": [{"claim": "a", "to": "/etc/outlast/job.yaml"}]},
    {"module": "m", "secrets": [{"name": "a", "to": "/proc"}]},
]
WHOLE: list[Document] = [
    {"module": "m"},
    {"script": "a.py", "workers": {"replicas": 2, "sizes": [1, 2, 4], "min": 1, "max": 4}},
    {"module": "m", "workers": {"replicas": 5, "min": 1, "max": 7, "step": 2}},
    {"module": "m", "workers": {"replicas": 2, "step": 1, "sizes": [2]}},
    {"module": "m", "rendezvous": {"backend": "c10d", "endpoint": "store:29400"}},
    {"module": "m", "rendezvous": {"backend": "c10d"}},
    {"module": "m", "processesPerWorker": 4, "resources": {"gpu": 4}},
    {"module": "m", "processesPerWorker": 4},
    {"module": "m", "processesPerWorker": 4, "resources": {"gpu": 2, "accelerator": "neuron"}},
    {"module": "m", "volumes": [{"claim": "a", "to": "/etc/certificates"}], "secrets": [{"name": "a", "to": "/run/secrets"}]},
    {"module": "m", "processesPerWorker": "auto", "resources": {"gpu": 2}},
    {"module": "m", "activeDeadlineSeconds": 6, "startupDeadlineSeconds": 6},
    {"module": "m", "data": [{"from": "a", "to": "/d/a"}, {"from": "b", "to": "/d/ab"}]},
    {"module": "m", "data": [{"from": "a"}], "volumes": [{"claim": "b", "to": "/data"}]},
    {"module": "m", "data": [{"from": "file:///a"}], "volumes": [{"claim": "b", "to": "/data"}]},
    {"module": "m", "models": [{"from": "a", "name": "x"}], "volumes": [{"claim": "b", "to": "/models/x"}]},
    {"module": "m", "secrets": [{"name": "a"}, {"name": "b"}, {"name": "c", "to": "/c"}]},
]


@pytest.mark.parametrize("fields", BROKEN, ids=str)
def test_a_rule_that_the_job_file_has_the_api_server_has(fields: Document) -> None:
    document = {**HEAD, "spec": fields}
    assert taken(document) == []
    with pytest.raises(InvalidJob) as caught:
        spec.parse(yaml.safe_dump(document))
    found = list(broken_rules(document))
    assert found
    said = [sentence for _, sentence in caught.value.problems]
    assert any(words(message) <= words(sentence) for message in found for sentence in said)


@pytest.mark.parametrize("fields", WHOLE, ids=str)
def test_no_rule_refuses_what_the_job_file_takes(fields: Document) -> None:
    document = {**HEAD, "spec": fields}
    spec.parse(yaml.safe_dump(document))
    assert list(broken_rules(document)) == []


def words(sentence: str) -> set[str]:
    """The names of fields in a sentence."""
    return set(re.findall(r"[\w.]*\w\.\w+", sentence.partition(";")[0]))


def broken_rules(document: Document) -> Iterator[str]:
    """The rules that a document breaks, and what the API server says then; evaluated by another implementation of CEL."""
    import celpy

    environment = celpy.Environment()

    def value(expression: str, part: Any) -> Any:
        return environment.program(environment.compile(expression)).evaluate({"self": celpy.json_to_cel(part)})

    fields = {**document["spec"], "workers": {"replicas": 1, **document["spec"].get("workers", {})}}
    for place, _, rule in rules():
        part = fields if place == ".spec" else fields.get(place.rpartition(".")[2])
        if part is not None and not value(rule["rule"], part):
            yield rule["message"]


# What is installed


def test_deploy_is_what_the_code_renders() -> None:
    pages = DEPLOY["pages"]()
    there = {str(path.relative_to(ROOT / "deploy")): path.read_text() for path in (ROOT / "deploy").rglob("*.yaml")}
    assert there == pages, "run: python deploy/render.py"


INSTALLED = [
    document
    for documents in install.files().values()
    for document in documents
    if not document["apiVersion"].startswith("kustomize")
]


@pytest.mark.parametrize("version", MINORS)
def test_kubernetes_takes_what_is_installed(version: str) -> None:
    for document in INSTALLED:
        schemas.validate(document, version, strict=True)


def test_every_file_is_in_a_kustomization() -> None:
    files = install.files()
    for name, (document, *_) in files.items():
        if document["kind"] == "Kustomization":
            directory = name.removesuffix("kustomization.yaml")
            there = {file.removeprefix(directory) for file in files if file.startswith(directory)}
            assert set(document["resources"]) == {file for file in there if "/" not in file} - {"kustomization.yaml"}


def test_nobody_may_do_everything() -> None:
    rules = [(document["metadata"]["name"], rule) for document in INSTALLED for rule in document.get("rules", [])]
    assert rules
    for _, rule in rules:
        assert "*" not in [*rule["verbs"], *rule["resources"], *rule["apiGroups"]]
        assert not set(rule["resources"]) & {"secrets", "roles", "rolebindings", "clusterroles", "clusterrolebindings"}
        assert not set(rule["verbs"]) & {"escalate", "bind", "impersonate"}
    workers = [rule for name, rule in rules if name == rbac.WORKER]
    assert not any(set(rule["resources"]) & {"pods", "services"} for rule in workers)


def test_users_of_a_namespace_may_use_its_elasticjobs() -> None:
    found = {document["metadata"]["name"]: document for document in rbac.users()}
    prefix = "rbac.authorization.k8s.io/aggregate-to-"
    assert found["outlast-view"]["metadata"]["labels"][f"{prefix}view"] == "true"
    assert {f"{prefix}edit", f"{prefix}admin"} <= found["outlast-edit"]["metadata"]["labels"].keys()
    assert {verb for rule in found["outlast-view"]["rules"] for verb in rule["verbs"]} == {"get", "list", "watch"}
    scale = [rule for rule in found["outlast-edit"]["rules"] if "elasticjobs/scale" in rule["resources"]]
    assert "patch" in scale[0]["verbs"]


def test_members_of_etcd_tell_clients_their_own_names() -> None:
    (members,) = [each for each in INSTALLED if each["kind"] == "StatefulSet"]
    (service,) = [each for each in INSTALLED if each["kind"] == "Service"]
    (container,) = members["spec"]["template"]["spec"]["containers"]
    flags = dict(flag.removeprefix("--").split("=", 1) for flag in container["command"][1:])
    host = "outlast-etcd.outlast-system.svc.cluster.local"
    assert flags["advertise-client-urls"] == f"http://$(OUTLAST_POD).{host}:2379"
    assert flags["initial-advertise-peer-urls"] == f"http://$(OUTLAST_POD).{host}:2380"
    assert flags["initial-cluster"] == ",".join(f"outlast-etcd-{n}=http://outlast-etcd-{n}.{host}:2380" for n in range(3))
    assert service["spec"]["publishNotReadyAddresses"]
    assert members["spec"]["volumeClaimTemplates"][0]["metadata"]["name"] == container["volumeMounts"][0]["name"]
