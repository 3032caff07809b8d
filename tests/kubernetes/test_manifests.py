"""A job as documents for Kubernetes: what holds in every topology, and what each of them is about."""

from __future__ import annotations

import json
import re
import runpy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from kubernetes_validate import utils as schemas

from outlast.base.errors import InvalidJob, OutlastError
from outlast.cli.cluster import render as render_command
from outlast.job import contract, spec
from outlast.kubernetes import manifests
from outlast.kubernetes.manifests import (
    evaluation_job,
    labels,
    names,
    overlay,
    render_request,
    resources,
    variables,
    worker_pod,
)
from outlast.kubernetes.manifests.render_request import Document
from outlast.kubernetes.manifests.scheduling import gang
from outlast.kubernetes.operator import desired, observed_job
from outlast.kubernetes.operator.cluster_cache import CachedJob
from outlast.worker.agent import lifecycle, upload_supervisor
from published_schemas import MINORS, each_minor

ROOT = Path(__file__).parents[2]
GOLDEN = runpy.run_path(str(ROOT / "tests" / "shared" / "golden" / "render.py"))
JOBS: list[str] = GOLDEN["JOBS"]
TOPOLOGIES = list(manifests.TOPOLOGIES)
WITH_PODS = [topology for topology in TOPOLOGIES if topology != "elasticjob"]
LABEL = re.compile(r"([A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?)?")
DNS = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?")

every_topology = pytest.mark.parametrize("topology", TOPOLOGIES)
every_topology_of_pods = pytest.mark.parametrize("topology", WITH_PODS)
every_job = pytest.mark.parametrize("name", JOBS)


def a_job(name: str = "a", **fields: Any) -> spec.Job:
    usual = {"image": "example.com/image:1", "module": "recipes.smoke", "output": "s3://bucket/runs"}
    head = {"apiVersion": contract.API_VERSION, "kind": contract.KIND, "metadata": {"name": name}}
    return spec.parse(yaml.safe_dump({**head, "spec": {**usual, **fields}}))


def rendered(topology: str = "job", **fields: Any) -> list[Document]:
    return manifests.render(a_job(**fields), topology)


def templates(documents: list[Document]) -> Iterator[Document]:
    for document in documents:
        fields = document.get("spec", {})
        if document["kind"] != contract.KIND:
            yield from [fields["template"]] if "template" in fields else []


def template(documents: list[Document]) -> Document:
    (found,) = templates(documents)
    return found


def worker(documents: list[Document]) -> Document:
    return next(each for each in template(documents)["spec"]["containers"] if each["name"] == "trainer")


def env(documents: list[Document]) -> dict[str, Any]:
    return {each["name"]: each.get("value", each.get("valueFrom")) for each in worker(documents)["env"]}


def kind(documents: list[Document], wanted: str) -> Document:
    return next(each for each in documents if each["kind"] == wanted)


def wrong(job: spec.Job, topology: str = "indexed-job") -> list[str]:
    with pytest.raises(InvalidJob) as caught:
        manifests.render(job, topology)
    return [sentence for _, sentence in caught.value.problems]


# What every topology has in common


@every_topology
@every_job
def test_documents_are_what_they_were(topology: str, name: str) -> None:
    page = f"{topology}/{name}.yaml"
    there = (ROOT / "tests" / "shared" / "golden" / page).read_text()
    assert there == GOLDEN["pages"]()[page], "run: python tests/shared/golden/render.py, and look at what has changed"


@each_minor
@every_topology
@every_job
def test_kubernetes_takes_the_documents(topology: str, name: str, version: str) -> None:
    documents = GOLDEN["documents"](name, topology)
    pods = [{"apiVersion": "v1", "kind": "Pod", **each} for each in templates(documents)]
    for document in [each for each in documents if known(each)] + pods:
        schemas.validate(document, version, strict=True)


def known(document: Document) -> bool:
    """Whether its kind is one of Kubernetes itself."""
    group = document["apiVersion"].partition("/")[0]
    return "." not in group or (group.endswith("k8s.io") and group != "scheduling.x-k8s.io")


@every_topology_of_pods
@every_job
def test_pods_are_restricted(topology: str, name: str) -> None:
    assert list(unrestricted(template(GOLDEN["documents"](name, topology))["spec"])) == []


def unrestricted(pod: Document) -> Iterator[str]:
    """Yield the violations of the restricted Pod Security Standard in a pod, as its page lists them."""
    allowed = {"configMap", "csi", "downwardAPI", "emptyDir", "ephemeral", "persistentVolumeClaim", "projected", "secret"}
    yield from (field for field in ("hostNetwork", "hostPID", "hostIPC") if pod.get(field))
    for volume in pod.get("volumes", []):
        yield from (f"volume {source}" for source in volume.keys() - {"name"} - allowed)
    context = pod.get("securityContext", {})
    for container in [*pod["containers"], *pod.get("initContainers", [])]:
        own = {**context, **container.get("securityContext", {})}
        if own.get("privileged"):
            yield "privileged"
        if own.get("allowPrivilegeEscalation") is not False:
            yield "escalation"
        if own.get("capabilities", {}).get("drop") != ["ALL"] or set(own["capabilities"].get("add", [])) - {"NET_BIND_SERVICE"}:
            yield "capabilities"
        if own.get("runAsNonRoot") is not True or own.get("runAsUser") == 0:
            yield "root"
        if own.get("seccompProfile", {}).get("type") not in ("RuntimeDefault", "Localhost"):
            yield "seccomp"
        yield from ("hostPort" for port in container.get("ports", []) if port.get("hostPort"))


def test_the_check_of_the_standard_finds_what_is_forbidden() -> None:
    pod = {"hostNetwork": True, "volumes": [{"name": "a", "hostPath": {}}], "containers": [{"ports": [{"hostPort": 1}]}]}
    assert set(unrestricted(pod)) == {
        "hostNetwork", "volume hostPath", "escalation", "capabilities", "root", "seccomp", "hostPort",
    }  # fmt: skip


job_names = st.from_regex(r"[a-z]([-a-z0-9]{0,50}[a-z0-9])?", fullmatch=True)


@settings(max_examples=settings.default.max_examples // 2)
@given(name=job_names, topology=st.sampled_from(TOPOLOGIES), replicas=st.integers(1, 10_000))
def test_names_and_labels_are_valid_however_long_the_job_is_called(name: str, topology: str, replicas: int) -> None:
    documents = manifests.render(a_job(name, workers={"replicas": replicas, "min": 1}), topology, run="r" * 80)
    for document in documents:
        assert len(document["metadata"]["name"]) <= 63
        assert DNS.fullmatch(document["metadata"]["name"])
    for meta in [*(document["metadata"] for document in documents), *(each["metadata"] for each in templates(documents))]:
        for value in meta["labels"].values():
            assert len(value) <= 63
            assert LABEL.fullmatch(value)
    if topology in ("indexed-job", "statefulset"):
        host, service, *_ = env(documents)[contract.Env.RENDEZVOUS].removeprefix("c10d://").split(".")
        last = f"{host.removesuffix('0')}{replicas - 1}"
        assert len(last) <= 63
        assert len(service) <= 63


@given(name=st.text("ab-.", min_size=1, max_size=90), longest=st.integers(20, 63))
def test_a_name_that_is_too_long_ends_with_a_digest(name: str, longest: int) -> None:
    fitted = names.fit(name, longest)
    assert len(fitted) <= longest
    assert fitted == name or fitted.endswith(f"-{names.digest(name)}")
    assert names.fit(f"{name}x", longest) != fitted


@every_topology_of_pods
@every_job
def test_a_variable_is_set_before_it_is_referred_to(topology: str, name: str) -> None:
    known: set[str] = set()
    for variable in worker(GOLDEN["documents"](name, topology))["env"]:
        value = variable.get("value", "").replace("$$", "")
        assert set(re.findall(r"\$\((\w+)\)", value)) <= known, variable["name"]
        assert variable["name"] not in known
        known.add(variable["name"])


@every_topology_of_pods
def test_a_value_of_the_users_reaches_training_as_it_is_written(topology: str) -> None:
    job = a_job(env={"PRICE": "$$5", "REF": "$(OTHER)/x", "LITERAL": "$$(HOME)", "PLAIN": "a $b"})
    found = env(manifests.render(job, topology))
    seen = {name: expanded(found[name], {"HOME": "/root"}) for name in job.spec.env}
    assert seen == {**job.spec.env, "LITERAL": "$(HOME)"}


def test_a_variable_that_refers_to_one_that_is_known_has_its_value_in_the_pod() -> None:
    job = a_job("train", env={"LOGS": "$(ROOT)/logs", "ROOT": "$(OUTLAST_OUTPUT)"})
    found = env(manifests.render(job, "job"))
    assert (found["ROOT"], found["LOGS"]) == (found["OUTLAST_OUTPUT"], found["OUTLAST_OUTPUT"] + "/logs")


@given(value=st.text("$()aHOME", max_size=12))
def test_a_literal_survives_what_kubernetes_makes_of_it(value: str) -> None:
    assert expanded(variables.escaped(value), {"HOME": "changed", "a": "changed"}) == value


def expanded(value: str, known: dict[str, str]) -> str:
    """Expand a container's variable as Kubernetes does: `$(NAME)` is replaced if it is known, and `$$` is `$`."""

    def replaced(match: re.Match[str]) -> str:
        return "$" if match[0] == "$$" else known.get(match[1], match[0])

    return re.sub(r"\$\$|\$\((.*?)\)", replaced, value, flags=re.S)


SPOT_NOTICE_S, ARRIVES_S = 120, 15
"""AWS's, and the time until a pod hears of it: handlers ask every few seconds, and then drain the node."""


def test_by_default_a_worker_saves_and_pushes_within_the_notice_of_a_spot_machine() -> None:
    seconds = template(rendered())["spec"]["terminationGracePeriodSeconds"]
    assert ARRIVES_S + seconds <= SPOT_NOTICE_S
    follows = 2 * upload_supervisor.STOP_TIMEOUT_S + lifecycle.LAST_FLUSH_S
    assert follows <= contract.Pod.LAST_PUSH_S, "what may follow the grace"


def test_arguments_that_may_be_secrets_are_no_labels() -> None:
    args = ["--batch=1200", "--moe-coef", "0.1", "--name=not a label", "--flag", "--out=$(OUTLAST_OUTPUT)", "positional"]
    secrets = ["--api-token=abc", "--HF_KEY=abc", "--client-secret", "abc", "--password=abc", "--credentials=abc"]
    assert labels.settings([*args, *secrets]) == {"args.outlast.dev/batch": "1200", "args.outlast.dev/moe-coef": "0.1"}


@given(args=st.lists(st.text(max_size=80)))
def test_no_argument_makes_a_label_that_is_none(args: list[str]) -> None:
    for name, value in labels.settings([*args, *(f"--{arg}={arg}" for arg in args)]).items():
        assert re.fullmatch(r"args\.outlast\.dev/[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?", name)
        assert len(value) <= 63
        assert LABEL.fullmatch(value)


EACH_A_HOST = "is the Service of all pods, and each would be host; leave rendezvous out: it is pod 0 then"
LISTED = "template.spec.containers must be a list of mappings, each with its name"
NO_ETCD = "rendezvous.backend is etcd, but the operator decides here; leave rendezvous out, or say --as indexed-job"
UNIX = (
    "rendezvous.endpoint (unix://etcd:2379) begins with unix://; write etcd:2379, or etcd:// or http:// or etcds:// or https://"
)
SHARED = (
    "resources.sharedMemory (4Gi), which counts as memory, leaves nothing of resources.memory (4Gi); lower it or raise memory"
)
CPU = "resources.cpu (4) is above resources.cpuLimit (3500m); lower it or raise cpuLimit"
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"rendezvous": {"backend": "etcd", "endpoint": "https://etcd:2379"}}, NO_ETCD),
    *(
        ({"rendezvous": {"backend": "c10d", "endpoint": place}}, f"rendezvous.endpoint ({place}) {EACH_A_HOST}")
        for place in ("a-rdzv:29400", "a-rdzv.train.svc.cluster.local:29400")
    ),
    ({"rendezvous": {"backend": "etcd", "endpoint": "unix://etcd:2379"}}, UNIX),
    ({"resources": {"memory": "4Gi", "sharedMemory": "4Gi"}}, SHARED),
    ({"resources": {"cpu": 4, "cpuLimit": "3500m"}}, CPU),
    *(
        ({"template": patch}, sentence)
        for patch, sentence in (
            ({"spec": {"containers": [{"image": "x"}]}}, "template.spec.containers[0] has no name; give it"),
            ({"spec": {"containers": {"worker": {}}}}, LISTED),
            ({"spec": {"$patch": "drop"}}, "template.spec.$patch (drop) must be one of merge, replace, delete"),
            ({"metadata": "x"}, "template.metadata.labels must be a mapping of names to values; correct or remove it"),
        )
    ),
]


@pytest.mark.parametrize(("fields", "sentence"), REFUSED, ids=[sentence for _, sentence in REFUSED])
def test_what_no_pod_can_be_made_of_is_one_sentence(fields: dict[str, Any], sentence: str) -> None:
    assert wrong(a_job(**fields), "elasticjob" if sentence == NO_ETCD else "indexed-job") == [sentence]


def test_another_topology_is_refused_with_those_that_there_are() -> None:
    with pytest.raises(OutlastError, match="there is no topology daemonset; choose one of elasticjob, job, "):
        rendered("daemonset")


@pytest.mark.parametrize(
    ("name", "value", "sentence"),
    [
        ("team", "a b", 'team ("a b") cannot be a label; at most 63 letters, digits, -, _ and . are allowed'),
        ("outlast.dev/job", "x", "outlast.dev/job is set by Outlast itself; remove it"),
        *(
            (name, "mine", f"{name} is reserved by Kubernetes, which writes it on pods itself; choose another name")
            for name in ("job-name", "batch.kubernetes.io/job-name")
        ),
    ],
)
def test_a_users_label_that_cannot_be_one_is_refused(name: str, value: str, sentence: str) -> None:
    job = a_job()
    labelled = job.model_copy(update={"metadata": job.metadata.model_copy(update={"labels": {name: value}})})
    assert wrong(labelled) == [f"metadata.labels.{sentence}"]


# Applying again


def test_a_run_does_not_depend_on_the_machine_that_renders_it() -> None:
    volumes = [{"claim": "pvc", "to": "/data"}]
    here, there = (a_job(data=[{"from": f"/home/{who}/data"}], volumes=volumes) for who in ("ada", "grace"))
    assert manifests.render(here, "indexed-job") == manifests.render(there, "indexed-job")


@pytest.mark.parametrize("topology", ["job", "indexed-job"])
@pytest.mark.parametrize("change", [{"args": ["--epochs=2"]}, {"template": {"spec": {"hostname": "x"}}}], ids=str)
def test_a_changed_job_has_new_names_so_that_it_can_be_applied(topology: str, change: dict[str, Any]) -> None:
    before, after = rendered(topology), rendered(topology, **change)
    for which in ("ConfigMap", "Job"):
        assert kind(before, which)["metadata"]["name"] != kind(after, which)["metadata"]["name"]
    assert env(before)["OUTLAST_RUN"] != env(after)["OUTLAST_RUN"]


@pytest.mark.parametrize("topology", ["job", "indexed-job"])
def test_suspending_changes_nothing_else(topology: str) -> None:
    running, held = rendered(topology), rendered(topology, suspend=True)
    assert kind(held, "Job")["spec"].pop("suspend") is True
    assert held == running


def test_a_changed_statefulset_keeps_its_name_and_what_cannot_be_changed() -> None:
    before, after = (kind(rendered("statefulset", args=args), "StatefulSet") for args in (["a"], ["b"]))
    fixed = ("serviceName", "selector", "podManagementPolicy")
    assert before["metadata"]["name"] == after["metadata"]["name"] == "a"
    assert [before["spec"][field] for field in fixed] == [after["spec"][field] for field in fixed]
    assert before["spec"]["template"] != after["spec"]["template"]


def test_the_job_file_of_a_pod_is_the_job() -> None:
    job = a_job(args=["--lr", "3e-3"], workers={"replicas": 2}, environment={"requirements": "/here/requirements.txt"})
    documents = manifests.render(job, "indexed-job", files={"/here/requirements.txt": "einops==0.8\n"})
    data = kind(documents, "ConfigMap")["data"]
    assert data["requirements.txt"] == "einops==0.8\n"
    read = spec.parse(data["job.yaml"])
    assert read.spec.environment.requirements == "/etc/outlast/requirements.txt"
    assert read.spec.model_copy(update={"environment": job.spec.environment}) == job.spec
    assert {"name": "config", "mountPath": "/etc/outlast"} in worker(documents)["volumeMounts"]
    volume = {"name": "config", "configMap": {"name": kind(documents, "ConfigMap")["metadata"]["name"]}}
    assert volume in template(documents)["spec"]["volumes"]


# Rendezvous


@pytest.mark.parametrize(
    ("given_", "expected"),
    [
        ({"backend": "etcd", "endpoint": "etcd:2379"}, "etcd://etcd:2379"),
        ({"backend": "etcd", "endpoint": "http://a:2379,b:2379"}, "etcd://a:2379,b:2379"),
        ({"backend": "etcd", "endpoint": "https://a:2379/team/"}, "etcds://a:2379/team"),
        ({"backend": "etcd", "endpoint": "etcds://a:2379"}, "etcds://a:2379"),
        ({"backend": "c10d", "endpoint": "store.example.com:1234"}, "c10d://store.example.com:1234"),
    ],
)
@every_topology_of_pods
def test_a_rendezvous_that_is_given_is_taken(topology: str, given_: dict[str, str], expected: str) -> None:
    assert env(rendered(topology, rendezvous=given_))["OUTLAST_RENDEZVOUS"] == expected


# Each topology


def test_a_job_of_one_pod_needs_no_more_than_one() -> None:
    assert wrong(a_job(workers={"replicas": 2}), "job") == [
        "workers.min (2) is more than the one pod of this topology; render it as indexed-job"
    ]
    data = kind(rendered(workers={"replicas": 2, "min": 1, "max": 4}), "ConfigMap")["data"]
    assert spec.parse(data["job.yaml"]).spec.workers.allowed() == (1,)


@pytest.mark.parametrize("gang", ["coscheduling", "volcano"])
def test_the_one_pod_of_an_evaluation_waits_for_no_gang(gang: str) -> None:
    trained = rendered("indexed-job", scheduling={"gang": gang}, template={"metadata": {"annotations": {"team": "a"}}})
    alone = evaluated(template(trained))
    assert alone["metadata"].get("annotations") == {"team": "a"}
    assert "scheduling.x-k8s.io/pod-group" not in alone["metadata"]["labels"]
    assert "schedulerName" not in alone["spec"]
    own = evaluated(template(rendered("indexed-job", template={"spec": {"schedulerName": "ours"}})))
    assert own["spec"]["schedulerName"] == "ours"


def evaluated(trained: Document) -> Document:
    """The pod of an evaluation, made of that of a worker."""
    pod: Document = evaluation_job.document("a", trained, [], unique="1")["spec"]["template"]
    return pod


def test_an_evaluation_does_not_claim_to_be_a_pod_of_the_job_that_trained() -> None:
    found = template(rendered("indexed-job"))
    written = {f"{group}{name}": "1" for group in ("", "batch.kubernetes.io/") for name in ("controller-uid", "job-name")}
    found["metadata"]["labels"] |= written  # by the API server, into the template of a Job
    assert not evaluated(found)["metadata"]["labels"].keys() & written.keys()


@pytest.mark.parametrize("topology", ["indexed-job", "statefulset"])
def test_a_gang_of_volcano_has_a_group_that_its_pods_name(topology: str) -> None:
    workers = {"replicas": 4, "min": 2, "max": 4}
    documents = rendered(topology, workers=workers, scheduling={"gang": "volcano", "queue": "q"})
    group, found = kind(documents, "PodGroup"), template(documents)
    assert (group["apiVersion"], group["spec"]) == ("scheduling.volcano.sh/v1beta1", {"minMember": 2, "queue": "q"})
    assert found["metadata"]["annotations"]["scheduling.k8s.io/group-name"] == group["metadata"]["name"]


BOTH = ("scheduling.volcano.sh", "scheduling.x-k8s.io")


@pytest.mark.parametrize(
    ("scheduling", "least", "found", "who"),
    [
        ({}, 2, (), "none"),
        ({}, 2, BOTH, "volcano"),
        ({}, 2, BOTH[1:], "coscheduling"),
        ({}, 1, BOTH, "none"),
        ({"gang": "none"}, 2, BOTH, "none"),
        ({"gang": "coscheduling"}, 1, (), "coscheduling"),
    ],
)
def test_a_gang_is_whom_the_cluster_has_where_all_or_none_means_anything(
    scheduling: dict[str, Any], least: int, found: tuple[str, ...], who: str
) -> None:
    fields = a_job(workers={"replicas": 4, "min": least, "max": 4}, scheduling=scheduling).spec
    assert gang.choose(fields, found) == who
    assert gang.choose(fields, found, admitted=True) == ("none" if not scheduling else who)


def test_an_elasticjob_reads_back_as_the_job() -> None:
    job = a_job(workers={"replicas": 2, "min": 1, "max": 4}, resources={"cpu": 0.5, "memory": "1Gi"}, suspend=True)
    (document,) = manifests.render(job.in_namespace("team-a"))
    assert document["metadata"]["namespace"] == "team-a"
    assert spec.parse(json.dumps(document)).spec == job.spec


@every_topology
def test_a_job_without_an_image_is_refused(topology: str) -> None:
    job = a_job()
    bare = job.model_copy(update={"spec": job.spec.model_copy(update={"image": None})})
    assert wrong(bare, topology) == ["image is missing; say which one pods run, e.g. image: ghcr.io/outlast/outlast:0.1"]


# What pods can see


@every_topology
def test_what_pods_cannot_see_is_refused(topology: str) -> None:
    fields = {"data": [{"from": "/home/me/data"}], "models": [{"from": "/home/me/w", "name": "base"}], "code": "/home/me/code"}
    assert wrong(a_job(**fields), topology) == [
        "code (/home/me/code) is on this machine, which pods do not see; put it into a store (code: s3://...), "
        "or into the image and say code: /workspace",
        "data[0].from (/home/me/data) is on this machine, which pods do not see; put it into a store, "
        "or on a volume: volumes: [{claim: NAME, to: /data}]",
        "models[0].from (/home/me/w) is on this machine, which pods do not see; put it into a store, "
        "or on a volume: volumes: [{claim: NAME, to: /models}]",
    ]


def test_a_claim_takes_the_place_of_what_would_end_with_the_pod() -> None:
    volumes = [{"claim": "pvc", "to": "/out", "subPath": "a"}, {"claim": "pvc", "to": "/data", "subPath": "b", "readOnly": True}]
    documents = rendered(volumes=volumes)
    mounts = {mount["mountPath"]: mount for mount in worker(documents)["volumeMounts"]}
    assert mounts["/out"] == {"name": "claim-0", "subPath": "a", "mountPath": "/out"}
    assert mounts["/data"] == {"name": "claim-0", "subPath": "b", "readOnly": True, "mountPath": "/data"}
    claimed = [volume for volume in template(documents)["spec"]["volumes"] if "persistentVolumeClaim" in volume]
    assert claimed == [{"name": "claim-0", "persistentVolumeClaim": {"claimName": "pvc"}}]


def test_a_claim_is_for_one_pod_or_all_unless_its_access_mode_is_given() -> None:
    def modes(topology: str, **fields: str) -> list[str]:
        volumes = [{"claim": "pvc", "to": "/out", "size": "1Gi", **fields}]
        claim = kind(rendered(topology, volumes=volumes), "PersistentVolumeClaim")
        return list(claim["spec"]["accessModes"])

    assert [modes(topology) for topology in TOPOLOGIES] == [
        ["ReadWriteOnce" if topology == "job" else "ReadWriteMany"] for topology in TOPOLOGIES
    ]
    assert modes("job", accessMode="ReadWriteMany") == ["ReadWriteMany"]
    assert modes("statefulset", accessMode="ReadWriteOncePod") == ["ReadWriteOncePod"]


def test_secrets_are_variables_or_files_and_never_in_the_job_file_as_values() -> None:
    documents = rendered(secrets=[{"name": "hf-token"}, {"name": "mlflow", "to": "/etc/mlflow"}])
    container = worker(documents)
    assert container["envFrom"] == [{"secretRef": {"name": "hf-token"}}]
    assert {"name": "secret-1", "readOnly": True, "mountPath": "/etc/mlflow"} in container["volumeMounts"]
    assert {"name": "secret-1", "secret": {"secretName": "mlflow"}} in template(documents)["spec"]["volumes"]


# Resources and scheduling

GPUS, NEURON = {"memory": "16Gi", "nvidia.com/gpu": 4}, {"aws.amazon.com/neuron": 16}


@pytest.mark.parametrize(
    ("given_", "expected"),
    [
        ({}, resources.Share({}, {}, 1, 1, None)),
        (
            {"cpu": 4, "memory": "16Gi", "gpu": 4, "sharedMemory": "4Gi"},
            resources.Share({"cpu": "4", **GPUS}, GPUS, 4, 1, 4 * 2**30),
        ),
        ({"gpu": 1, "accelerator": "amd"}, resources.Share({"amd.com/gpu": 1}, {"amd.com/gpu": 1}, 1, 1, None)),
        ({"cpu": 64, "gpu": 16, "accelerator": "neuron"}, resources.Share({"cpu": "64", **NEURON}, NEURON, 16, 4, None)),
        ({"cpu": 2, "cpuLimit": 4}, resources.Share({"cpu": "2"}, {"cpu": "4"}, 1, 2, None)),
        ({"cpuLimit": 4}, resources.Share({"cpu": "4"}, {"cpu": "4"}, 1, 4, None)),
        ({"gpu": 2, "accelerator": "google.com/tpu"}, resources.Share({"google.com/tpu": 2}, {"google.com/tpu": 2}, 2, 1, None)),
    ],
)
def test_one_place_decides_what_a_worker_has(given_: dict[str, Any], expected: resources.Share) -> None:
    assert resources.share(a_job(resources=given_)) == expected


def test_a_pod_grows_by_the_memory_of_snapshots() -> None:
    def memory(**checkpoint: object) -> object:
        job = a_job(
            resources={"memory": "4Gi"}, scheduling={"gang": "coscheduling"}, workers={"replicas": 2}, checkpoint=checkpoint
        )
        documents = manifests.render(job, "indexed-job")
        asked = worker(documents)["resources"]
        assert asked["requests"] == asked["limits"]
        return asked["limits"]["memory"], kind(documents, "PodGroup")["spec"]["minResources"]["memory"]

    assert memory(memory="2Gi") == ("6Gi", "12Gi")
    assert memory(memory="auto") == memory(memory="off") == memory() == ("4Gi", "8Gi")


@pytest.mark.parametrize(
    ("accelerator", "taints"),
    [
        ("nvidia", ["nvidia.com/gpu"]),
        ("nvidia.com/mig-1g.10gb", ["nvidia.com/mig-1g.10gb", "nvidia.com/gpu"]),
        ("aws.amazon.com/neuroncore", ["aws.amazon.com/neuroncore", "aws.amazon.com/neuron"]),
        ("google.com/tpu", ["google.com/tpu"]),
    ],
)
def test_the_taints_of_an_accelerators_nodes_are_tolerated(accelerator: str, taints: list[str]) -> None:
    job = a_job(resources={"gpu": 1, "accelerator": accelerator}, scheduling={"spot": "avoid"})
    found = template(manifests.render(job, "job"))["spec"]["tolerations"]
    assert found == [{"key": taint, "operator": "Exists", "effect": "NoSchedule"} for taint in taints]


def required(found: Document) -> list[list[tuple[str, str, list[str]]]]:
    terms = found["requiredDuringSchedulingIgnoredDuringExecution"]["nodeSelectorTerms"]
    return [[(each["key"], each["operator"], each["values"]) for each in term["matchExpressions"]] for term in terms]


def operated(job: spec.Job, index: int) -> Document:
    document = {**yaml.safe_load(spec.dump(job)), "metadata": {"name": "a", "namespace": "team", "uid": "12345678-uid"}}
    snapshot = observed_job.take_snapshot(CachedJob(document, [], [], {}, 0.0), 1.0)
    (pod,) = desired.workers(snapshot, [index], 1, ())
    return pod


def test_worker_0_alone_can_be_kept_off_spot_machines() -> None:
    job = a_job(workers={"replicas": 2}, scheduling={"spot": "require", "worker0": "on-demand"})
    first, second = (required(operated(job, index)["spec"]["affinity"]["nodeAffinity"]) for index in (0, 1))
    assert {operator for term in first for _, operator, _ in term} == {"NotIn"}
    assert {operator for term in second for _, operator, _ in term} == {"In"}
    for topology in ("indexed-job", "statefulset"):
        with pytest.raises(
            InvalidJob, match=r"scheduling\.worker0 \(on-demand\) cannot be had in an? .*whose pods are all alike; "
        ):
            manifests.render(job, topology)
    alone = template(rendered(scheduling={"worker0": "on-demand"}))
    assert len(required(alone["spec"]["affinity"]["nodeAffinity"])) == 1


def test_an_operated_pod_keeps_its_node_from_being_saved_and_the_template_wins() -> None:
    key, other = "karpenter.sh/do-not-disrupt", "cluster-autoscaler.kubernetes.io/safe-to-evict"
    annotations = operated(a_job(), 0)["metadata"]["annotations"]
    assert (annotations[key], annotations[other]) == ("true", "false")
    own = a_job(template={"metadata": {"annotations": {key: "false"}}})
    annotations = operated(own, 0)["metadata"]["annotations"]
    assert (annotations[key], annotations[other]) == ("false", "false")


def test_fabric_adapters_come_with_their_huge_pages_and_their_provider() -> None:
    job = a_job(resources={"gpu": 8, "efa": 4, "memory": "64Gi"})
    container = worker(manifests.render(job, "indexed-job"))
    wanted = {"vpc.amazonaws.com/efa": 4, "hugepages-2Mi": "5120Mi"}
    assert all(wanted.items() <= container["resources"][kind].items() for kind in ("requests", "limits"))
    assert {"name": "FI_PROVIDER", "value": "efa"} in container["env"]
    assert resources.total(job.spec, 2)["vpc.amazonaws.com/efa"] == 8
    one = {"efa": 1, "memory": "1Gi"}
    own = worker(rendered(resources=one, env={"FI_PROVIDER": "tcp"}))
    assert [each["value"] for each in own["env"] if each["name"] == "FI_PROVIDER"] == ["tcp"]
    limits = {kind: {"hugepages-2Mi": "10Gi"} for kind in ("limits", "requests")}
    more = worker(rendered(resources=one, template={"spec": {"containers": [{"name": "trainer", "resources": limits}]}}))
    assert more["resources"]["limits"]["hugepages-2Mi"] == "10Gi"
    assert "FI_PROVIDER" not in env(rendered())
    with pytest.raises(InvalidJob, match=r"resources\.efa \(1\) takes huge pages.* set resources\.memory"):
        rendered(resources={"efa": 1})


def test_a_pod_that_may_be_on_any_machine_has_no_affinity_and_tolerates_spot_machines() -> None:
    pod = template(rendered(scheduling={"spot": "any"}))["spec"]
    assert "affinity" not in pod
    assert "kubernetes.azure.com/scalesetpriority" in {toleration["key"] for toleration in pod["tolerations"]}


# The template that is laid over


def overlaid(patch: Document) -> Document:
    return template(rendered(template=patch))


@pytest.mark.parametrize("name", ["trainer", "worker"])  # the latter stands in older job files
def test_a_container_is_merged_by_its_name_and_another_is_added(name: str) -> None:
    patch = {"spec": {"containers": [{"name": name, "image": "x"}, {"name": "sidecar", "image": "y"}]}}
    containers = overlaid(patch)["spec"]["containers"]
    assert [(each["name"], each["image"]) for each in containers] == [("trainer", "x"), ("sidecar", "y")]
    assert containers[0]["command"][-1] == "agent"


def test_variables_volumes_and_mounts_are_merged_by_what_they_are_known_by() -> None:
    container = {
        "name": "trainer",
        "env": [{"name": "HOME", "value": "/root"}, {"name": "OUTLAST_NAMESPACE", "value": "x"}],
        "volumeMounts": [{"mountPath": "/out", "name": "output", "subPath": "a"}],
    }
    volumes = [{"name": "output", "persistentVolumeClaim": {"claimName": "c"}}, {"name": "shm", "emptyDir": {"sizeLimit": "1Gi"}}]
    found = overlaid({"spec": {"containers": [container], "volumes": volumes}})["spec"]
    variables_ = {each["name"]: each for each in found["containers"][0]["env"]}
    assert variables_["HOME"] == {"name": "HOME", "value": "/root"}
    assert variables_["OUTLAST_NAMESPACE"] == {"name": "OUTLAST_NAMESPACE", "value": "x"}
    assert {"name": "output", "mountPath": "/out", "subPath": "a"} in found["containers"][0]["volumeMounts"]
    assert {"name": "output", "persistentVolumeClaim": {"claimName": "c"}} in found["volumes"]
    assert {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": "1Gi"}} in found["volumes"]


def test_null_and_patch_directives_remove() -> None:
    volumes = [{"name": "models", "$patch": "delete"}]
    found = overlaid({"spec": {"enableServiceLinks": None, "volumes": volumes, "securityContext": {"$patch": "replace"}}})["spec"]
    assert "enableServiceLinks" not in found
    assert "models" not in {volume["name"] for volume in found["volumes"]}
    assert found["securityContext"] == {}


def test_what_selects_the_pods_cannot_be_taken_away() -> None:
    found = overlaid({"metadata": {"labels": {"outlast.dev/job": "other", "app.kubernetes.io/component": None, "env": "prod"}}})
    assert labels.selector("a").items() <= found["metadata"]["labels"].items()
    assert found["metadata"]["labels"]["env"] == "prod"


plain = st.recursive(
    st.integers() | st.text("abc", max_size=3),
    lambda inner: (
        st.dictionaries(st.sampled_from(["a", "b", "spec", "containers_"]), inner, max_size=3) | st.lists(inner, max_size=2)
    ),
    max_leaves=8,
)
items = st.lists(
    st.fixed_dictionaries({"name": st.sampled_from("xyz"), "a": plain}), max_size=3, unique_by=lambda item: item["name"]
)
patches = st.fixed_dictionaries({}, optional={"containers": items, "volumes": items, "a": plain, "b": plain})


@given(base=patches, patch=patches)
def test_laying_over_twice_is_laying_over_once(base: Document, patch: Document) -> None:
    before = json.dumps([base, patch])
    once = overlay.merge(base, patch)
    assert overlay.merge(once, patch) == once
    assert overlay.merge(base, {}) == base
    assert json.dumps([base, patch]) == before
    for name in ("containers", "volumes"):
        known = [item["name"] for item in once.get(name, [])]
        assert sorted(set(known)) == sorted(known)
        assert set(known) == {item["name"] for each in (base, patch) for item in each.get(name, [])}


# A pod by itself


@pytest.mark.parametrize(
    ("image", "inject", "injected"),
    [
        ("pytorch/pytorch:2.11.0-cuda12.8-cudnn9-runtime", None, True),
        ("ghcr.io/me/outlast-and-mine:1", None, False),
        ("ghcr.io/me/outlast-and-mine:1", True, True),
        ("train:1", False, False),
    ],
)
def test_an_image_gets_outlast_unless_its_name_or_the_job_says_that_it_has_it(
    image: str, inject: bool | None, injected: bool
) -> None:
    job = a_job("a", image=image, **({} if inject is None else {"inject": inject}))
    asked = render_request.Request(job, names.Names("a", "0" * 8), "run-1", agent_image="registry/operator:7")
    worker = worker_pod.Worker("1", "kubernetes://", account="outlast-worker")
    made = worker_pod.pod(asked, worker, index=1, generation=4, file="spec: {}")
    schemas.validate(made, MINORS[-1], strict=True)
    assert list(unrestricted(made["spec"])) == []
    told = {"outlast.dev/worker": "1", "outlast.dev/generation": "4", "outlast.dev/run": "run-1"}
    assert (made["metadata"]["name"], told.items() <= made["metadata"]["labels"].items()) == ("a-worker-1", True)
    assert (made["spec"]["serviceAccountName"], made["spec"]["automountServiceAccountToken"]) == ("outlast-worker", True)
    (trainer,) = made["spec"]["containers"]
    evaluation = evaluated(made)["spec"]["containers"][0]
    if not injected:
        assert "initContainers" not in made["spec"]
        assert (trainer["command"], evaluation["command"]) == (["outlast", "agent"], ["outlast", "evaluation", "--"])
        return
    (init,) = made["spec"]["initContainers"]
    assert init["image"] == "registry/operator:7"
    assert trainer["command"][:2] == ["/opt/outlast-agent/python/lib/ld.so", "--library-path"]
    assert (trainer["command"][-3:], evaluation["command"][-3:]) == (["-m", "outlast", "agent"], ["outlast", "evaluation", "--"])
    (volume,) = (each["name"] for each in init["volumeMounts"] if each["mountPath"] == init["command"][-1])
    assert {"name": volume, "mountPath": "/opt/outlast-agent", "readOnly": True} in trainer["volumeMounts"]
    assert {"name": volume, "emptyDir": {}} in made["spec"]["volumes"]


def test_the_copy_of_the_agent_asks_for_no_more_than_training() -> None:
    own = {"name": "trainer", "resources": {"requests": {"memory": "32Gi"}, "claims": [{"name": "gpu"}]}}
    asked = {"image": "torch:1", "resources": {"cpu": 4, "memory": "64Gi", "gpu": 2}, "template": {"spec": {"containers": [own]}}}
    (copier,) = template(rendered("indexed-job", **asked))["spec"]["initContainers"]
    assert copier["resources"] == {"requests": {"cpu": "4", "memory": "32Gi"}, "limits": {"memory": "64Gi"}}


# The command

Outlast = Callable[..., tuple[int, str, str]]


@pytest.fixture
def job_file(tmp_path: Path) -> Path:
    (tmp_path / "requirements.txt").write_text("einops==0.8\n")
    path = tmp_path / "job.yaml"
    path.write_text("""\
apiVersion: outlast.dev/v1alpha1
kind: ElasticJob
metadata: {name: job}
spec:
  image: example.com/image:1
  module: outlast.recipes.smoke
  args: [--lr, 3e-3, --answer=y]
  output: s3://bucket/runs
  env: {AWS_PROFILE: team}
  workers: {replicas: 2, min: 1}
""")
    return path


def test_render_writes_documents_and_nothing_else(outlast: Outlast, job_file: Path) -> None:
    words = ("render", job_file, "--as", "indexed-job", "-n", "team-a", "--name", "other")
    code, out, err = outlast(*words)
    assert (code, err) == (0, "")
    documents = list(yaml.safe_load_all(out))
    assert [document["kind"] for document in documents] == ["ConfigMap", "Service", "Job"]
    assert {document["metadata"]["namespace"] for document in documents} == {"team-a"}
    assert documents[-1]["metadata"]["name"].startswith("other-")
    assert json.loads(outlast(*words, "-o", "json")[1]) == {"apiVersion": "v1", "kind": "List", "items": documents}
    (document,) = yaml.safe_load_all(outlast("render", job_file)[1])
    assert (document["apiVersion"], document["kind"]) == ("outlast.dev/v1alpha1", "ElasticJob")


def test_a_variable_names_the_image_from_which_pods_copy_outlast(
    outlast: Outlast, job_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OUTLAST_OPERATOR_IMAGE", "example.com/operator:7")
    made = list(yaml.safe_load_all(outlast("render", job_file, "--as", "indexed-job")[1]))
    assert [each["image"] for each in template(made)["spec"]["initContainers"]] == ["example.com/operator:7"]


def test_render_takes_along_the_files_that_pods_need(outlast: Outlast, job_file: Path) -> None:
    _, out, _ = outlast("render", job_file, "--as", "job", "--set", "environment.requirements=requirements.txt")
    config = next(iter(yaml.safe_load_all(out)))
    assert config["data"]["requirements.txt"] == "einops==0.8\n"
    code, out, err = outlast("render", job_file, "--as", "job", "--set", "environment.requirements=absent.txt")
    assert (code, out) == (2, "")
    assert err == f"Error: {job_file.parent / 'absent.txt'} cannot be read: No such file or directory; correct the path\n"


def test_render_says_what_is_wrong_and_prints_nothing(outlast: Outlast, job_file: Path) -> None:
    code, out, err = outlast("render", job_file, "--as", "job", "--set", "workers={replicas: 2}")
    assert (code, out) == (2, "")
    assert err == f"{job_file}: workers.min (2) is more than the one pod of this topology; render it as indexed-job\n"
    assert outlast("render", job_file, "--as", "pod")[0] == 2
    code, _, err = outlast("render", job_file, "-n", "Team A")
    assert (code, err) == (2, "Error: --namespace Team A: must be at most 63 lower-case letters, digits and dashes\n")


@pytest.mark.parametrize(
    ("fields", "places"),
    [
        ({"output": "s3://b/runs", "data": [{"from": "s3://d/x"}], "env": {"AWS_REGION": "eu"}}, "s3://b/runs, s3://d/x"),
        ({"output": "s3://b/runs", "secrets": [{"name": "s3"}]}, ""),
        ({"output": "s3://b/runs", "env": {"AWS_PROFILE": "team"}}, ""),
        ({"output": "s3://b/runs", "template": {"spec": {"serviceAccountName": "reads-s3"}}}, ""),
        ({"output": "gs://b/runs"}, ""),
        ({"output": "/out"}, ""),
    ],
)
def test_pods_that_are_given_no_credentials_for_s3_are_told_once(fields: dict[str, Any], places: str) -> None:
    job = a_job(**fields)
    said = [each for each in manifests.warnings(job, "elasticjob") if "credentials" in each]
    sentence = (
        f"pods are given no credentials for {places}: env, secrets and serviceAccountName are empty; "
        "unless the role of their nodes may use it: kubectl create secret generic s3 --from-literal=AWS_ACCESS_KEY_ID=... "
        "--from-literal=AWS_SECRET_ACCESS_KEY=..., and secrets: [{name: s3}] in the job file"
    )
    assert said == ([sentence] if places else [])


def test_render_warns_of_what_is_lost_and_of_what_has_no_meaning(outlast: Outlast, job_file: Path) -> None:
    _, out, err = outlast("render", job_file, "--as", "statefulset", "--set", "output=/tmp/x", "--set", "activeDeadlineSeconds=9")
    assert err.splitlines() == [
        "outlast | job: output is neither in a store nor on a volume at /out; what pods save ends with them; give output: "
        "s3://bucket/runs, or volumes: [{claim: NAME, to: /out}]",
        "outlast | job: activeDeadlineSeconds has no meaning in the topology statefulset",
    ]
    assert out.startswith("apiVersion: v1\n")


def test_what_kubectl_would_take_for_a_number_is_in_quotes() -> None:
    texts = ["5e-5", "1e3", "0x1F", "0o17", "1_000", ".5", "2024-01-01", "y", "N", "12:30", "yes", "null", "~", "true", "1.0"]
    for text in texts:
        assert render_command.text([{"a": text}]) in (f"a: '{text}'\n", f'a: "{text}"\n')
    assert render_command.text([{"a": "16Gi", "b": "word"}]) == "a: 16Gi\nb: word\n"
    assert render_command.text([{"a": "one\ntwo\n"}]) == "a: |\n  one\n  two\n"


EXAMPLES = [path for path in sorted((ROOT / "examples").glob("*.yaml")) if spec.load(path).spec.image]


@pytest.mark.parametrize("file", EXAMPLES, ids=lambda file: file.stem)
@every_topology
def test_an_example_for_kubernetes_renders(file: Path, topology: str) -> None:
    job = spec.load(file)
    files = dict.fromkeys(manifests.volumes.files(job.spec), "")
    for document in manifests.render(job, topology, files=files):
        if known(document):
            schemas.validate(document, MINORS[-1], strict=True)


def test_no_workers_suspend_a_job() -> None:
    job = a_job(workers={"replicas": 0, "min": 2, "max": 4})
    (applied,) = manifests.render(job)
    assert applied["spec"]["workers"]["replicas"] == 0
    indexed = kind(manifests.render(job, "indexed-job"), "Job")["spec"]
    assert (indexed["suspend"], indexed["completions"], indexed["parallelism"]) == (True, 2, 2)
    assert kind(rendered(workers={"replicas": 0}), "Job")["spec"]["suspend"] is True
    assert kind(manifests.render(job, "statefulset"), "StatefulSet")["spec"]["replicas"] == 0
    assert kind(rendered("statefulset", suspend=True), "StatefulSet")["spec"]["replicas"] == 0
