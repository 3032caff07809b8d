"""The CustomResourceDefinition: what the API server asks of a schema, and that it takes what the job file takes."""

from __future__ import annotations

import functools
import itertools
import re
import runpy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from kubernetes_validate import utils as schemas

from outlast.base.errors import InvalidJob
from outlast.job import contract, spec
from outlast.job.failure import Failure
from outlast.job.status import JobStatus, State
from outlast.kubernetes import manifests
from outlast.kubernetes.api import kinds
from outlast.kubernetes.manifests import configmaps_and_service, labels
from outlast.kubernetes.manifests.installed import crd, operator_deployment
from outlast.kubernetes.manifests.render_request import Document
from published_schemas import each_minor

ROOT = Path(__file__).parents[2]
DEPLOY = runpy.run_path(str(ROOT / "deploy" / "render.py"))
(VERSION,) = crd.definition()["spec"]["versions"]
SCHEMA = VERSION["schema"]["openAPIV3Schema"]
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


def test_the_schema_is_structural() -> None:
    """The API server refuses others. Patterns are for RE2, which knows no look-around and no references back."""
    unknown = {"$ref", "allOf", "oneOf", "not", "const", "title", "nullable", "definitions", "$defs", "examples"}
    assert len(PARTS) > 200
    for place, part in PARTS.items():
        either = part.get("x-kubernetes-int-or-string", False)
        assert not part.keys() & unknown
        whole = part.keys() == {"description", "x-kubernetes-preserve-unknown-fields"} and place.startswith(".spec.template.")
        assert ("type" in part) is not (either or whole)
        assert part.get("anyOf") == ([{"type": "integer"}, {"type": "string"}] if either else None)
        assert part.get("additionalProperties") is not False
        if part.get("type") == "object":
            open_ = part.get("x-kubernetes-preserve-unknown-fields") or "additionalProperties" in part or place == ".metadata"
            assert "properties" in part or open_
        if "default" in part:
            assert place in (".spec.workers", ".spec.workers.replicas")
        if pattern := part.get("pattern"):
            re.compile(pattern)
            assert not re.search(r"\(\?[=!<]|\\[1-9]", pattern), place
    metadata = SCHEMA["properties"]["metadata"]
    assert (set(metadata), set(metadata["properties"])) == ({"type", "properties"}, {"name"}), "it may say nothing else"


@pytest.mark.parametrize(("length", "said"), [(51, []), (52, [SCHEMA["x-kubernetes-validations"][0]["message"]])])
def test_the_name_of_each_worker_is_a_host_name(length: int, said: list[str]) -> None:
    document = {**HEAD, "metadata": {"name": "j" * length}, "spec": {"module": "m"}}
    assert list(broken_rules(document)) == said
    assert len(contract.worker_name("j" * length, contract.MOST_WORKERS - 1)) == 12 + length
    if said:
        with pytest.raises(InvalidJob, match="at most 51 characters"):
            spec.parse(yaml.safe_dump(document))


def test_every_field_of_the_spec_is_explained() -> None:
    assert [place for place, part in parts(SPEC) if place and place[-1] not in "]*" and not part.get("description")] == []
    assert PARTS[".spec.checkpoint.every"]["description"].endswith("(`200 steps`). Default: 5m.")
    assert PARTS[".spec.workers.min"]["description"].count("Default: ") == 1


def test_every_field_of_the_job_file_is_in_the_schema() -> None:
    fields = [set(model["properties"]) for name, model in spec.schema()["$defs"].items() if name != "Metadata"]
    known = [set(part["properties"]) for place, part in parts(SPEC) if "properties" in part and not place.startswith(".template")]
    assert sorted(map(sorted, known)) == sorted(map(sorted, fields))


def test_what_is_scaled_and_shown_are_fields() -> None:
    scale, columns = VERSION["subresources"]["scale"], VERSION["additionalPrinterColumns"]
    for path in [*scale.values(), *(column["jsonPath"] for column in columns)]:
        assert path in PARTS or path == ".metadata.creationTimestamp"
    assert (PARTS[".spec.workers"]["default"], PARTS[".spec.workers.replicas"]["default"]) == ({}, 1)


# What it takes and refuses

HEAD: Document = {"apiVersion": contract.API_VERSION, "kind": contract.KIND, "metadata": {"name": "a"}}


def taken(document: Document) -> list[str]:
    """Return the errors of a document by the schema, as the API server would report them, without the rules in CEL."""
    return [error.message for error in jsonschema.Draft202012Validator(SCHEMA).iter_errors(document)]


RIGHT = {
    file: yaml.safe_load(file.read_text())
    for file in [*(ROOT / "examples").glob("*.yaml"), *(ROOT / "tests" / "shared" / "golden" / "jobs").glob("*.yaml")]
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
        {"workers": {"replicas": -1}},
        {"workers": {"replicas": "2"}},
        {"resources": {"memory": "16 apples"}},
        {"resources": {"accelerator": "tpu"}},
        {"processesPerWorker": "many"},
        {"scheduling": {"spot": "maybe"}},
        {"data": [{"to": "/data"}]},
        {"data": [{"from": "s3://b/c", "to": "data"}]},
        {"data": [{"from": "s3://b/c", "to": "/etc/../data"}]},
        {"secrets": [{"name": ""}]},
        {"suspend": "yes"},
    ],
    ids=str,
)
def test_what_the_job_file_refuses_the_schema_refuses(fields: Document) -> None:
    document = {**HEAD, "spec": {"module": "m", **fields}}
    assert taken(document)
    with pytest.raises(InvalidJob):
        spec.parse(yaml.safe_dump(document))


def test_a_fraction_of_a_core_is_sent_as_text_and_refused_as_a_number() -> None:
    """In a structural schema, a value that may be a number or a text is an integer or a text."""
    read = spec.parse(yaml.safe_dump({**HEAD, "spec": {"module": "m", "image": "i", "resources": {"cpu": 0.2, "cpuLimit": 1.5}}}))
    (sent,) = manifests.render(read)
    assert sent["spec"]["resources"] == {"cpu": "200m", "cpuLimit": "1500m"}
    assert taken(sent) == []
    assert taken({**sent, "spec": {**sent["spec"], "resources": {"cpu": 0.2}}})


# Rules between fields


def rules() -> Iterator[tuple[str, Schema, crd.Rule]]:
    for place, part in PARTS.items():
        for rule in part.get("x-kubernetes-validations", []):
            yield place, part, rule


def test_rules_are_where_the_models_have_some_and_name_fields_that_there_are() -> None:
    assert {place for place, _, _ in rules()} == {"", ".spec", ".spec.workers", ".spec.rendezvous", ".spec.environment"}
    for _, part, rule in rules():
        assert set(re.findall(r"self\.(\w+)", rule["rule"])) <= part["properties"].keys()
        assert rule.get("fieldPath", ".").split(".")[1] in {"", *part["properties"]}
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
    {"module": "m", "workers": {"replicas": 0, "min": 9, "max": 2}},
    {"module": "m", "workers": {"replicas": 0, "max": 2, "sizes": [4, 8]}},
    {"module": "m", "workers": {"replicas": 0, "min": 2, "sizes": [4, 8]}},
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
    {"module": "m", "workers": {"replicas": 0}},
    {"module": "m", "workers": {"replicas": 0, "min": 2}},
    {"module": "m", "workers": {"replicas": 0, "min": 2, "max": 7, "step": 2}},
    {"module": "m", "workers": {"replicas": 0, "sizes": [2, 4]}},
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
    return set(re.findall(r"[\w.]*\w\.\w+", sentence.partition(";")[0]))


def broken_rules(document: Document, before: Document | None = None) -> Iterator[str]:
    """The rules that a document breaks, and what the API server says then; evaluated by another implementation of CEL.

    Those about changes are asked only when there was a document `before`.
    """
    new, old = specified(document), specified(before or document)
    for place, _, rule in rules():
        part, was = ((each if place == ".spec" else each.get(place.rpartition(".")[2])) for each in (new, old))
        part = document if place == "" else part
        change = "oldSelf" in rule["rule"]
        asked = part is not None and (not change or (before is not None and was is not None))
        if asked and not program(rule["rule"])({"self": part, "oldSelf": was} if change else {"self": part}):
            yield rule["message"]


@functools.cache
def program(expression: str) -> Callable[[Document], bool]:
    import celpy

    environment = celpy.Environment()
    compiled = environment.program(environment.compile(expression))
    return lambda values: bool(compiled.evaluate({name: celpy.json_to_cel(value) for name, value in values.items()}))


def specified(document: Document) -> Document:
    """The specification with what the API server fills in."""
    return {**document["spec"], "workers": {"replicas": 1, **document["spec"].get("workers", {})}}


# Changes

BEFORE: Document = {
    "module": "m",
    "image": "example.com/a:1",
    "args": ["--epochs=1"],
    "data": [{"from": "s3://b/c"}],
    "workers": {"replicas": 2, "min": 1, "max": 4},
    "resources": {"cpu": 1},
    "scheduling": {"queue": "a", "priorityClassName": "low"},
    "env": {"A": "1"},
    "template": {"spec": {"hostNetwork": True}},
}
REMEDY = "delete the job and apply it (with code: outlast submit) under the same name: it goes on from its checkpoint"


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"workers": {"replicas": 0, "min": 1, "max": 4}},
        {"workers": {"replicas": 4, "sizes": [2, 4]}},
        {"workers": {"replicas": 3, "min": 1, "max": 9, "step": 2}},
        {"scheduling": {"queue": "a", "priorityClassName": "high"}},
    ],
    ids=str,
)
def test_what_may_change_while_a_job_runs(fields: Document) -> None:
    before, after = {**HEAD, "spec": BEFORE}, {**HEAD, "spec": {**BEFORE, **fields}}
    assert list(broken_rules(after, before)) == []
    assert list(broken_rules(before, after)) == []


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("image", "example.com/a:2"),
        ("args", ["--epochs=2"]),
        ("args", ["--epochs=1", "--batch=2"]),
        ("code", "s3://b/code.zip"),
        ("env", {"A": "2"}),
        ("env", {"A": "1", "B": "2"}),
        ("template", {"spec": {"hostNetwork": False}}),
        ("template", {"metadata": {"labels": {"a": "b"}}}),
        ("template", {"metadata": {"annotations": {"a": "b"}}}),
    ],
    ids=str,
)
def test_what_cannot_change_is_refused_with_the_way_out(field: str, value: Any) -> None:
    before, after = {**HEAD, "spec": BEFORE}, {**HEAD, "spec": {**BEFORE, field: value}}
    sentence = f"{field} of a job cannot change; {REMEDY}"
    assert list(broken_rules(after, before)) == [sentence]
    assert list(broken_rules(before, after)) == [sentence]


def test_the_queue_of_a_job_cannot_change_nor_what_it_runs() -> None:
    before, after = {**HEAD, "spec": BEFORE}, {**HEAD, "spec": {**BEFORE, "scheduling": {"priorityClassName": "low"}}}
    sentence = f"scheduling.queue of a job cannot change; {REMEDY}"
    assert list(broken_rules(after, before)) == list(broken_rules(before, after)) == [sentence]
    script = {**{key: value for key, value in BEFORE.items() if key != "module"}, "script": "a.py"}
    found = list(broken_rules({**HEAD, "spec": script}, before))
    assert found == [f"{field} of a job cannot change; {REMEDY}" for field in ("module", "script")]


def test_whether_a_field_can_change_is_decided_for_all_of_them() -> None:
    """A new field of the job file needs a word about it."""
    free = {"workers", "suspend", "cleanPodPolicy", "restarts", "scheduling"}
    free |= {"activeDeadlineSeconds", "startupDeadlineSeconds", "ttlSecondsAfterFinished"}
    assert set(crd.IMMUTABLE) | free == set(SPEC["properties"])
    assert {*crd.IMMUTABLE_SCHEDULING, "priorityClassName"} == set(SPEC["properties"]["scheduling"]["properties"])


# Status


def test_a_status_of_an_operator_is_read() -> None:
    """All that the schema knows, and what it does not."""
    written = example(SCHEMA["properties"]["status"]) | {"state": "Running", "ofTomorrow": {"a": 1}}
    found = JobStatus.model_validate({"name": "a", **written})
    assert (found.state, found.step, found.world, found.goodput) == (State.RUNNING, 1, [1], 1.5)
    assert found.failure == Failure(
        **dict.fromkeys(("worker", "rank", "code", "step", "generation", "attempt"), 1),
        **dict.fromkeys(("reason", "traceback", "node", "log_tail"), "text"),
        time=1.5,
        counted=True,
    )
    assert JobStatus.model_validate_json(found.model_dump_json()) == found
    by_name = JobStatus.model_validate({"name": "a", **written, "failure": written.pop("lastFailure")})
    assert by_name == found


def example(part: Schema) -> Any:
    match part.get("type"):
        case "object":
            return {name: example(inner) for name, inner in part.get("properties", {}).items()}
        case "array":
            return [example(part["items"])]
        case "string":
            return "2026-01-01T00:00:00Z" if part.get("format") else part.get("enum", ["text"])[0]
    return {"integer": 1, "number": 1.5, "boolean": True}[part["type"]]


def test_every_field_of_the_status_is_explained() -> None:
    found = [place for place, part in parts(SCHEMA["properties"]["status"]) if not place.endswith("]")]
    unexplained = [place for place in found if not PARTS[f".status{place}"].get("description")]
    assert [place for place in unexplained if not place.startswith(".conditions[]")] == []


# What is installed


def test_deploy_is_what_the_code_renders() -> None:
    pages = DEPLOY["pages"]()
    files = [path for path in (ROOT / "deploy").rglob("*.*") if path.suffix in (".yaml", ".json")]
    there = {str(path.relative_to(ROOT / "deploy")): path.read_text() for path in files}
    assert there == pages, "run: python deploy/render.py"


INSTALLED = [
    document
    for documents in operator_deployment.files().values()
    for document in documents
    if not document["apiVersion"].startswith(("kustomize", "monitoring.coreos.com"))
]
OWNER = {"apiVersion": contract.API_VERSION, "kind": contract.KIND, "name": "a", "uid": "u", "controller": True}
META = {"namespace": "team", "labels": {"x": "y"}, "ownerReferences": [OWNER]}
ACCESS = configmaps_and_service.worker_access("a", "team", 2, {"x": "y"}, OWNER)
BUDGET = configmaps_and_service.disruption_budget("a", "team", 2, {"x": "y"}, OWNER)


@each_minor
def test_kubernetes_takes_what_is_installed_and_what_is_made_for_a_job(version: str) -> None:
    for document in [*INSTALLED, *ACCESS, BUDGET]:
        schemas.validate(document, version, strict=True)


def test_nobody_may_do_everything() -> None:
    rules = [(document["metadata"]["name"], rule) for document in INSTALLED for rule in document.get("rules", [])]
    assert rules
    for _, rule in rules:
        assert "*" not in [*rule["verbs"], *rule["resources"], *rule["apiGroups"]]
        assert not set(rule["resources"]) & {"secrets", "clusterroles", "clusterrolebindings"}
        assert not set(rule["verbs"]) & {"escalate", "bind", "impersonate"}


def test_workers_may_say_that_they_are_there_and_read_their_job() -> None:
    account, role, binding = ACCESS
    assert [each["metadata"] for each in ACCESS] == [{"name": "a-worker", **META}] * 3
    assert account["automountServiceAccountToken"] is False
    leases = {"apiGroups": ["coordination.k8s.io"], "resources": ["leases"], "verbs": ["create", "patch"]}
    job = {"apiGroups": ["outlast.dev"], "resources": ["elasticjobs"], "verbs": ["get", "list", "watch"]}
    assert role["rules"] == [{**leases, "resourceNames": ["a-worker-0", "a-worker-1"]}, {**job, "resourceNames": ["a"]}]
    assert binding["roleRef"] == {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": "a-worker"}
    assert binding["subjects"] == [{"kind": "ServiceAccount", "name": "a-worker", "namespace": "team"}]


def test_the_operator_may_do_what_it_lets_workers_do_and_look_at_all_that_it_makes_beside_pods() -> None:
    """Else the API server would refuse the role (https://kubernetes.io/docs/reference/access-authn-authz/rbac/, privilege
    escalation prevention), and the operator could not see whose a document is that has the name of one that it makes."""
    roles = [each for each in INSTALLED if each["kind"] == "ClusterRole" and each["metadata"]["name"] == "outlast-operator"]
    made = [kinds.kind_of(document) for document in (*ACCESS, BUDGET)]
    seen = {(kind.group, kind.plural, "get") for kind in (*made, kinds.SERVICE, kinds.VOLCANO_GROUP, kinds.POD_GROUP)}
    (held,) = (triples(each["rules"]) for each in roles)
    assert triples(ACCESS[1]["rules"]) | seen <= held


def triples(rules: list[Document]) -> set[tuple[str, str, str]]:
    return {triple for rule in rules for triple in itertools.product(rule["apiGroups"], rule["resources"], rule["verbs"])}


def test_a_drain_leaves_a_job_its_fewest_workers_and_waits_for_none_that_is_not_ready() -> None:
    selector = {"matchLabels": labels.selector("a")}
    assert BUDGET["metadata"] == {"name": "a", **META}
    assert BUDGET["spec"] == {"minAvailable": 2, "unhealthyPodEvictionPolicy": "AlwaysAllow", "selector": selector}


def test_users_of_a_namespace_may_look_at_its_elasticjobs_or_change_them_by_their_role() -> None:
    found = {document["metadata"]["name"]: document for document in operator_deployment.files()["rbac.yaml"]}
    for name, roles in (("outlast-view", {"view"}), ("outlast-edit", {"edit", "admin"})):
        assert {f"rbac.authorization.k8s.io/aggregate-to-{role}" for role in roles} <= found[name]["metadata"]["labels"].keys()
    assert {verb for rule in found["outlast-view"]["rules"] for verb in rule["verbs"]} == {"get", "list", "watch"}
