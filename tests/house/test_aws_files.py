"""`examples/aws`: files that eksctl, CloudFormation, kubectl and Helm apply, each checked by what its maker has published.

CloudFormation is moto, which knows neither FSx nor alarms, queue policies and EKS: of these cfn-lint alone is asked."""

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

ROOT = Path(__file__).parents[2]
AWS = ROOT / "examples" / "aws"
PUBLISHED = ROOT / "tests" / "shared" / "published"
NEWEST = max(schemas.all_versions(), key=lambda version: [int(part) for part in version.split(".")])
REGION = "us-west-2"
UNKNOWN = {
    "AWS::CloudWatch::Alarm", "AWS::EKS::AccessEntry", "AWS::EKS::PodIdentityAssociation", "AWS::SQS::QueuePolicy",
}  # fmt: skip
"""Types of resources that moto leaves out; a template with FSx it cannot deploy at all."""
Document = dict[str, Any]

CLUSTERS = {file.stem: yaml.safe_load(file.read_text()) for file in sorted(AWS.glob("*.yaml"))}
STACKS = sorted(file.stem for file in (AWS / "stacks").glob("*.yaml"))
MANIFESTS = sorted(file.stem for file in (AWS / "kubernetes").glob("*.yaml"))
every_cluster = pytest.mark.parametrize("config", CLUSTERS.values(), ids=CLUSTERS)


def groups(config: Document) -> list[Document]:
    return [*config.get("managedNodeGroups", ()), *config.get("nodeGroups", ())]


def types(group: Document) -> list[str]:
    """The instance types of a node group."""
    one = [group["instanceType"]] if "instanceType" in group else []
    return one or group.get("instanceTypes") or group["instancesDistribution"]["instanceTypes"]


def documents(name: str) -> list[Document]:
    return list(yaml.safe_load_all((AWS / "kubernetes" / f"{name}.yaml").read_text()))


# --------------------------------------------------------------------------------------------------------------------- eksctl


@every_cluster
def test_eksctl_takes_the_cluster(config: Document) -> None:
    schema = jsonschema.Draft7Validator(json.loads((PUBLISHED / "eksctl.json").read_text()))
    assert [f"{error.json_path}: {error.message}" for error in schema.iter_errors(config)] == []
    assert len(config["availabilityZones"]) == 2, "stacks/efs.yaml has a mount target in each of two zones"
    assert {"eks-pod-identity-agent", "aws-efs-csi-driver"} <= {each["name"] for each in config["addons"]}
    for group in groups(config):
        assert not group.get("efaEnabled") or len(group["availabilityZones"]) == 1, "EFA does not cross zones"
        assert "ssh" in group or group["privateNetworking"]


@pytest.mark.parametrize("name", ["spot", "accelerators"])
def test_the_autoscaler_knows_the_nodes_of_a_group_that_has_none(name: str) -> None:
    cluster, template = CLUSTERS[name]["metadata"]["name"], "k8s.io/cluster-autoscaler/node-template"
    for group in groups(CLUSTERS[name]):
        tags = group["tags"]
        assert (tags["k8s.io/cluster-autoscaler/enabled"], tags[f"k8s.io/cluster-autoscaler/{cluster}"]) == ("true", "owned")
        resources = {tag.removeprefix(f"{template}/resources/") for tag in tags if "/resources/" in tag}
        assert resources == devices(types(group)) | ({"vpc.amazonaws.com/efa"} if group.get("efaEnabled") else set())
        if not group.get("propagateASGTags") and not group["minSize"]:
            labels = {tag.removeprefix(f"{template}/label/") for tag in tags if "/label/" in tag}
            assert labels == {each for each in group["labels"] if not each.startswith("aws.amazon.com/")}


def devices(names: list[str]) -> set[str]:
    """The resources that machines of these types have besides CPUs."""
    kinds = {"p": "nvidia.com/gpu", "g": "nvidia.com/gpu", "trn": "aws.amazon.com/neuron"}
    return {kinds[found[0]] for name in names if (found := re.match(r"p(?=\d)|g(?=\d)|trn", name))}


@pytest.mark.parametrize("kind", ["nvidia", "neuron"])
def test_a_device_plugin_runs_on_all_machines_that_have_such_devices(kind: str) -> None:
    (plugin,) = [each for each in documents("device-plugins") if each["metadata"]["name"] == f"{kind}-device-plugin"
                 and each["kind"] == "DaemonSet"]  # fmt: skip
    affinity = plugin["spec"]["template"]["spec"]["affinity"]["nodeAffinity"]
    (term,) = affinity["requiredDuringSchedulingIgnoredDuringExecution"]["nodeSelectorTerms"]
    (expression,) = term["matchExpressions"]
    assert (expression["key"], expression["operator"]) == ("node.kubernetes.io/instance-type", "In")
    used = {each for config in CLUSTERS.values() for group in groups(config) for each in types(group)}
    used |= {each for pool in pools() for each in required(pool, "node.kubernetes.io/instance-type")}
    assert {
        each for each in used if any(kind in name or (kind == "nvidia" and "gpu" in name) for name in devices([each]))
    } <= set(expression["values"])
    assert all(devices([each]) for each in expression["values"])


def yaml_of(path: str) -> Document:
    """A file of ours; CloudFormation's own tags become their values."""
    return yaml.load((AWS / path).read_text(), Tagless)


class Tagless(yaml.SafeLoader):
    """Reads `!Sub x` as x."""


def untagged(loader: Tagless, _: str, node: yaml.Node) -> Any:
    if isinstance(node, yaml.ScalarNode):
        return loader.construct_scalar(node)
    return loader.construct_sequence(node) if isinstance(node, yaml.SequenceNode) else loader.construct_mapping(node)


Tagless.add_multi_constructor("!", untagged)  # type: ignore[no-untyped-call]


# ------------------------------------------------------------------------------------------------------ Kubernetes, Karpenter


def pools() -> list[Document]:
    return [each for each in documents("node-pools") if each["kind"] == "NodePool"]


def required(pool: Document, key: str) -> list[str]:
    return [value for each in pool["spec"]["template"]["spec"]["requirements"] if each["key"] == key for value in each["values"]]


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


@pytest.mark.parametrize("name", MANIFESTS)
def test_kubernetes_and_karpenter_take_the_manifests(name: str) -> None:
    for document in documents(name):
        if "karpenter" in document["apiVersion"]:
            assert [error.message for error in karpenter_schema(document["kind"]).iter_errors(document)] == []
        elif "volcano" not in document["apiVersion"]:
            schemas.validate(document, NEWEST, strict=True)


def test_pools_can_always_be_deleted_and_never_move_a_training_pod() -> None:
    (profile,) = {each["spec"]["instanceProfile"] for each in documents("node-pools") if each["kind"] == "EC2NodeClass"}
    assert profile == f"karpenter-node-{CLUSTERS['karpenter']['metadata']['name']}"
    for pool in pools():
        spec, disruption = pool["spec"]["template"]["spec"], pool["spec"]["disruption"]
        assert (spec["terminationGracePeriod"], spec["expireAfter"]) == ("15m", "Never")
        assert (disruption["consolidationPolicy"], disruption["budgets"]) == (
            "WhenEmpty",
            [{"nodes": "0", "reasons": ["Drifted"]}],
        )
        spot = required(pool, "karpenter.sh/capacity-type") == ["spot"]
        assert pool["spec"]["weight"] == (60 if spot else 20)
        assert {each["key"] for each in spec.get("taints", ())} == devices(required(pool, "node.kubernetes.io/instance-type"))


def test_karpenter_may_change_only_what_carries_the_clusters_tag() -> None:
    stack = yaml_of("stacks/karpenter.yaml")["Resources"]["ControllerRole"]["Properties"]
    for statement in json.loads(stack["Policies"][0]["PolicyDocument"])["Statement"]:
        actions, resources = listed(statement["Action"]), listed(statement["Resource"])
        reading = all(re.search(":(Describe|Get|List)", action) for action in actions)
        condition = statement.get("Condition", {}).get("StringEquals", {})
        tagged = any(re.fullmatch(r"aws:Re(quest|source)Tag/kubernetes.io/cluster/\$\{Cluster\}", name) for name in condition)
        launched_from = not any("instance/" in each or "launch-template/" in each for each in resources)
        assert reading or tagged or "iam:PassedToService" in condition or launched_from, statement


def listed(value: Any) -> list[str]:
    return [value] if isinstance(value, str) else value


# ------------------------------------------------------------------------------------------------------------- CloudFormation


@pytest.mark.slow  # moto makes them in the next tests
def test_cfn_lint_has_nothing_to_say_of_the_stacks() -> None:
    from cfnlint.api import ManualArgs, lint

    config = ManualArgs(regions=[REGION])
    found = {name: [str(each) for each in lint((AWS / "stacks" / f"{name}.yaml").read_text(), config=config)] for name in STACKS}
    assert found == {name: [] for name in STACKS}
    wrong = (AWS / "stacks" / "efs.yaml").read_text().replace("Encrypted: true", "Encrypt: true")
    assert [each.rule.id for each in lint(wrong, config=config)] == ["E3002"]


def eksctls_stack() -> str:
    """What eksctl's stack of a cluster exports."""
    values = {
        "VPC": {"Ref": "Network"},
        "SubnetsPrivate": {"Fn::Join": [",", [{"Ref": "A"}, {"Ref": "B"}]]},
        "SharedNodeSecurityGroup": {"Fn::GetAtt": ["Shared", "GroupId"]},
        "ClusterSecurityGroupId": {"Fn::GetAtt": ["Nodes", "GroupId"]},
    }
    network = {"VpcId": {"Ref": "Network"}}
    subnets = {
        zone.upper(): {
            "Type": "AWS::EC2::Subnet",
            "Properties": {**network, "CidrBlock": f"192.168.{n}.0/24", "AvailabilityZone": f"{REGION}{zone}"},
        }
        for n, zone in enumerate("ab")
    }
    security = {
        name: {"Type": "AWS::EC2::SecurityGroup", "Properties": {**network, "GroupDescription": name}}
        for name in ("Shared", "Nodes")
    }
    return json.dumps(
        {
            "Resources": {
                "Network": {"Type": "AWS::EC2::VPC", "Properties": {"CidrBlock": "192.168.0.0/16"}},
                **subnets,
                **security,
            },
            "Outputs": {
                name: {"Value": value, "Export": {"Name": {"Fn::Sub": f"${{AWS::StackName}}::{name}"}}}
                for name, value in values.items()
            },
        }
    )


def left(client: Callable[[str], Any]) -> dict[str, list[str]]:
    """What is in the account, by kind."""
    ec2, efs, iam = client("ec2"), client("efs"), client("iam")
    return {
        "security groups": [each["GroupId"] for each in ec2.describe_security_groups()["SecurityGroups"]],
        "file systems": [each["FileSystemId"] for each in efs.describe_file_systems()["FileSystems"]],
        "access points": [each["AccessPointId"] for each in efs.describe_access_points()["AccessPoints"]],
        "queues": client("sqs").list_queues().get("QueueUrls", []),
        "rules": [each["Name"] for each in client("events").list_rules()["Rules"]],
        "repositories": [each["repositoryName"] for each in client("ecr").describe_repositories()["repositories"]],
        "log groups": [each["logGroupName"] for each in client("logs").describe_log_groups()["logGroups"]],
        "dashboards": [each["DashboardName"] for each in client("cloudwatch").list_dashboards()["DashboardEntries"]],
        "roles": [each["RoleName"] for each in iam.list_roles()["Roles"]],
        "profiles": [each["InstanceProfileName"] for each in iam.list_instance_profiles()["InstanceProfiles"]],
    }


@pytest.fixture(scope="module")
def client() -> Iterator[Callable[[str], Any]]:
    """Clients of an account of moto's, which has a cluster."""
    import boto3
    from moto import mock_aws

    with pytest.MonkeyPatch.context() as patched, mock_aws():
        patched.setenv("MOTO_EC2_LOAD_DEFAULT_AMIS", "false")  # hundreds in each region
        client = functools.cache(lambda service: boto3.client(service, REGION, aws_access_key_id="x", aws_secret_access_key="x"))
        client("cloudformation").create_stack(StackName="eksctl-c-cluster", TemplateBody=eksctls_stack())
        yield client


@pytest.mark.filterwarnings("ignore:Tried to parse:UserWarning")  # of types in UNKNOWN
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[] if n in ("efs", "karpenter") else pytest.mark.slow) for n in STACKS if n != "fsx"]
)
def test_a_stack_is_made_whole_and_deleted_whole(name: str, client: Callable[[str], Any]) -> None:
    stacks, before = client("cloudformation"), left(client)
    template = yaml_of(f"stacks/{name}.yaml")
    cluster = [{"ParameterKey": "Cluster", "ParameterValue": "c"}] if "Cluster" in template.get("Parameters", ()) else []
    body = (AWS / "stacks" / f"{name}.yaml").read_text()
    stacks.create_stack(StackName=name, TemplateBody=body, Parameters=cluster, Capabilities=["CAPABILITY_NAMED_IAM"])
    assert stacks.describe_stacks(StackName=name)["Stacks"][0]["StackStatus"] == "CREATE_COMPLETE"
    made = {each["LogicalResourceId"] for each in stacks.list_stack_resources(StackName=name)["StackResourceSummaries"]}
    resources = template["Resources"]
    assert made - {""} == {each for each in resources if resources[each]["Type"] not in UNKNOWN}
    stacks.delete_stack(StackName=name)
    assert left(client) == before


# ----------------------------------------------------------------------------------------------------------------- the pages


def test_what_pages_and_examples_name_exists_and_claims_and_accounts_have_the_names_that_jobs_use() -> None:
    pages = [
        *ROOT.glob("*.md"),
        *(ROOT / "docs").rglob("*.md"),
        *(file for file in (ROOT / "examples").rglob("*.*") if file.suffix != ".pyc"),
    ]
    named = {word for page in pages for word in re.findall(r"examples/aws/[\w/.-]+\.yaml", page.read_text())}
    assert {each for each in named if not (ROOT / each).exists()} == set()
    assert {f"examples/aws/{file.relative_to(AWS)}" for file in AWS.rglob("*.yaml")} <= named
    made = {
        each["metadata"]["name"] for name in ("efs", "fsx") for each in documents(name) if each["kind"] == "PersistentVolumeClaim"
    }
    assert made == {"efs-pvc", "fsx-pvc"}
    (storage_class,) = [each for each in documents("efs") if each["kind"] == "StorageClass"]
    assert storage_class["parameters"]["provisioningMode"] == "efs-ap", "else claims with a size stay Pending"
    accounts = {
        each["serviceAccountName"]
        for config in CLUSTERS.values()
        for each in config["iam"].get("podIdentityAssociations", ())
        if each.get("createServiceAccount")
    }
    job = yaml.safe_load((ROOT / "examples" / "kubernetes" / "imagenet.yaml").read_text())["spec"]
    assert {job["template"]["spec"]["serviceAccountName"]} == accounts == {"trainer"}


def test_pages_delete_what_they_make_and_what_is_in_a_clusters_network_before_the_cluster() -> None:
    guide = ROOT / "docs" / "guide"
    pages = {name: (guide / f"{name}.md").read_text() for name in ("aws", "aws-autoscaling", "eks-workshop")}
    made = dict(
        re.findall(
            r"cloudformation deploy --stack-name (\S+) --template-file examples/aws/stacks/(\S+)\.yaml", "".join(pages.values())
        )
    )
    deleted = set(re.findall(r"delete-stack --stack-name (\S+)", "".join(pages.values())))
    assert set(made) - deleted == set()
    inside = {name for name in STACKS if "ImportValue" in (AWS / "stacks" / f"{name}.yaml").read_text()} | {"karpenter"}
    assert inside == {"efs", "fsx", "karpenter"}
    for page in pages.values():
        for block in re.findall(r"^```sh\n(.*?)^```$", page, flags=re.M | re.S):
            before, _, after = block.partition("eksctl delete cluster")
            for stack in re.findall(r"delete-stack --stack-name (\S+)", after):
                assert made[stack] not in inside
            for stack in re.findall(r"delete-stack --stack-name (\S+)", before):
                kind = made.get(stack, stack.rsplit("-")[-1])
                assert kind in inside | {"interruption-queue"}
