"""`outlast kubeflow apply` and `check`: against an API server, ACM and Cognito (moto), and the dashboard's own answer."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
import yaml

import apiserver
from outlast import kube
from outlast.cli.kubeflow import _of_aws as of_aws
from outlast.cloud import aws, clusters
from outlast.cluster import kubeflow as there
from outlast.errors import OutlastError
from outlast.kubeflow import documents, spawner
from servers import Place
from test_kubeflow import NEW, PROFILE, a_file, a_kubeflow
from test_kubeflow_entrances import GATEWAY, REQUIRE_TOKEN, a_service, a_workload, an_ingress

Outlast = Callable[..., tuple[int, str, str]]
Document = dict[str, Any]
IMAGE = "ghcr.io/outlast/outlast:0.1-notebook"
FORM, APP = (
    ("configmaps", "kubeflow", "jupyter-web-app-config-7d9gfc8t2b"),
    ("deployments.apps", "kubeflow", "jupyter-web-app-deployment"),
)


def kubeflow() -> list[Document]:
    """A Kubeflow as its manifests make it, as far as it matters here."""
    volumes = [
        {"name": "logos", "configMap": {"name": "jupyter-web-app-logos"}},
        {"name": "config", "configMap": {"name": FORM[2]}},
    ]
    app = a_workload(APP[2], {"app": "jupyter-web-app"}, namespace="kubeflow", volumes=volumes)
    app["metadata"]["labels"] = {"app": "jupyter-web-app"}
    form = {
        "kind": "ConfigMap",
        "metadata": {"name": FORM[2], "namespace": "kubeflow"},
        "data": {spawner.KEY: NEW, "other": "stays"},
    }
    names = ("istio-system", "kubeflow")
    namespaces = [{"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}} for name in names]
    found = [a_workload("istio-ingressgateway", GATEWAY), a_service(), app, form]
    versions = {"Deployment": "apps/v1", "Service": "v1", "ConfigMap": "v1"}
    return namespaces + [{"apiVersion": versions[each["kind"]], **copy.deepcopy(each)} for each in found]


@pytest.fixture
def api(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[apiserver.ApiServer]:
    """A cluster with Kubeflow."""
    api = apiserver.ApiServer()
    with apiserver.serving(api) as url:
        monkeypatch.setenv("KUBECONFIG", str(apiserver.kubeconfig(tmp_path / "config", url)))
        for document in kubeflow():
            api.put(document)
        yield api


DEFAULTS = [
    {"name": "hf", "desc": "HF", "secret": "hf"},
    {"name": "s3", "desc": "S3", "roleArn": "arn:aws:iam::123456789012:role/s3"},
]
USUAL = {"profiles": [PROFILE], "podDefaults": DEFAULTS, "spawner": {"images": [IMAGE]}}


def a_path(tmp_path: Path, **changed: Any) -> Path:
    path = tmp_path / "kubeflow.yaml"
    path.write_text(yaml.safe_dump(a_file(**{**USUAL, **changed})))
    return path


def versions(api: apiserver.ApiServer) -> dict[tuple[str, str, str], str]:
    return {key: each["metadata"]["resourceVersion"] for key, each in api.documents.items()}


def verbs(out: str) -> set[str]:
    return {line.split()[0] for line in out.splitlines()}


def test_it_is_brought_once_and_doing_it_again_changes_nothing(
    api: apiserver.ApiServer, outlast: Outlast, tmp_path: Path
) -> None:
    file = a_path(tmp_path)
    before = versions(api)
    code, dry, err = outlast("kubeflow", "apply", file, "--dry-run")
    assert (code, err, versions(api)) == (0, "", before)
    code, out, err = outlast("kubeflow", "apply", file)
    assert (code, err) == (0, "")
    assert out == dry
    assert out.splitlines() == [
        "created    Ingress outlast-kubeflow in istio-system",
        "created    ClusterRole outlast-kubeflow-view",
        "created    ClusterRole outlast-kubeflow-edit",
        "created    Profile zip",
        "created    Namespace zip",
        "created    ServiceAccount spark in zip",
        "created    Role spark in zip",
        "created    RoleBinding spark in zip",
        "created    PodDefault hf in zip",
        "created    ServiceAccount s3 in zip",
        "created    RoleBinding s3 in zip",
        "created    PodDefault s3 in zip",
        f"changed    ConfigMap {FORM[2]} in kubeflow: offers {IMAGE}",
        f"changed    Deployment {APP[2]} in kubeflow: starts again, and reads the form",
    ]
    text = api.documents[FORM]["data"][spawner.KEY]
    assert text == spawner.added(NEW, {"image": [IMAGE]})
    assert api.documents[FORM]["data"]["other"] == "stays"
    after = versions(api)
    code, out, _ = outlast("kubeflow", "apply", file)
    assert (code, verbs(out), versions(api)) == (0, {"unchanged"}, after)
    code, out, _ = outlast("kubeflow", "apply", a_path(tmp_path, profiles=[{**PROFILE, "quota": {"cpu": 16}}]))
    assert [line for line in out.splitlines() if not line.startswith("unchanged")] == ["changed    Profile zip"]


def test_a_web_app_that_was_not_started_again_is_so_by_the_next_call(
    api: apiserver.ApiServer, outlast: Outlast, tmp_path: Path
) -> None:
    file = a_path(tmp_path)
    api.prescribe(rf"PATCH .*/deployments/{APP[2]}", *[(403, {"message": "no"})])
    assert outlast("kubeflow", "apply", file)[0] != 0
    assert IMAGE in api.documents[FORM]["data"][spawner.KEY]
    _, out, _ = outlast("kubeflow", "apply", file)
    assert [line.split(":")[0] for line in out.splitlines() if line.startswith("changed")] == [
        f"changed    Deployment {APP[2]} in kubeflow"
    ]
    api.documents[FORM]["data"][spawner.KEY] += "# a note of somebody else\n"
    assert verbs(outlast("kubeflow", "apply", file)[1]) == {"unchanged"}


def test_a_form_that_somebody_writes_meanwhile_is_read_again(api: apiserver.ApiServer, outlast: Outlast, tmp_path: Path) -> None:
    def written(_: BaseHTTPRequestHandler) -> bool:
        form = api.documents[FORM]
        theirs = {**form, "metadata": dict(form["metadata"]), "data": {spawner.KEY: NEW + "# theirs\n"}}
        api.put(theirs)
        return False

    api.prescribe(r"PATCH .*/configmaps/", written)
    assert outlast("kubeflow", "apply", a_path(tmp_path))[0] == 0
    assert api.documents[FORM]["data"][spawner.KEY] == spawner.added(NEW + "# theirs\n", {"image": [IMAGE]})


def test_an_ingress_and_an_account_of_others_stay_alone(api: apiserver.ApiServer, outlast: Outlast, tmp_path: Path) -> None:
    api.put({"apiVersion": "networking.k8s.io/v1", **an_ingress({})})
    api.put({"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": "spark", "namespace": "zip"}})
    code, out, _ = outlast("kubeflow", "apply", a_path(tmp_path))
    assert code == 0
    assert out.startswith(
        "kept       Ingress outlast-kubeflow in istio-system: Ingress web in istio-system leads to the dashboard already"
    )
    assert ("ingresses.networking.k8s.io", "istio-system", documents.INGRESS) not in api.documents
    assert "kept       ServiceAccount spark in zip: somebody else made it\n" in out


ANOTHERS: list[tuple[Document, str]] = [
    (
        {
            "apiVersion": "kubeflow.org/v1",
            "kind": "Profile",
            "metadata": {"name": "zip"},
            "spec": {"owner": {"name": "ann@a.org"}},
        },
        "Profile zip belongs to ann@a.org, and not to zip@example.com; correct owner, or choose another name",
    ),
    (
        {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "zip"}},
        "the namespace zip is there and belongs to no profile, so Kubeflow would refuse the profile",
    ),
    (
        {
            "apiVersion": "kubeflow.org/v1alpha1",
            "kind": "PodDefault",
            "metadata": {"name": "hf", "namespace": "zip"},
            "spec": {},
        },
        "PodDefault hf in zip is there and not Outlast's; choose another name, or delete it",
    ),
    (
        {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": FORM[2], "namespace": "kubeflow"}, "data": {}},
        "there is no jupyter-",
    ),
]


def test_what_is_anothers_is_an_error_before_anything_is_changed(
    api: apiserver.ApiServer, outlast: Outlast, tmp_path: Path
) -> None:
    file = a_path(tmp_path)
    for other, said in ANOTHERS:
        before = dict(api.documents)
        api.put(copy.deepcopy(other))
        there = versions(api)
        code, out, err = outlast("kubeflow", "apply", file)
        assert (code, out, versions(api)) == (2, "", there)
        assert err.startswith(f"Error: {said}")
        api.documents = before


def test_a_cluster_without_kubeflow_is_refused(api: apiserver.ApiServer, outlast: Outlast, tmp_path: Path) -> None:
    api.unserved += ("kubeflow.org",)
    code, _, err = outlast("kubeflow", "apply", a_path(tmp_path))
    assert (code, err.partition(";")[0]) == (2, "Error: this cluster knows no Profile (profiles.kubeflow.org)")


def test_the_check_ends_with_1_until_everything_is_right(api: apiserver.ApiServer, outlast: Outlast, tmp_path: Path) -> None:
    file = a_path(tmp_path)
    code, out, err = outlast("kubeflow", "check", file, "--no-aws")
    assert (code, out, err) == (
        1,
        "nothing leads to https://kubeflow.example.com; make an Ingress with a login: outlast kubeflow apply\n",
        "outlast | 1 finding\n",
    )
    assert outlast("kubeflow", "apply", file)[0] == 0
    code, out, _ = outlast("kubeflow", "check", file, "--no-aws")
    assert (code, [line.split(",")[0] for line in out.splitlines()]) == (1, ["PodDefault zip/hf needs the Secret hf"])
    api.put({"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "hf", "namespace": "zip"}})
    assert outlast("kubeflow", "check", file, "--no-aws") == (
        0,
        "",
        "outlast | no way to the dashboard without a login was found\n",
    )
    opened = {"apiVersion": "v1", **a_service(type="NodePort")}
    api.put(copy.deepcopy(opened))
    code, out, _ = outlast("kubeflow", "check")
    assert (code, out.partition(",")[0]) == (
        1,
        "Service istio-system/istio-ingressgateway opens the dashboard on a port of every node",
    )
    api.put({"apiVersion": "security.istio.io/v1beta1", **copy.deepcopy(REQUIRE_TOKEN)})
    assert outlast("kubeflow", "check")[0] == 0


def test_what_may_not_be_read_proves_nothing(api: apiserver.ApiServer, outlast: Outlast) -> None:
    api.may = lambda asked: "/ingresses" not in asked and "/configmaps" not in asked
    api.forbids = 'User "ann" cannot list resource "ingresses" in API group "networking.k8s.io" at the cluster scope'
    code, out, err = outlast("kubeflow", "check")
    assert (code, err) == (1, "outlast | 1 finding\n")
    assert out.startswith("ann may not list ingresses.networking.k8s.io in the whole cluster; ")
    api.may = lambda _: True
    api.unserved += ("networking.k8s.io",)  # Ingresses of before Kubernetes 1.19, which nobody looks at
    assert outlast("kubeflow", "check")[0] == 1


def test_istios_configuration_is_read_for_providers_that_may_be_away(api: apiserver.ApiServer) -> None:
    provider = {"name": "oauth2-proxy", "envoyExtAuthzHttp": {"service": "o", "failOpen": True}}
    config = {"mesh": yaml.safe_dump({"extensionProviders": [provider, {"name": "jaeger", "opencensus": {}}]})}
    meta = {"name": "istio", "namespace": "istio-system"}
    api.put({"apiVersion": "v1", "kind": "ConfigMap", "metadata": meta, "data": config})
    cluster = kube.connect(None)
    try:
        assert there.look(cluster).mesh.lenient == {"oauth2-proxy"}
    finally:
        cluster.close()


# AWS


@pytest.mark.slow
def test_acm_and_cognito_are_asked_about_the_values_of_the_file(
    moto: Place,
) -> None:
    region = "us-west-2"
    acm, cognito = aws.client("acm", region), aws.client("cognito-idp", region)
    certificate = acm.request_certificate(DomainName="*.example.com")["CertificateArn"]
    pool = cognito.create_user_pool(PoolName="people")["UserPool"]
    cognito.create_user_pool_domain(Domain="zip-login", UserPoolId=pool["Id"])

    def client(**fields: Any) -> str:
        made = cognito.create_user_pool_client(UserPoolId=pool["Id"], ClientName="alb", **fields)
        return str(made["UserPoolClient"]["ClientId"])

    def check(client_id: str, **changed: Any) -> list[str]:
        values = {"certificateArn": certificate, "cognitoUserPoolArn": pool["Arn"], "cognitoAppClientId": client_id}
        found = of_aws(a_kubeflow(**{**values, **changed}))
        return [each for each in found if "is not validated yet" not in each]  # moto validates a certificate after a while

    good = client(
        GenerateSecret=True,
        CallbackURLs=["https://kubeflow.example.com/oauth2/idpresponse"],
        AllowedOAuthFlows=["code"],
        AllowedOAuthScopes=["openid", "email"],
        AllowedOAuthFlowsUserPoolClient=True,
    )
    assert check(good) == []
    first, *rest = check(client(), domain="kubeflow.example.org")
    assert "is for *.example.com, and not for kubeflow.example.org; request one for it, or correct domain" in first
    assert "has no secret, which a load balancer needs" in rest[0]
    assert len(rest) == 4
    gone = check("nosuchclient00", certificateArn=certificate[:-12] + "0" * 12, cognitoUserPoolArn=f"{pool['Arn'][:-4]}0000")
    assert ["is not in ACM" in gone[0], "is not there; correct cognitoUserPoolArn" in gone[1], len(gone)] == [True, True, 2]
    assert "has no app client nosuchclient00" in check("nosuchclient00")[-1]
    other = {"certificateArn": certificate.replace("123456789012", "210987654321")}
    other["cognitoUserPoolArn"] = pool["Arn"].replace("123456789012", "210987654321")
    assert check(good, **other)[0].startswith(
        "the credentials are of account 123456789012, and certificate and user pool of 2109"
    )


def test_aws_without_credentials_is_said_and_a_refusal_is_a_finding(
    api: apiserver.ApiServer, outlast: Outlast, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(aws, "has_credentials", lambda: False)
    assert "outlast | AWS is not asked about certificate and user pool" in outlast("kubeflow", "check", a_path(tmp_path))[2]

    def refused(region: str) -> str:
        raise OutlastError("AWS does not allow it; ask for the right")

    monkeypatch.setattr(aws, "has_credentials", lambda: True)
    monkeypatch.setattr(clusters, "account", refused)
    code, out, _ = outlast("kubeflow", "check", a_path(tmp_path))
    assert (code, len(out.splitlines())) == (1, 2)  # what the cluster has is said, too
    assert out.splitlines()[1] == "certificate and user pool could not be looked at: AWS does not allow it; ask for the right"


# The dashboard's own answer


@contextmanager
def a_dashboard(status: int, **headers: str) -> Iterator[str]:
    """A server that answers every request so."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status)
            for name, value in {**headers, "Content-Length": "0"}.items():
                self.send_header(name, value)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/"
        finally:
            server.shutdown()
            thread.join()


@pytest.mark.parametrize(
    ("status", "location", "said"),
    [
        (200, "", "answers 200 without a login; close it"),
        (302, "https://zip-login.auth.us-west-2.amazoncognito.com/oauth2/authorize", ""),
        (301, "https://kubeflow.example.com/", ""),
        (302, "http://kubeflow.example.com/", "sends to http://kubeflow.example.com/, which is no login by HTTPS"),
        (302, "/home", "sends to /home, which is no login by HTTPS"),
        (401, "", ""),
        (403, "", ""),
        (503, "", "answers 503, so it is not known whether it asks for a login"),
    ],
)
def test_a_request_without_a_login_must_not_be_answered(status: int, location: str, said: str) -> None:
    with a_dashboard(status, **({"Location": location} if location else {})) as url:
        found = there.request(url)
    assert said in found
    assert bool(said) == bool(found)
    assert there.request(url) == ""  # HTTP that nobody serves is right


@pytest.mark.parametrize(
    ("url", "code", "location", "right"),
    [
        ("https", 302, "https://login.example.com/oauth2/authorize", True),
        ("https", 302, "https://kubeflow.example.com/oauth2/start", True),
        ("https", 302, "/dex/auth", True),
        ("https", 302, "https://kubeflow.example.com/home", False),
        ("https", 302, "/loginless", False),
        ("https", 302, "http://login.example.com/", False),
        ("https", 404, "", False),
        ("http", 404, "", True),
    ],
)
def test_a_page_of_the_dashboards_own_host_is_no_login(url: str, code: int, location: str, right: bool) -> None:
    assert there._is_login(f"{url}://kubeflow.example.com/", code, location) == right


def test_a_dashboard_that_cannot_be_reached_by_https_is_said() -> None:
    with a_dashboard(200) as url:
        assert "cannot be reached" in there.request(url.replace("http:", "https:"))
