"""Fleets: cluster.yaml, the order of capacity, and what is rendered for eksctl, Kubernetes, Karpenter and Helm."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from kubernetes_validate import utils as schemas

from outlast import cli, fleet
from outlast.errors import InvalidJob, OutlastError
from outlast.fleet import autoscaler, capacity, devices, eksctl, karpenter, machines, prices
from outlast.fleet.model import Cluster, NodeGroup, NodePool
from outlast.manifests import nodewatch

ROOT = Path(__file__).parents[1]
FILES = sorted((ROOT / "examples" / "fleets").glob("*.yaml"))
PUBLISHED = ROOT / "tests" / "published"
NEWEST = max(schemas.all_versions(), key=lambda version: [int(part) for part in version.split(".")])
Document = dict[str, Any]

CLUSTERS = {f"examples/{file.stem}": fleet.load(file) for file in FILES} | {
    f"preset {name}": fleet.preset(name) for name in fleet.PRESETS
}
every_cluster = pytest.mark.parametrize("cluster", CLUSTERS.values(), ids=CLUSTERS)
every_example = pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)

HEAD = "name: c\nregion: us-west-2\n"
GROUP = "nodeGroups: [{name: a, instanceTypes: [m5.xlarge], min: 1, max: 2}]"


def a_cluster(more: str = GROUP) -> Cluster:
    return fleet.parse(f"name: c\nregion: us-west-2\n{more}\n")


def mistakes(text: str) -> list[str]:
    with pytest.raises(InvalidJob) as raised:
        fleet.parse(text)
    return str(raised.value).splitlines()


# ------------------------------------------------------------------------------------------------------------------- the file


def test_there_are_ten_example_fleets_of_all_kinds() -> None:
    clusters = [fleet.load(file) for file in FILES]
    assert len(clusters) >= 10
    shapes = [cluster.shape(nodes) for cluster in clusters for nodes in cluster.nodes]
    assert {each.accelerator for each in shapes} == {"", machines.NVIDIA, machines.NEURON}
    assert {each.arch for each in shapes} == {"amd64", "arm64"}
    assert {bool(cluster.addons.karpenter) for cluster in clusters} == {True, False}
    assert any(nodes.efa for cluster in clusters for nodes in cluster.nodes)


@every_example
def test_an_example_is_named_like_its_file_and_its_command_prints_a_plan(
    file: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert fleet.load(file).name == file.stem
    (command,) = re.findall(r"^#   outlast (cluster plan .+)$", file.read_text(), flags=re.M)
    assert f"examples/fleets/{file.name}" in command
    monkeypatch.chdir(ROOT)
    assert outlast(capsys, *command.split())[:2] == (0, "")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "cluster.yaml: the file is empty; a cluster file starts with `name: my-cluster`"),
        (f"region: us-west-2\n{GROUP}", "cluster.yaml:1: name is missing; add it"),
        (f"name: c\nregion: mars\n{GROUP}", "cluster.yaml:2: region (mars) must be a region of AWS, e.g. us-west-2"),
        (f"{HEAD}version: 2\n{GROUP}", "cluster.yaml:3: version (2) must be a minor version of Kubernetes"),
        ("name: c\nregion: us-west-2", "cluster.yaml:1: there are no nodes; give nodeGroups, nodePools, or both"),
        (f"{HEAD}zones: [us-west-2a]\n{GROUP}", "cluster.yaml:3: zones (us-west-2a) is one; EKS needs"),
        (
            f"{HEAD}zones: [us-west-2a, us-east-1a]\n{GROUP}",
            "cluster.yaml:3: zones[1] (us-east-1a) is not in region us-west-2",
        ),
        (
            HEAD + "nodeGroups:\n- name: a\n  instanceTypes: [p3.2xlarge, p3.8xlarge]\n  max: 2",
            "cluster.yaml:5: a: instanceTypes have several shapes (p3.2xlarge has 8 vCPUs, 61 GiB, 1 nvidia.com/gpu, amd64; "
            "p3.8xlarge has 32 vCPUs, 244 GiB, 4 nvidia.com/gpu, amd64), and autoscalers plan with one; make a group of each",
        ),
        (
            HEAD + "nodeGroups:\n- name: a\n  instanceTypes: [p3.4xlarge]\n  max: 2",
            "cluster.yaml:5: a: p3.4xlarge is not known; correct it, or describe it: machines: {p3.4xlarge:",
        ),
        (
            HEAD + "nodeGroups:\n- {name: a, instanceTypes: [m5.large], max: 2, min: 3}",
            "cluster.yaml:4: a: min (3) is above max (2); swap them or raise max",
        ),
        (
            HEAD + "nodeGroups:\n- {name: a, instanceTypes: [m5.large], max: 2, desired: 3}",
            "cluster.yaml:4: a: desired (3) must be from min (0) to max (2)",
        ),
        (
            HEAD + "nodeGroups:\n- {name: a, instanceTypes: [m5.large], max: 2, efa: true, zones: [us-west-2a]}",
            "cluster.yaml:4: a: efa is true, but m5.large has none",
        ),
        (
            HEAD + "nodeGroups:\n- {name: a, instanceTypes: [p4d.24xlarge], max: 2, efa: true}",
            "cluster.yaml:4: a: efa needs one zone, since EFA does not cross zones",
        ),
        (
            HEAD + "nodeGroups:\n- {name: a, instanceTypes: [m5.large], max: 2, instanceType: x, spot: true}",
            "cluster.yaml:4: nodeGroups[0].spot is unknown; write capacity: spot",
        ),
        (
            HEAD + "nodePools:\n- {name: a, instanceTypes: [m5.large], max: 2}",
            "cluster.yaml:3: nodePools need Karpenter; add addons: {karpenter: true}, or write nodeGroups",
        ),
        (
            HEAD + "nodePools:\n- {name: a, instanceTypes: [m5.large], max: 2}\naddons:\n  karpenter: true",
            "cluster.yaml:6: Karpenter runs on a node that it did not make",
        ),
        (
            f"{HEAD}{GROUP}\naddons:\n  autoscaler: true\n  karpenter: true",
            "cluster.yaml:6: addons.autoscaler and addons.karpenter are both on",
        ),
        (
            f"{HEAD}{GROUP}\naddons:\n  outlast: {{etcd: true}}",
            "cluster.yaml:5: addons.outlast.etcd needs volumes; add ebs: true",
        ),
        (
            f"{HEAD}{GROUP}\noidc: false\ns3:\n- by: irsa",
            "cluster.yaml:6: s3.by is irsa, which needs an OIDC provider",
        ),
        (
            f"{HEAD}{GROUP}\naddons: {{volcano: {{queues: [{{name: q, capability: {{cpu: many}}}}]}}}}",
            "cluster.yaml:4: capability.cpu (many) is not a quantity",
        ),
        (
            f"{HEAD}{GROUP}\nmachines:\n  x9.large: {{cpus: 2, memori: 8Gi}}",
            "cluster.yaml:5: machines.x9.large.memori is unknown; did you mean machines.x9.large.memory?",
        ),
        (
            HEAD + "nodeGroups:\n- {name: a, instanceTypes: [m5.large], max: 2, labels: {karpenter.sh/x: y}}",
            "labels.karpenter.sh/x is set by Kubernetes or Karpenter itself; use a domain of your own",
        ),
    ],
)
def test_a_mistake_is_a_sentence_with_its_line(text: str, said: str) -> None:
    found = mistakes(text)
    assert any(said in each for each in found), found


def test_two_groups_of_one_name_are_refused_and_all_mistakes_are_listed() -> None:
    text = """\
name: c
region: us-west-2
nodeGroups:
- {name: a, instanceTypes: [m5.large], max: 2}
- {name: a, instanceTypes: [m5.large], max: 0}
"""
    assert mistakes(text) == ["cluster.yaml:5: nodeGroups[1].max (0) must be at least 1"]
    assert mistakes(text.replace("max: 0", "max: 1")) == [
        "cluster.yaml:5: nodeGroups[1].name is a, as nodeGroups[0].name is; name one of them otherwise"
    ]


def test_versions_and_labels_stay_as_written() -> None:
    labelled = "nodeGroups: [{name: a, instanceTypes: [m5.large], max: 2, labels: {on: yes, n: 1}}]"
    cluster = a_cluster(f"version: 1.30\n{labelled}\naddons: {{kueue: 0.13.4, efs: {{version: 1.10}}}}")
    assert cluster.version == "1.30"
    assert cluster.node_groups[0].labels == {"on": "yes", "n": "1"}
    assert [each and each.version for each in (cluster.addons.kueue, cluster.addons.efs)] == ["0.13.4", "1.10"]


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("c5.4xlarge", (16, 32, "amd64", "", 0)),
        ("r7g.large", (2, 16, "arm64", "", 0)),
        ("c5n.18xlarge", (72, 192, "amd64", "", 0)),
        ("trn1.32xlarge", (128, 512, "amd64", machines.NEURON, 16)),
        ("g5g.16xlarge", (64, 128, "arm64", machines.NVIDIA, 2)),
    ],
)
def test_machines_have_the_shape_that_ec2_lists(name: str, shape: tuple[int, float, str, str, int]) -> None:
    found = machines.machine(name)
    assert found
    assert found.shape == shape


@pytest.mark.parametrize("name", ["c5n.xlarge", "t3.large", "m5.metal", "m7i-flex.large", "nonsense"])
def test_a_machine_that_follows_no_rule_is_not_guessed(name: str) -> None:
    assert machines.machine(name) is None


# ------------------------------------------------------------------------------------------------------------------ the order


def supplied(cluster: Cluster) -> tuple[Cluster, Cluster]:
    """The same capacity as node groups and as NodePools."""
    common = ("name", "instance_types", "capacity", "max", "priority", "zones", "labels", "taints")
    growing = cluster.node_pools if cluster.addons.karpenter else cluster.node_groups
    fields = [{name: getattr(nodes, name) for name in common} for nodes in growing]
    home = NodeGroup(name="home-of-karpenter", instance_types=("m5.large",), min=1, max=1)
    shared = {"name": cluster.name, "region": cluster.region, "zones": cluster.zones, "machines": cluster.machines}
    groups = Cluster(**shared, node_groups=tuple(NodeGroup(**each) for each in fields), addons={"autoscaler": True})
    pools = Cluster(
        **shared, node_groups=(home,), node_pools=tuple(NodePool(**each) for each in fields), addons={"karpenter": True}
    )
    return groups, pools


def expander_order(cluster: Cluster, names: list[str]) -> list[set[str]]:
    """What the priority expander prefers, by its ConfigMap, from the names that AWS gives."""
    priorities = yaml.safe_load(autoscaler.expander(cluster)["data"]["priorities"])
    groups = {asg(cluster, group): group.name for group in cluster.node_groups}
    return [
        {groups[found] for pattern in priorities[number] for found in groups if re.search(pattern, found)}
        for number in sorted(priorities, reverse=True)
    ]


def karpenter_order(cluster: Cluster) -> list[set[str]]:
    """What Karpenter prefers, by the weights of the NodePools."""
    pools = [each for each in karpenter.documents(cluster, {}) if each["kind"] == "NodePool"]
    weights = {pool["metadata"]["name"]: pool["spec"]["weight"] for pool in pools}
    return [{name for name in weights if weights[name] == each} for each in sorted(set(weights.values()), reverse=True)]


def asg(cluster: Cluster, group: NodeGroup) -> str:
    """A name as EKS and CloudFormation give it."""
    if group.managed:
        return f"eks-{group.name}-5cc4e1b5-8a5b-a5f7-9b1d-0f5b1c1d2e3f"
    return f"eksctl-{cluster.name}-nodegroup-{group.name}-NodeGroup-1EC86FRMZ7V6N"


@every_cluster
def test_expander_and_node_pools_take_capacity_in_the_same_order(cluster: Cluster) -> None:
    groups, pools = supplied(cluster)
    wanted = capacity.order(cluster)
    tiers = [{each.name for each in wanted if each.priority == number} for number in dict.fromkeys(e.priority for e in wanted)]
    assert expander_order(groups, [each.name for each in wanted]) == tiers
    assert karpenter_order(pools) == tiers
    caps = {each.name: each.most for each in wanted}
    rendered = eksctl.config(groups)["managedNodeGroups"]
    assert {each["name"]: each["maxSize"] for each in rendered} == caps
    documents = [each for each in karpenter.documents(pools, {}) if each["kind"] == "NodePool"]
    assert {each["metadata"]["name"]: int(each["spec"]["limits"]["nodes"]) for each in documents} == caps
    cpus = {
        name: most * groups.shape(node).cpus for node in groups.node_groups for name, most in caps.items() if name == node.name
    }
    assert {each["metadata"]["name"]: int(each["spec"]["limits"]["cpu"]) for each in documents} == cpus


def test_spot_comes_first_up_to_its_cap_then_on_demand() -> None:
    order = capacity.order(fleet.preset("spot"))
    assert [(each.name, each.priority, each.most) for each in order if each.device] == [("p3spot", 60, 7), ("p3od", 20, 3)]
    assert capacity.sentences(order)[1] == "nvidia.com/gpu: p3spot (spot, at most 7), then p3od (on-demand, at most 3)"


def test_a_priority_of_your_own_changes_the_order() -> None:
    order = capacity.order(fleet.load(ROOT / "examples" / "fleets" / "on-demand-first.yaml"))
    assert [each.name for each in order] == ["reserved", "spot", "last", "system"]


def test_the_pattern_of_a_group_matches_no_other_group() -> None:
    names = ["p3", "p3spot", "p3-spot", "spot", "a-p3"]
    groups = [NodeGroup(name=name, instance_types=("m5.large",), max=1, managed=own) for name in names for own in (True, False)]
    cluster = a_cluster()
    for group in groups:
        matched = [
            (each.name, each.managed)
            for each in groups
            if re.search(autoscaler.asg_pattern(cluster.name, group), asg(cluster, each))
        ]
        assert matched == [(group.name, group.managed)]


# --------------------------------------------------------------------------------------------------------- what is rendered


@functools.cache
def eksctl_schema() -> jsonschema.Draft7Validator:
    return jsonschema.Draft7Validator(json.loads((PUBLISHED / "eksctl.json").read_text()))


@functools.cache
def karpenter_schema(kind: str) -> jsonschema.Draft7Validator:
    """The schema of a kind, without unknown fields, which an API server would drop."""
    for file in PUBLISHED.glob("*.yaml"):
        definition = yaml.load(file.read_text(), getattr(yaml, "CSafeLoader", yaml.SafeLoader))
        if definition["spec"]["names"]["kind"] == kind:
            return jsonschema.Draft7Validator(closed(definition["spec"]["versions"][0]["schema"]["openAPIV3Schema"]))
    raise LookupError(kind)


def closed(schema: Document) -> Document:
    if "properties" in schema and "additionalProperties" not in schema:
        schema["additionalProperties"] = bool(schema.get("x-kubernetes-preserve-unknown-fields"))
        schema["properties"] = {name: closed(each) for name, each in schema["properties"].items()}
    if "items" in schema:
        schema["items"] = closed(schema["items"])
    return schema


def broken_rules(schema: Document, value: Any) -> Iterator[str]:
    """The rules (CEL) of a schema that a value breaks, besides those about changes."""
    for rule in schema.get("x-kubernetes-validations", ()):
        if "oldSelf" not in rule["rule"] and not holds(rule["rule"])(value):
            yield rule["message"]
    if isinstance(value, dict):
        for name, each in value.items():
            part = schema.get("properties", {}).get(name) or schema.get("additionalProperties")
            yield from broken_rules(part, each) if isinstance(part, dict) else ()
    if isinstance(value, list):
        for each in value:
            yield from broken_rules(schema["items"], each)


@functools.cache
def holds(rule: str) -> Callable[[Any], bool]:
    import celpy
    from celpy import celtypes

    def find(text: str, pattern: str) -> celtypes.StringType:
        found = re.search(pattern, text)
        return celtypes.StringType(found[0] if found else "")

    def split(text: str, by: str) -> celtypes.ListType:
        return celtypes.ListType([celtypes.StringType(each) for each in text.split(by)])

    environment = celpy.Environment()
    program = environment.program(environment.compile(rule), functions={"find": find, "split": split})
    return lambda value: bool(program.evaluate({"self": celpy.json_to_cel(value)}))


@every_cluster
def test_eksctl_takes_the_cluster(cluster: Cluster) -> None:
    config = eksctl.config(cluster)
    assert [f"{error.json_path}: {error.message}" for error in eksctl_schema().iter_errors(config)] == []
    assert config["metadata"]["tags"] == {"outlast:made-by": "outlast", "outlast:cluster": cluster.name}
    for group in [*config.get("managedNodeGroups", ()), *config.get("nodeGroups", ())]:
        assert not group["efaEnabled"] or len(group["availabilityZones"]) == 1


@every_cluster
def test_kubernetes_and_karpenter_take_the_manifests(cluster: Cluster) -> None:
    for name, documents in fleet.plan(cluster).files.items():
        for document in documents if name.startswith("manifests/") else ():
            if "karpenter" in document["apiVersion"]:
                assert [error.message for error in karpenter_schema(document["kind"]).iter_errors(document)] == []
            elif "volcano" not in document["apiVersion"]:
                schemas.validate(document, NEWEST, strict=True)
            assert document["metadata"]["labels"]["app.kubernetes.io/managed-by"] == "outlast"


@pytest.mark.slow
@every_cluster
def test_the_rules_of_karpenter_hold(cluster: Cluster) -> None:
    for document in fleet.plan(cluster).files.get("manifests/node-pools.yaml", ()):
        assert list(broken_rules(karpenter_schema(document["kind"]).schema, document)) == []


@pytest.mark.slow
def test_the_rules_of_karpenter_are_really_asked() -> None:
    cluster = fleet.load(ROOT / "examples" / "fleets" / "gpu-karpenter.yaml")
    node_class, pool, *_ = karpenter.documents(cluster, {"karpenter.sh/nodepool": "x"})
    assert len(list(broken_rules(karpenter_schema("EC2NodeClass").schema, node_class))) == 1
    pool["spec"]["template"]["spec"]["requirements"][0]["values"] = []
    assert len(list(broken_rules(karpenter_schema("NodePool").schema, pool))) == 1


def test_the_workshops_cluster_is_as_in_the_workshop() -> None:
    config = eksctl.config(fleet.preset("workshop"))
    (group,) = config["managedNodeGroups"]
    assert config["metadata"]["name"], config["metadata"]["region"] == ("do-eks", "us-west-2")
    assert config["availabilityZones"] == ["us-west-2a", "us-west-2b"]
    assert config["iam"] == {"withOIDC": True}
    assert {name: value for name, value in group.items() if name not in ("tags", "volumeType")} == {
        "name": "wks-node",
        "instanceType": "c5.4xlarge",
        "instancePrefix": "workshop",
        "privateNetworking": True,
        "availabilityZones": ["us-west-2a", "us-west-2b"],
        "efaEnabled": False,
        "minSize": 0,
        "desiredCapacity": 2,
        "maxSize": 10,
        "volumeSize": 900,
        "iam": {"withAddonPolicies": {"cloudWatch": True, "autoScaler": True, "ebs": True}},
    }


def test_the_other_presets_have_the_machines_of_their_documents() -> None:
    torchelastic = fleet.preset("torchelastic")
    (group,) = eksctl.config(torchelastic)["managedNodeGroups"]
    assert (torchelastic.name, group["instanceType"], group["desiredCapacity"]) == ("torchelastic", "p3.2xlarge", 2)
    assert group["ssh"] == {"allow": True, "publicKeyPath": "~/.ssh/id_rsa.pub"}
    (rights,) = eksctl.config(torchelastic)["iam"]["podIdentityAssociations"]
    assert rights["permissionPolicyARNs"] == ["arn:aws:iam::aws:policy/AmazonS3ReadOnlyAccess"]
    spot = eksctl.config(fleet.preset("spot"))
    assert spot["metadata"]["name"] == "ai-us-west-2"
    p3spot = next(each for each in spot["nodeGroups"] if each["name"] == "p3spot")
    assert p3spot["instancesDistribution"] == {
        "instanceTypes": ["p3.2xlarge"],
        "onDemandBaseCapacity": 0,
        "onDemandPercentageAboveBaseCapacity": 0,
        "spotAllocationStrategy": "capacity-optimized",
    }
    assert p3spot["labels"] == {
        "lifecycle": "Ec2Spot",
        "project": "zip",
        "aws.amazon.com/spot": "true",
        "computetype": "gpu",
    }
    assert p3spot["taints"] == [{"key": "spotInstance", "value": "true", "effect": "PreferNoSchedule"}]


def test_the_autoscaler_knows_the_nodes_of_a_group_that_has_none() -> None:
    cluster = fleet.load(ROOT / "examples" / "fleets" / "trainium-efa.yaml")
    group = next(each for each in eksctl.config(cluster)["managedNodeGroups"] if each["name"] == "trn1-32")
    template = "k8s.io/cluster-autoscaler/node-template"
    assert {name: value for name, value in group["tags"].items() if "autoscaler" in name} == {
        "k8s.io/cluster-autoscaler/enabled": "true",
        "k8s.io/cluster-autoscaler/trainium-efa": "owned",
        f"{template}/taint/aws.amazon.com/neuron": ":NoSchedule",
        f"{template}/resources/aws.amazon.com/neuron": "16",
        f"{template}/resources/vpc.amazonaws.com/efa": "8",
    }
    assert group["propagateASGTags"] is True


def test_a_device_plugin_runs_on_the_machines_that_have_such_devices() -> None:
    cluster = fleet.load(ROOT / "examples" / "fleets" / "mixed-accelerators.yaml")
    found = {plugin.name: types for plugin, types in devices.needed(cluster)}
    assert found == {
        "nvidia-device-plugin": ["g5.12xlarge", "g6.12xlarge"],
        "neuron-device-plugin": ["trn1.32xlarge", "trn1n.32xlarge"],
    }
    files = fleet.plan(cluster).files
    for name, types in found.items():
        pod = files[f"manifests/{name}.yaml"][-1]["spec"]["template"]["spec"]
        (term,) = pod["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]["nodeSelectorTerms"]
        assert term == {"matchExpressions": [{"key": "node.kubernetes.io/instance-type", "operator": "In", "values": types}]}


def test_a_switched_off_plugin_is_not_installed_and_that_of_efa_is_eksctls_for_groups() -> None:
    off = "nodeGroups: [{name: a, instanceTypes: [g5.xlarge], max: 1}]\naddons: {nvidia: false}"
    assert devices.needed(a_cluster(off)) == []
    for name, wanted in (("a100-efa", ["nvidia"]), ("h100-efa", ["nvidia", "efa"])):
        cluster = fleet.load(ROOT / "examples" / "fleets" / f"{name}.yaml")
        assert [plugin.field for plugin, _ in devices.needed(cluster)] == wanted


def test_karpenters_nodes_have_the_role_of_the_group_it_runs_on() -> None:
    cluster = fleet.preset("accelerators")
    (group,) = eksctl.config(cluster)["managedNodeGroups"]
    (rights,) = eksctl.config(cluster)["iam"]["podIdentityAssociations"]
    classes = [each for each in karpenter.documents(cluster, {}) if each["kind"] == "EC2NodeClass"]
    assert {each["spec"]["role"] for each in classes} == {group["iam"]["instanceRoleName"]} == {"outlast-accelerators-node"}
    passed = [each for each in rights["permissionPolicy"]["Statement"] if each["Action"] == ["iam:PassRole"]]
    assert [each["Resource"] for each in passed] == [["arn:*:iam::*:role/outlast-accelerators-node"]]


def test_karpenter_may_change_only_what_carries_the_clusters_tag() -> None:
    for statement in karpenter.policy(fleet.preset("accelerators"))["Statement"]:
        reading = all(re.search(":(Describe|Get|List)", action) for action in statement["Action"])
        condition = statement.get("Condition", {}).get("StringEquals", {})
        tagged = any(re.fullmatch("aws:Re(quest|source)Tag/kubernetes.io/cluster/accelerators", name) for name in condition)
        launched_from = not any("instance/" in each or "launch-template/" in each for each in statement["Resource"])
        assert reading or tagged or "iam:PassedToService" in condition or launched_from, statement


def test_rights_on_buckets_name_the_buckets() -> None:
    cluster = a_cluster(f"{GROUP}\ns3: [{{read: [data, both], write: [both]}}]")
    (rights,) = eksctl.config(cluster)["iam"]["podIdentityAssociations"]
    listing, reading, writing = rights["permissionPolicy"]["Statement"]
    assert listing["Resource"] == ["arn:aws:s3:::both", "arn:aws:s3:::data"]
    assert (reading["Resource"], "s3:PutObject" in reading["Action"]) == (["arn:aws:s3:::data/*"], False)
    assert (writing["Resource"], "s3:PutObject" in writing["Action"]) == (["arn:aws:s3:::both/*"], True)


def test_nodes_are_watched_where_there_is_spot_capacity_and_the_queue_is_the_watchers_only_right() -> None:
    assert [fleet.preset(name).watched for name in fleet.PRESETS] == [False, False, True, True]
    url = "https://sqs.us-west-2.amazonaws.com/123456789012/interruptions"
    cluster = a_cluster(f"{GROUP}\naddons: {{outlast: {{nodeWatchQueue: '{url}'}}}}")
    assert fleet.plan(cluster).steps[-1].command[-3:] == ("--node-watch", "--node-watch-queue", url)

    (rights,) = eksctl.config(cluster)["iam"]["podIdentityAssociations"]
    assert (rights["namespace"], rights["serviceAccountName"]) == (nodewatch.NAME, nodewatch.NAME)
    (statement,) = rights["permissionPolicy"]["Statement"]
    assert (statement["Action"], statement["Resource"]) == (
        ["sqs:SendMessage"],
        ["arn:aws:sqs:us-west-2:123456789012:interruptions"],
    )


def test_the_operator_is_pinned_to_on_demand_machines_where_there_are_both_kinds() -> None:
    pinned = {name for name in fleet.PRESETS if "--on-demand" in fleet.plan(fleet.preset(name)).steps[-1].command}
    assert pinned == {
        name for name in fleet.PRESETS if {each.capacity for each in fleet.preset(name).nodes} == {"spot", "on-demand"}
    }
    assert "spot" in pinned
    assert "workshop" not in pinned


def test_queues_are_as_written() -> None:
    files = fleet.plan(fleet.load(ROOT / "examples" / "fleets" / "a100-efa.yaml")).files
    research, student = files["manifests/queues.yaml"]
    assert (research["apiVersion"], research["kind"]) == ("scheduling.volcano.sh/v1beta1", "Queue")
    assert research["spec"] == {"weight": 3, "reclaimable": False, "capability": {"cpu": "192", "nvidia.com/gpu": "16"}}
    assert student["spec"] == {"weight": 1, "reclaimable": True}


# ------------------------------------------------------------------------------------------------------------------- the plan


@every_cluster
def test_a_plan_names_each_step_once_and_has_the_files_of_its_commands(cluster: Cluster) -> None:
    plan = fleet.plan(cluster)
    assert len({step.key for step in plan.steps}) == len(plan.steps)
    assert {file for step in plan.steps for file in step.files} == set(plan.files)
    assert all(step.command[0] == step.kind for step in plan.steps)
    assert all(file in step.command for step in plan.steps for file in step.files)
    assert all(step.repeatable or step.check for step in plan.steps), "it could neither be repeated nor known to be done"
    assert fleet.plan(cluster) == plan


def done(step: fleet.Step, output: str) -> bool:
    """Whether a step counts as done after its question was answered with this, and exit 0."""
    assert step.check
    return all(re.search(pattern, output, re.DOTALL) for pattern in step.check.expects)


def test_what_the_tools_answer_says_whether_a_step_is_done() -> None:
    steps = {step.key: step for step in fleet.plan(fleet.preset("spot")).steps}
    assert done(steps["cluster"], '[\n {"Arn": "arn:...", "Name": "ai-us-west-2", "Status": "ACTIVE"}\n]')
    assert not done(steps["cluster"], '[{"Name": "ai-us-west-2", "Status": "CREATING"}]')
    assert done(steps["group/p3od"], '[{"StackName": "", "Name": "p3od", "Status": "CREATE_COMPLETE"}]')
    assert not done(steps["group/p3od"], '[{"Name": "p3od", "Status": "CREATE_FAILED"}]')
    names = [*eksctl.ALWAYS, "metrics-server", "amazon-cloudwatch-observability"]
    listed = [{"Name": name, "Version": "v1", "Status": "DEGRADED" if name == "coredns" else "ACTIVE"} for name in names]
    assert done(steps["addons"], json.dumps(listed))
    assert not done(steps["addons"], json.dumps(listed[:-1]))
    failed = [{**each, "Status": "CREATE_FAILED"} if each["Name"] == "metrics-server" else each for each in listed]
    assert not done(steps["addons"], json.dumps(failed))
    chart = steps["chart/cluster-autoscaler"]
    described = chart.command[chart.command.index("--description") + 1]
    assert done(chart, json.dumps([{"revision": 2, "status": "deployed", "description": described}]))
    assert not done(chart, json.dumps([{"revision": 2, "status": "deployed", "description": "Upgrade complete"}]))
    assert not done(chart, json.dumps([{"revision": 2, "status": "pending-upgrade", "description": described}]))


def test_changed_values_of_a_chart_are_not_done() -> None:
    before, after = (fleet.plan(fleet.preset("spot").model_copy(update={"version": each})) for each in ("1.33", "1.34"))
    (old,), (new,) = ([step for step in plan.steps if step.kind == "helm"] for plan in (before, after))
    assert old.key == new.key
    assert old.check != new.check


def test_the_cost_is_that_of_the_nodes_to_begin_with_and_of_the_most() -> None:
    listed = prices.parse("eks-cluster: {on-demand: 0.1}\nm5.xlarge: {on-demand: 0.2}\nm5.2xlarge: {spot: 1}\n")
    more = "- {name: b, instanceTypes: [m5.2xlarge], capacity: spot, max: 3}"
    group = "nodeGroups:\n- {name: a, instanceTypes: [m5.xlarge], min: 1, max: 2}\n"
    assert fleet.plan(a_cluster(group + more), listed).cost == fleet.Cost(pytest.approx(0.3), pytest.approx(3.5))
    unknown = fleet.plan(a_cluster(group + more.replace("m5.2xlarge", "m5a.2xlarge")), listed).cost
    assert unknown == fleet.Cost(None, None)
    assert fleet.plan(a_cluster(group)).cost is None


def test_the_example_of_prices_names_the_machines_of_the_presets() -> None:
    listed = prices.load(ROOT / "examples" / "prices" / "us-west-2.yaml")
    for name in fleet.PRESETS:
        cost = fleet.plan(fleet.preset(name), listed).cost
        assert cost, name
        assert None not in (cost.first, cost.most), name


def test_a_mistake_in_prices_is_a_sentence_with_its_line() -> None:
    with pytest.raises(InvalidJob, match=re.escape("prices.yaml:2: prices.b1.large.spot (-1) must be at least 0")):
        prices.parse("a1.large: {spot: 1}\nb1.large: {spot: -1}\n")


# ------------------------------------------------------------------------------------------------------------ the command line


def outlast(capsys: pytest.CaptureFixture[str], *args: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as ended:
        cli.main(list(args))
    printed = capsys.readouterr()
    return int(ended.value.code or 0), printed.err, printed.out


def test_a_plan_is_written_and_what_was_written_gives_the_same_plan(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, said, first = outlast(capsys, "cluster", "plan", "--preset", "spot", "--to", str(tmp_path), "-o", "json")
    assert code == 0
    assert "wrote 5 files" in said
    plan = json.loads(first)
    assert set(plan["files"]) | {"cluster.yaml"} == {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*.yaml")}
    for name, documents in plan["files"].items():
        assert list(yaml.safe_load_all((tmp_path / name).read_text())) == documents
    assert outlast(capsys, "cluster", "plan", str(tmp_path / "cluster.yaml"), "-o", "json")[2] == first
    assert yaml.safe_load(outlast(capsys, "cluster", "plan", "--preset", "spot", "-o", "yaml")[2]) == plan


def test_a_plan_says_what_it_does_and_what_it_costs(capsys: pytest.CaptureFixture[str]) -> None:
    listed = str(ROOT / "examples" / "prices" / "us-west-2.yaml")
    _, _, printed = outlast(capsys, "cluster", "plan", "--preset", "workshop", "--prices", listed)
    assert "nothing adds nodes for pending pods" in printed
    assert (
        "  3 $ make the node group wks-node: c5.4xlarge, on-demand, 2 to begin with, from 0 to 10: $1.36 an hour at first"
        in printed
    )
    assert "\n      eksctl create nodegroup -f eksctl.yaml --include=wks-node " in printed
    assert "in all: $1.46 an hour at first, at most $6.90 an hour, without disks, network and volumes" in printed


@pytest.mark.parametrize(
    ("args", "said"),
    [
        ([], "there is no cluster to plan; give a cluster.yaml, or --preset NAME"),
        (["--preset", "big"], "there is no preset big; known are workshop, torchelastic, spot, accelerators"),
        (["c.yaml", "--preset", "spot"], "c.yaml and --preset spot are both given; keep one"),
        (["nowhere.yaml"], "nowhere.yaml: there is no such file; give the path of a cluster.yaml, or --preset NAME"),
        (["--preset", "spot", "--prices", "/nowhere"], "/nowhere cannot be read: No such file or directory"),
        (["--preset", "spot", "--to", "/proc/nowhere"], "cannot be written"),
    ],
)
def test_a_wrong_command_is_a_sentence(args: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, err, _ = outlast(capsys, "cluster", "plan", *args)
    assert (code, said in err) == (2, True), err


def test_presets_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert [line.split()[0] for line in outlast(capsys, "cluster", "plan", "--preset", "list")[2].splitlines()] == list(
        fleet.PRESETS
    )
    with pytest.raises(OutlastError):
        fleet.preset("none")


def test_the_guide_shows_a_cluster_and_what_is_printed_of_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = (ROOT / "docs" / "guide" / "clusters.md").read_text()
    (shown,) = re.findall(r"```yaml\n(.*?)```", page, re.DOTALL)
    path = tmp_path / "cluster.yaml"
    path.write_text(shown)
    _, _, printed = outlast(capsys, "cluster", "plan", str(path))
    for block in re.findall(r"```\n((?:new nodes|  1 \$).*?)```", page, re.DOTALL):
        for line in block.splitlines():
            assert line == "  ..." or line in printed.splitlines()
    assert set(fleet.PRESETS) == set(re.findall(r"^\| `(\w+)` \|.*\|.*\|$", page.split("## The presets")[1], re.M))
