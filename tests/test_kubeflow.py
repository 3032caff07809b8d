"""kubeflow.yaml: what is refused, what is rendered of it, and the list of images that notebooks are made of."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from kubernetes_validate import utils as schemas

from outlast import kubeflow
from outlast.cloud.logins import Certificate, Client, Pool
from outlast.errors import InvalidJob, OutlastError
from outlast.kubeflow import Kubeflow, documents, entrances, login, spawner, values

Outlast = Callable[..., tuple[int, str, str]]
ROOT = Path(__file__).parents[1]
EXAMPLE = ROOT / "examples" / "kubeflow" / "kubeflow.yaml"
NEWEST = max(schemas.all_versions(), key=lambda version: [int(part) for part in version.split(".")])
ACCOUNT, CLIENT = "123456789012", "4uq8sd1n3v7k2j9m5p0c6t1x8b"
CERTIFICATE = f"arn:aws:acm:us-west-2:{ACCOUNT}:certificate/7d6a1b52-3f0e-4b7a-9a0d-5b8a4e1c2f60"
POOL = f"arn:aws:cognito-idp:us-west-2:{ACCOUNT}:userpool/us-west-2_Ab1Cd2Ef3"


def a_file(**changed: Any) -> dict[str, Any]:
    """A kubeflow.yaml; fields of `cognito` by their own names."""
    names = ("cognitoAppClientId", "cognitoUserPoolArn", "cognitoUserPoolDomain")
    cognito = dict(zip(names, (CLIENT, POOL, "zip-login"), strict=True))
    cognito |= {name: changed.pop(name) for name in names if name in changed}
    head = {"cluster": "c", "region": "us-west-2", "domain": "kubeflow.example.com", "certificateArn": CERTIFICATE}
    return {**head, "cognito": cognito, **changed}


def a_kubeflow(**changed: Any) -> Kubeflow:
    return kubeflow.parse(yaml.safe_dump(a_file(**changed)))


PROFILE = {"name": "zip", "owner": "zip@example.com", "quota": {"cpu": 8}}


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"certificateArn": "CHANGEME"}, "certificateArn (CHANGEME) is not filled in (CHANGEME); write the value itself"),
    ({"certificateArn": CERTIFICATE.replace("acm", "iam")}, "must be the ARN of a certificate of ACM"),
    ({"certificateArn": "arn:aws:acm:us-west-2:1:certificate/7d6a1b52"}, "must be an ARN: arn:aws:SERVICE:REGION:ACCOUNT:"),
    (
        {"certificateArn": CERTIFICATE.replace("us-west-2", "us-east-1")},
        "certificateArn is of us-east-1, and the load balancer is in us-west-2; request the certificate in us-west-2",
    ),
    (
        {"cognitoUserPoolArn": POOL.replace(ACCOUNT, "210987654321")},
        "is of account 210987654321, and the certificate of 1234",
    ),
    (
        {"cognitoUserPoolArn": POOL.replace("pool/us-west", "pool/eu-west")},
        "names region us-west-2 and a user pool of eu-west-2",
    ),
    ({"cognitoUserPoolArn": "us-west-2_Ab1Cd2Ef3"}, "must be an ARN"),
    ({"cognitoAppClientId": "<client id>"}, "is not filled in (<client id>)"),
    ({"cognitoAppClientId": "not an id"}, "must be the id of an app client"),
    (
        {"cognitoUserPoolDomain": "https://zip-login.auth.us-west-2.amazoncognito.com"},
        "must be the prefix alone for a domain of Cognito's own; write zip-login",
    ),
    ({"cognitoUserPoolDomain": "my-cognito-login"}, "contains cognito, which Cognito allows in no prefix"),
    (
        {"cognitoUserPoolDomain": "Zip_login"},
        "must be a prefix (lower-case letters, digits and dashes, at most 63) or a host",
    ),
    ({"domain": "https://kubeflow.example.com/"}, "must be a host name alone, without https:// and path"),
    ({"domain": "login.example.com", "cognitoUserPoolDomain": "login.example.com"}, "is that of the login page"),
    ({"cognito": None}, "cognito is missing; add it"),
    ({"authentication": "none"}, "authentication is unknown; write cognito; there is no dashboard without"),
    (
        {"spawner": {"images": ["ghcr.io/outlast/outlast"]}},
        "has no tag; give one, so that a notebook started again is the same",
    ),
    ({"podDefaults": [{"name": "a", "desc": "A"}]}, "podDefaults: a gives nothing; add secret, roleArn or env"),
    (
        {"podDefaults": [{"name": "a", "desc": "A", "env": {"HF_TOKEN": "hf_123"}}]},
        "env.HF_TOKEN looks like a secret, which everybody in the namespace could read; use secret",
    ),
    ({"podDefaults": [{"name": "a", "desc": "A", "roleArn": "zip-notebooks"}]}, "must be an ARN"),
    (
        {"profiles": [{**PROFILE, "name": "kubeflow"}]},
        "profiles: kubeflow is a namespace of the cluster or of Kubeflow itself",
    ),
    ({"profiles": [{**PROFILE, "quota": {}}]}, "quota"),
    ({"profiles": [{**PROFILE, "quota": {"memory": "much"}}]}, "quota.memory (much) is not a quantity; write 64 or 512Gi"),
    ({"profiles": [{**PROFILE, "quota": {"nvidia.com/gpu": 8}}]}, "limits nothing; write requests.nvidia.com/gpu"),
    ({"profiles": [{**PROFILE, "quota": {"gpus": 8}}]}, "limits nothing; write e.g. cpu, memory or requests.nvidia.com/gpu"),
    ({"profiles": [{**PROFILE, "quota": {"cpu": "-4"}}]}, "quota.cpu (-4) is not a quantity"),
    ({"podDefaults": [{"name": "a", "desc": "A", "env": {"WANDB_API_KEY": "1"}}]}, "looks like a secret"),
    ({"cognitoUserPoolArn": POOL.replace("Ab1Cd2Ef3", "xxx")}, "is not filled in (xxx)"),
    ({"profiles": [PROFILE, PROFILE]}, "profiles: zip is given twice; keep one"),
    (
        {"profiles": [{**PROFILE, "labels": {"pod-security.kubernetes.io/enforce": "baseline"}}]},
        "has a field of its own; write podSecurity: baseline",
    ),
]


def test_a_value_that_cannot_work_is_refused() -> None:
    for changed, said in REFUSED:
        with pytest.raises(InvalidJob) as caught:
            a_kubeflow(**changed)
        (problem,) = caught.value.problems
        assert said in problem[1]


def test_a_domain_of_ones_own_and_other_partitions_are_right() -> None:
    assert a_kubeflow(cognitoUserPoolDomain="login.example.com").cognito.host == "login.example.com"
    there = {name: value.replace("arn:aws:", "arn:aws-us-gov:") for name, value in (("c", CERTIFICATE), ("p", POOL))}
    assert a_kubeflow(certificateArn=there["c"], cognitoUserPoolArn=there["p"]).cognito.pool_id == "us-west-2_Ab1Cd2Ef3"
    pool = there["p"].replace("us-west-2", "us-gov-west-1")
    certificate = there["c"].replace("us-west-2", "us-gov-west-1")
    wanted = a_kubeflow(region="us-gov-west-1", certificateArn=certificate, cognitoUserPoolArn=pool)
    assert wanted.cognito.host == "zip-login.auth-fips.us-gov-west-1.amazoncognito.com"


def test_what_only_looks_like_a_placeholder_or_a_secret_is_right() -> None:
    env = {"TOKENIZERS_PARALLELISM": "false"}
    a_kubeflow(
        domain="replacements.example.com",
        cognitoAppClientId="4uq8xxxn3v7k2j9m5p0c6t1x8b",
        podDefaults=[{"name": "a", "desc": "A", "env": env}],
    )


# What is rendered


@functools.cache
def published(kind: str, api_version: str) -> jsonschema.Draft7Validator:
    """The schema of one of Kubeflow's kinds."""
    text = (ROOT / f"tests/published/kubeflow/kubeflow.org_{kind.lower()}s.yaml").read_text()
    definition = yaml.load(text, getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    (version,) = [each for each in definition["spec"]["versions"] if f"kubeflow.org/{each['name']}" == api_version]
    assert version["served"]
    schema = closed(version["schema"]["openAPIV3Schema"])
    return jsonschema.Draft7Validator({**schema, "properties": {**schema["properties"], "metadata": {"type": "object"}}})


def closed(schema: Any) -> Any:
    """The schema of a definition, in which an unknown field is an error, as for a strict API server."""
    if isinstance(schema, list):
        return [closed(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    found = {name: closed(value) for name, value in schema.items()}
    if "properties" in found and "additionalProperties" not in found and not found.get("x-kubernetes-preserve-unknown-fields"):
        found["additionalProperties"] = False
    return found


def validate(document: dict[str, Any]) -> None:
    """Against Kubernetes' own schemas, or the published one of Kubeflow's definitions."""
    if not document["apiVersion"].startswith("kubeflow.org/"):
        return schemas.validate(document, NEWEST, strict=True)
    return published(document["kind"], document["apiVersion"]).validate(document)


def test_every_document_is_valid_by_published_schemas() -> None:
    full = {**PROFILE, "roleArn": f"arn:aws:iam::{ACCOUNT}:role/zip", "podSecurity": "baseline", "annotations": {"a.b/c": "true"}}
    for wanted in (kubeflow.load(EXAMPLE), a_kubeflow(profiles=[full])):
        for document in documents.render(wanted):
            validate(document)
    with pytest.raises(jsonschema.ValidationError):
        validate({**documents.profile(wanted.profiles[0]), "spec": {"quota": {}}})


def test_the_example_has_the_names_of_its_cluster_and_its_commands_run(outlast: Outlast, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = kubeflow.load(EXAMPLE)
    assert (wanted.cluster, wanted.node_group, wanted.profiles[0].name) == ("ai-us-west-2", "m5spot", "zip")
    assert (
        len(
            re.findall(r"^#   outlast kubeflow (?:render|apply|check) examples/kubeflow/kubeflow.yaml", EXAMPLE.read_text(), re.M)
        )
        == 3
    )
    monkeypatch.chdir(ROOT)
    code, out, err = outlast("kubeflow", "render", "examples/kubeflow/kubeflow.yaml")
    assert (code, err) == (0, "")
    assert list(yaml.safe_load_all(out)) == documents.render(wanted)


def test_the_way_in_has_a_login_on_all_paths_and_is_what_the_check_asks_for() -> None:
    wanted = kubeflow.load(EXAMPLE)
    seen = entrances.Seen(
        workloads=[
            {
                "kind": "Deployment",
                "metadata": {"name": "istio-ingressgateway", "namespace": "istio-system"},
                "spec": {"template": {"metadata": {"labels": {"app": "istio-ingressgateway"}}}},
            }
        ],
        services=[
            {
                "kind": "Service",
                "metadata": {"name": "istio-ingressgateway", "namespace": "istio-system"},
                "spec": {"type": "ClusterIP", "selector": {"app": "istio-ingressgateway"}},
            }
        ],
        ingresses=[documents.ingress(wanted)],
    )
    assert entrances.findings(seen, wanted) == []


def test_a_profile_has_quota_role_and_a_namespace_that_kubeflow_accepts() -> None:
    role = f"arn:aws:iam::{ACCOUNT}:role/zip"
    wanted = a_kubeflow(
        profiles=[{**PROFILE, "roleArn": role, "podSecurity": "baseline", "labels": {"istio-injection": "disabled"}}]
    )
    made = {each["kind"]: each for each in documents.render(wanted)}
    assert made["Profile"]["spec"] == {
        "owner": {"kind": "User", "name": "zip@example.com"},
        "resourceQuotaSpec": {"hard": {"cpu": "8"}},
        "plugins": [{"kind": "AwsIamForServiceAccount", "spec": {"awsIamRole": role, "annotateOnly": True}}],
    }
    meta = made["Namespace"]["metadata"]
    assert meta["annotations"] == {"owner": "zip@example.com"}  # else Kubeflow's controller refuses a namespace that is there
    assert meta["labels"] == {"istio-injection": "disabled", "pod-security.kubernetes.io/enforce": "baseline"}


def test_values_are_written_where_awss_distribution_reads_them(outlast: Outlast, tmp_path: Path) -> None:
    code, out, err = outlast("kubeflow", "render", EXAMPLE, "--values", tmp_path)
    assert (code, out) == (0, "")
    assert err.startswith(f"outlast | wrote 8 files to {tmp_path}: awsconfigs/")
    params = (tmp_path / "awsconfigs/common/istio-ingress/overlays/cognito/params.env").read_text()
    assert params == (
        f"CognitoUserPoolArn={POOL}\nCognitoAppClientId={CLIENT}\nCognitoUserPoolDomain=zip-login\ncertArn={CERTIFICATE}\n"
    )
    chart = yaml.safe_load((tmp_path / "charts/common/ingress/cognito/values.yaml").read_text())
    assert chart["alb"]["cognito"] == {"UserPoolArn": POOL, "UserPoolDomain": "zip-login", "appClientId": CLIENT}
    old = yaml.safe_load((tmp_path / "kfctl/kfctl_aws_cognito.plugin.yaml").read_text())
    assert old["spec"]["auth"]["cognito"]["certArn"] == CERTIFICATE
    nodes = yaml.safe_load((tmp_path / "outlast/node-group/kustomization.yaml").read_text())
    patch = yaml.safe_load(nodes["patches"][0]["patch"])
    assert patch["spec"]["template"]["spec"]["nodeSelector"] == {"alpha.eksctl.io/nodegroup-name": "m5spot"}
    assert "outlast/node-group/kustomization.yaml" not in values.files(a_kubeflow())


# The form for notebooks

OLD = """\
# how notebooks are made
spawnerFormDefaults:
  image:
    # the default container image
    value: gcr.io/kubeflow-images-public/tensorflow-2.1.0-notebook-cpu:1.0.0
    # the list of available standard container images
    options:
      - gcr.io/kubeflow-images-public/tensorflow-1.15.2-notebook-cpu:1.0.0
      - gcr.io/kubeflow-images-public/tensorflow-2.1.0-notebook-gpu:1.0.0 # the team's
      # add others here
    readOnly: false
  cpu:
    value: '0.5'
"""
NEW = """\
spawnerFormDefaults:
  allowCustomImage: true

  image:
    value: ghcr.io/kubeflow/kubeflow/notebook-servers/jupyter-scipy:v1.10.0

    options:
    - ghcr.io/kubeflow/kubeflow/notebook-servers/jupyter-scipy:v1.10.0

  ################
  # VSCode
  ################
  imageGroupOne:
    value: ghcr.io/kubeflow/kubeflow/notebook-servers/codeserver-python:v1.10.0
    options:
    - ghcr.io/kubeflow/kubeflow/notebook-servers/codeserver-python:v1.10.0
  cpu: {readOnly: false, value: "0.5"}
"""
OURS = {"image": ["ghcr.io/outlast/outlast:0.1-notebook"]}


@pytest.mark.parametrize(
    ("text", "wanted", "lines"),
    [
        (OLD, OURS, ["      - ghcr.io/outlast/outlast:0.1-notebook"]),
        (
            NEW,
            {**OURS, "imageGroupOne": ["code:1", "code:2"]},
            ["    - ghcr.io/outlast/outlast:0.1-notebook", "    - code:1", "    - code:2"],
        ),
        (OLD.replace("\n", "\r\n"), OURS, ["      - ghcr.io/outlast/outlast:0.1-notebook"]),
        ("spawnerFormDefaults:\n  image:\n    options:\n    - a", OURS, ["    - ghcr.io/outlast/outlast:0.1-notebook"]),
        (
            "spawnerFormDefaults:\n  image:\n    value: a:1\n\n  cpu: 1",
            OURS,
            ["    options:", "    - ghcr.io/outlast/outlast:0.1-notebook"],
        ),
    ],
    ids=["of the document", "of today", "CRLF", "no last line end", "no list"],
)
def test_images_are_added_as_lines_and_all_other_lines_stay(text: str, wanted: dict[str, list[str]], lines: list[str]) -> None:
    made = spawner.added(text, wanted)
    assert [line for line in made.splitlines() if line in text.splitlines()] == text.splitlines()
    assert [line for line in made.splitlines() if line not in text.splitlines()] == lines
    assert made.count("\r\n") == (made.count("\n") if "\r\n" in text else 0)
    options = {name: yaml.safe_load(made)["spawnerFormDefaults"][name]["options"] for name in wanted}
    assert all(options[name][-len(images) :] == images for name, images in wanted.items())
    assert spawner.added(made, wanted) == made
    assert spawner.missing(made, wanted) == {}


@pytest.mark.parametrize(
    ("before", "after"),
    [("[a, 'b']", "[a, 'b', n:1]"), ("[]", "[n:1]"), ("null", "[n:1]"), ("~", "[n:1]")],
)
def test_a_list_on_one_line_stays_on_one(before: str, after: str) -> None:
    text = "spawnerFormDefaults:\n  image:\n    options: {} # these\n    value: a\n"
    assert spawner.added(text.replace("{}", before), {"image": ["n:1"]}) == text.replace("{}", after)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            "spawnerFormDefaults: {image: {options: [a]}}\n",
            "the layout of spawnerFormDefaults.image is not understood; add them by",
        ),
        ("spawnerFormDefaults:\n  image: &i\n    options: &o\n    - a\n  old:\n    options: *o\n", "is not understood"),
        ("spawnerFormDefaults:\n  cpu: 1\n", "has no spawnerFormDefaults.image: this version of Kubeflow has no such images"),
        ("spawnerFormDefaults:\n  image:\n    options: a\n", "spawnerFormDefaults.image.options is no list"),
        ("a: [", "is not YAML"),
        ("", "has no spawnerFormDefaults.image"),
    ],
)
def test_a_form_that_is_not_understood_is_refused(text: str, said: str) -> None:
    with pytest.raises(OutlastError, match=re.escape(said)):
        spawner.added(text, {"image": ["n:1"]})


# Certificate and user pool

NOW = 1_790_000_000.0
DAY_S = 86_400
GOOD = Certificate("ISSUED", ("kubeflow.example.com",), NOW + 300 * DAY_S)
CALLBACK = "https://kubeflow.example.com/oauth2/idpresponse"
CLIENT_OF_ALB = Client(secret=True, callbacks=(CALLBACK,), flows=("code",), scopes=("openid", "email"), enabled=True)


@pytest.mark.parametrize(
    ("certificate", "pool", "said"),
    [
        (GOOD, Pool(("zip-login",), CLIENT_OF_ALB), []),
        (Certificate("ISSUED", ("example.com", "*.example.com")), Pool(("other", "zip-login"), CLIENT_OF_ALB), []),
        (None, None, ["is not in ACM in us-west-2; correct certificateArn", "is not there; correct cognitoUserPoolArn"]),
        (
            Certificate("PENDING_VALIDATION", ("*.kubeflow.example.com",)),
            Pool((), None),
            ["is not validated yet; add the record", "and not for kubeflow.example.com", "has no domain", "has no app client"],
        ),
        (
            Certificate("EXPIRED", ("kubeflow.example.com",)),
            Pool(("zip",), Client(secret=False)),
            [
                "is EXPIRED and not ISSUED",
                "has the domain zip, and not zip-login",
                "has no secret, which a load balancer needs and which cannot be added",
                f"does not allow the callback URL {CALLBACK}",
                "does not allow the OAuth flow",
                "does not allow the scope openid and email",
            ],
        ),
        (
            Certificate("ISSUED", ("kubeflow.example.com",), NOW + 3 * DAY_S),
            Pool(("zip-login",), CLIENT_OF_ALB),
            ["expires on 2026-09-24 and was not renewed"],
        ),
    ],
)
def test_what_aws_says_of_certificate_and_user_pool(certificate: Certificate | None, pool: Pool | None, said: list[str]) -> None:
    found = login.findings(a_kubeflow(), certificate, pool, NOW)
    assert len(found) == len(said), found
    for sentence, part in zip(found, said, strict=True):
        assert part in sentence


def test_the_file_in_the_guide_is_right() -> None:
    (text,) = re.findall(r"^```yaml\n(.+?)^```", (ROOT / "docs" / "guide" / "kubeflow.md").read_text(), flags=re.M | re.S)
    assert kubeflow.parse(text).profiles[0].name == "zip"
