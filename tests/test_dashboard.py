"""`outlast dashboard cloudwatch`: what it holds, and how it gets there. AWS is moto; add-ons of EKS are answered here."""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable
from typing import Any

import pytest
import yaml
from kubernetes_validate import utils as schemas
from typer.main import get_command

from fake_cluster import FakeCluster
from faults import Fault, Proxy, Request, reset
from outlast import kube
from outlast.cli import dashboard as commands
from outlast.cloud import aws, dashboard, network
from outlast.cloud.cloudwatch import ADDON
from outlast.cloud.dashboard import Wanted
from outlast.errors import OutlastError
from outlast.manifests import cloudwatch
from outlast.operator.metrics import Metrics
from servers import REGION, Place

GROUPS = {"eks-p3od-1": "p3od", "eks-p3spot-2": "p3spot"}


def test_the_fleet_is_three_stacked_areas_and_the_jobs_are_below() -> None:
    widgets = dashboard.body(Wanted("ai-us-west-2", "us-west-2", GROUPS))["widgets"]
    assert [each["properties"]["metrics"] for each in widgets if each["properties"].get("stacked")] == [
        [["ContainerInsights", "pod_cpu_utilization", "ClusterName", "ai-us-west-2"]],
        [["ContainerInsights", "cluster_node_count", "ClusterName", "ai-us-west-2"]],
        [
            ["AWS/AutoScaling", "GroupDesiredCapacity", "AutoScalingGroupName", "eks-p3od-1", {"label": "p3od"}],
            ["AWS/AutoScaling", "GroupDesiredCapacity", "AutoScalingGroupName", "eks-p3spot-2", {"label": "p3spot"}],
        ],
    ]
    searched = [each["properties"]["metrics"][0][0]["expression"] for each in widgets if "expression" in str(each)]
    assert searched[0] == (
        'SEARCH(\'{Outlast,ClusterName,namespace,training_job} MetricName="outlast_job_step" ClusterName="ai-us-west-2"\', '
        "'Maximum', 60)"
    )
    assert len(searched) == 4


@pytest.mark.parametrize("groups", [{}, GROUPS, {f"g{n}": "g" for n in range(100)}])
def test_the_body_is_one_that_cloudwatch_takes(groups: dict[str, str]) -> None:
    """The rules of CloudWatch-Dashboard-Body-Structure: a grid of 24 columns, at most 500 widgets and 500 metrics in each, and
    what a metric may be."""
    widgets = dashboard.body(Wanted("c", "eu-west-1", groups))["widgets"]
    assert len(widgets) <= 500
    cells: set[tuple[int, int]] = set()
    for each in widgets:
        assert each["type"] in ("metric", "text")
        assert 1 <= each["width"] <= 24
        assert 1 <= each["height"] <= 1000
        assert each["x"] + each["width"] <= 24
        covered = {
            (x, y) for x in range(each["x"], each["x"] + each["width"]) for y in range(each["y"], each["y"] + each["height"])
        }
        assert not cells & covered
        cells |= covered
        if each["type"] == "text":
            assert set(each["properties"]) == {"markdown"}
            continue
        properties = each["properties"]
        assert (properties["view"], properties["region"], properties["period"] % 60) == ("timeSeries", "eu-west-1", 0)
        assert 1 <= len(properties["metrics"]) <= 500
        for metric in properties["metrics"]:
            *words, last = metric if isinstance(metric[-1], dict) else [*metric, {}]
            if words:  # namespace, name, and pairs of dimension and value
                assert len(words) % 2 == 0
                assert all(isinstance(word, str) for word in words)
                assert set(last) <= {"label"}
            else:
                assert set(last) == {"expression", "id"}
                assert last["id"][0].islower()
                assert len(last["expression"]) <= 1024
    assert max(y for _, y in cells) + 1 == len(cells) / 24, "nothing is left free"
    ids = [metric[0]["id"] for each in widgets for metric in each["properties"].get("metrics", ()) if isinstance(metric[0], dict)]
    assert len(set(ids)) == len(ids)


def test_what_is_sent_is_what_the_operator_says() -> None:
    """Metrics are named alike by the operator, the agent, the graphs and the alarms."""
    counted = Metrics()
    counted.set_job("elasticjobs", "team", "train", {"state": "Running", "goodput": 0.5, "progressTime": "2026-01-01T00:00:00Z",
                                                     "checkpoint": {"time": 1.0}})  # fmt: skip
    said = counted.text(leads=True, now=2e9)
    assert all(f'{name}{{job="train",namespace="team"}}' in said for name in dashboard.METRICS)
    wanted = Wanted("c", REGION, {}, stalled_s=600, topic="arn:aws:sns:us-east-1:1:oncall")
    assert {each["MetricName"] for each in dashboard.alarms(wanted)} <= set(dashboard.METRICS)
    (declared,) = dashboard.agent("c", REGION)["logs"]["metrics_collected"]["prometheus"]["emf_processor"]["metric_declaration"]
    assert declared["metric_selectors"] == [f"^{name}$" for name in dashboard.METRICS]
    assert declared["dimensions"] == [["ClusterName"], list(dashboard.DIMENSIONS)]
    (job,) = cloudwatch.scrape("outlast-system")["scrape_configs"]
    labels = {each.get("target_label") for each in job["relabel_configs"] + job["metric_relabel_configs"]} | {"namespace"}
    assert {"service", *dashboard.DIMENSIONS[1:]} <= labels
    stalled, unsynced = dashboard.alarms(wanted)
    assert (stalled["Threshold"], unsynced["Threshold"], stalled["TreatMissingData"]) == (600.0, 7200.0, "notBreaching")
    assert stalled["AlarmActions"] == ["arn:aws:sns:us-east-1:1:oncall"]


def test_the_agent_may_look_for_the_operators_pods_and_nothing_else() -> None:
    documents = cloudwatch.documents(dashboard.agent("c", REGION), operator="ml")
    for document in [cloudwatch.namespace(), *documents]:
        schemas.validate(document, "1.36", strict=True)
    (role,) = [each for each in documents if each["kind"] == "Role"]
    assert (role["metadata"]["namespace"], role["rules"]) == (
        "ml", [{"apiGroups": [""], "resources": ["pods"], "verbs": ["get", "list", "watch"]}]
    )  # fmt: skip
    other = cloudwatch.documents(dashboard.agent("d", REGION), operator="ml")
    assert documents[-1]["spec"]["template"]["metadata"] != other[-1]["spec"]["template"]["metadata"], "it must read them again"


# Against AWS


class Eks:
    """A cluster with two groups; add-ons of EKS, which moto does not know."""

    def __init__(self, proxy: Proxy) -> None:
        self.proxy, self.name, self.addons = proxy, f"ai-{uuid.uuid4().hex[:8]}", dict[str, Any]()
        ec2 = aws.client("ec2", REGION)
        vpc = ec2.create_vpc(CidrBlock="10.0.0.0/16")["Vpc"]["VpcId"]
        subnet = ec2.create_subnet(VpcId=vpc, CidrBlock="10.0.0.0/24")["Subnet"]["SubnetId"]
        aws.client("eks", REGION).create_cluster(
            name=self.name, roleArn="arn:aws:iam::123456789012:role/eks", resourcesVpcConfig={"subnetIds": [subnet]}
        )
        scaling = aws.client("autoscaling", REGION)
        scaling.create_launch_configuration(LaunchConfigurationName=self.name, ImageId="ami-12c6146b", InstanceType="p3.2xlarge")
        for group in ("p3spot", "p3od"):
            tags = {f"kubernetes.io/cluster/{self.name}": "owned", "eks:nodegroup-name": group}
            scaling.create_auto_scaling_group(
                AutoScalingGroupName=f"{self.name}-{group}", LaunchConfigurationName=self.name, MinSize=0, MaxSize=10,
                VPCZoneIdentifier=subnet,
                Tags=[{"Key": key, "Value": value, "PropagateAtLaunch": True} for key, value in tags.items()],
            )  # fmt: skip

    def answer(self, request: Request) -> Fault | None:
        if "/addons" not in request.path:
            return None
        name = request.path.partition("/addons/")[2]
        status = 200
        if request.method == "POST":
            made = json.loads(request.body)
            self.addons[made["addonName"]] = {"addonName": made["addonName"], "status": "ACTIVE", "tags": made["tags"]}
            found = self.addons[made["addonName"]]
        elif name not in self.addons:
            status, found = 404, {}
        else:
            found = self.addons.pop(name) if request.method == "DELETE" else self.addons[name]
        headers = [("Content-Type", "application/json"), *([("x-amzn-ErrorType", "ResourceNotFoundException")] * (status == 404))]
        return lambda exchange: exchange.reply(status, headers, json.dumps({"addon": found}).encode())


@pytest.fixture
def eks(aws_proxy: Proxy, moto: Place, monkeypatch: pytest.MonkeyPatch) -> Eks:
    monkeypatch.setenv("AWS_ENDPOINT_URL", aws_proxy.endpoint)
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    aws_proxy.fault = lambda _: None
    there = Eks(aws_proxy)
    aws_proxy.fault = there.answer
    return there


Outlast = Callable[..., tuple[int, str, str]]


COMMAND = get_command(commands.app)
"""Made once: `cli.main` makes all commands of Outlast, each time."""


@pytest.fixture
def outlast(capsys: pytest.CaptureFixture[str]) -> Outlast:
    def call(*words: str) -> tuple[int, str, str]:
        code, said = 0, ""
        try:
            COMMAND(["cloudwatch", *words], standalone_mode=False)
        except OutlastError as error:
            code, said = error.exit_code, f"Error: {error}\n"
        out, err = capsys.readouterr()
        return code, out, err + said

    return call


@pytest.fixture
def cluster(eks: Eks, monkeypatch: pytest.MonkeyPatch) -> FakeCluster:
    there = FakeCluster({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "outlast-system"}})
    there.server = network.endpoint(REGION, eks.name)
    monkeypatch.setattr(kube, "connect", lambda *_: there)
    return there


def whats(out: str) -> set[str]:
    return {line.split()[0] for line in out.splitlines()}


def test_twice_is_one_dashboard_and_what_others_have_stays(outlast: Outlast, eks: Eks, cluster: FakeCluster) -> None:
    client = aws.client("cloudwatch", REGION)
    code, out, _ = outlast(eks.name, "--dry-run")
    assert (code, eks.addons, len(cluster.documents)) == (0, {}, 1)
    assert whats(out) == {"created", "changed"}
    code, first, _ = outlast(eks.name)
    assert (code, first) == (0, out)
    body = json.loads(client.get_dashboard(DashboardName=f"outlast-{eks.name}")["DashboardBody"])
    assert json.loads(outlast(eks.name, "-o", "json")[1]) == body
    labels = [metric[-1]["label"] for metric in body["widgets"][3]["properties"]["metrics"]]
    assert labels == ["p3od", "p3spot"]
    group = aws.client("autoscaling", REGION).describe_auto_scaling_groups(AutoScalingGroupNames=[f"{eks.name}-p3od"])
    assert "GroupDesiredCapacity" in {each["Metric"] for each in group["AutoScalingGroups"][0]["EnabledMetrics"]}
    assert aws.ours(eks.addons[ADDON]["tags"], eks.name)
    code, out, _ = outlast(eks.name)
    assert (code, whats(out)) == (0, {"unchanged"})
    assert "changed    alarm" in outlast(eks.name, "--stalled", "10m")[1]
    client.put_dashboard(DashboardName=f"{eks.name}-theirs", DashboardBody="{}")
    client.put_metric_alarm(
        AlarmName=f"{eks.name}-theirs", Namespace="a", MetricName="b", Statistic="Sum", Period=60, EvaluationPeriods=1,
        Threshold=1.0, ComparisonOperator="GreaterThanThreshold",
    )  # fmt: skip
    assert "add --yes to confirm" in outlast(eks.name, "--delete")[2]
    code, out, _ = outlast(eks.name, "--delete", "--yes")
    assert (code, eks.addons, whats(out)) == (0, {}, {"deleted", "kept"})
    left = [each["DashboardName"] for each in client.list_dashboards()["DashboardEntries"] if eks.name in each["DashboardName"]]
    alarms = [each["AlarmName"] for each in client.describe_alarms()["MetricAlarms"] if eks.name in each["AlarmName"]]
    assert left == alarms == [f"{eks.name}-theirs"]
    assert [key[0] for key in cluster.documents] == ["namespaces", "namespaces"]


def test_a_run_that_was_cut_off_is_completed_and_the_names_of_others_are_kept(
    outlast: Outlast, eks: Eks, cluster: FakeCluster
) -> None:
    client = aws.client("cloudwatch", REGION)
    for word in ("addons", "EnableMetricsCollection", "PutDashboard", "PutMetricAlarm"):

        def fault(request: Request, word: str = word) -> Fault | None:
            named = f"{request.path} {request.headers.get('x-amz-target')} {request.body.decode(errors='ignore')}"
            return reset if request.method == "POST" and word in named else eks.answer(request)

        eks.proxy.fault = fault
        code, _, err = outlast(eks.name)
        assert (code, "AWS cannot be reached" in err) == (2, True), word
    eks.proxy.fault = eks.answer
    assert outlast(eks.name)[0] == 0
    assert whats(outlast(eks.name)[1]) == {"unchanged"}
    client.put_dashboard(DashboardName=f"outlast-{eks.name}", DashboardBody='{"widgets": []}')
    code, _, err = outlast(eks.name)
    assert (code, f"dashboard outlast-{eks.name} exists and was not made by Outlast; rename or delete it" in err) == (2, True)
    assert f"kept       dashboard outlast-{eks.name}: it was not made by Outlast" in outlast(eks.name, "--delete", "-y")[1]


def test_mistakes_are_said(outlast: Outlast, eks: Eks, cluster: FakeCluster) -> None:
    assert "--stalled soon: is not a duration" in outlast(eks.name, "--stalled", "soon")[2]
    assert "--unsynced 5s: metrics come once a minute; give a minute or more" in outlast(eks.name, "--unsynced", "5s")[2]
    assert "no namespace ml, so no operator to read metrics from" in outlast(eks.name, "--operator", "ml")[2]
    assert f"Error: cluster nowhere in {REGION}: it does not exist" in outlast("nowhere")[2]
    kinds = [each["kind"] for each in yaml.safe_load_all(outlast(eks.name, "-o", "yaml")[1])]
    assert kinds == ["Namespace", "ServiceAccount", "Role", "RoleBinding", "ConfigMap", "Deployment"]
