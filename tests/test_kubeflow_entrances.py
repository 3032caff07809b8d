"""How the dashboard of a Kubeflow can be reached without a login: tables of clusters and what is said of them."""

from __future__ import annotations

import json
from typing import Any

import pytest

from outlast.kubeflow import documents, entrances
from outlast.kubeflow.entrances import Seen
from outlast.kubeflow.gateways import Mesh
from test_kubeflow import CERTIFICATE, CLIENT, POOL, a_kubeflow

Document = dict[str, Any]
ALB = documents.ALB
GATEWAY = {"app": "istio-ingressgateway", "istio": "ingressgateway"}
NAME = "Ingress istio-system/web"
WITHOUT = "leads to the dashboard without a login"


def an_object(kind: str, name: str, spec: Document, *, namespace: str = "istio-system", **annotations: str) -> Document:
    return {"kind": kind, "metadata": {"name": name, "namespace": namespace, "annotations": annotations}, "spec": spec}


def a_workload(name: str, labels: dict[str, str], *, namespace: str = "istio-system", **pod: Any) -> Document:
    spec = {"template": {"metadata": {"labels": labels}, "spec": {"containers": [{"name": "c"}], **pod}}}
    return an_object("Deployment", name, spec, namespace=namespace)


def a_service(name: str = "istio-ingressgateway", selector: dict[str, str] = GATEWAY, **spec: Any) -> Document:
    namespace = spec.pop("namespace", "istio-system")
    return an_object("Service", name, {"selector": selector, **spec}, namespace=namespace)


IDP = json.dumps({"userPoolARN": POOL, "userPoolClientID": CLIENT, "userPoolDomain": "zip-login"})
COGNITO = {
    f"{ALB}/auth-type": "cognito",
    f"{ALB}/auth-idp-cognito": IDP,
    f"{ALB}/certificate-arn": CERTIFICATE,
    f"{ALB}/listen-ports": '[{"HTTPS":443}]',
}


def without(*names: str) -> dict[str, str]:
    return {name: value for name, value in COGNITO.items() if name.removeprefix(f"{ALB}/") not in names}


def with_(**more: str) -> dict[str, str]:
    return {**COGNITO, **{f"{ALB}/{name.replace('_', '-')}": value for name, value in more.items()}}


def an_ingress(annotations: dict[str, str], to: str = "istio-ingressgateway", **spec: Any) -> Document:
    backend = {"service": {"name": to, "port": {"number": 80}}}
    rules = [{"http": {"paths": [{"path": "/*", "backend": backend}]}}]
    return an_object("Ingress", "web", {"rules": rules, **spec}, **{"kubernetes.io/ingress.class": "alb", **annotations})


def a_cluster(**more: Any) -> Seen:
    """Kubeflow's gateway, with a Service that only Ingresses lead to."""
    usual: dict[str, Any] = {"workloads": [a_workload("istio-ingressgateway", GATEWAY)], "services": [a_service()]}
    return Seen(**{**usual, **more})


def said(seen: Seen, *parts: str, wanted: Any = None, case: str = "") -> None:
    """That exactly so much is found, and each finding says what is expected."""
    found = entrances.findings(seen, wanted)
    assert len(found) == len(parts), (case, found)
    for sentence, part in zip(found, parts, strict=True):
        assert part in sentence, case


# A load balancer of AWS

BALANCERS: dict[str, tuple[dict[str, str], list[str]]] = {
    "with Cognito": (COGNITO, []),
    "of AWS's distribution, which spells it otherwise": (
        with_(auth_idp_cognito=IDP.replace("userP", "UserP").replace("ARN", "Arn", 1)),
        [],
    ),
    "redirects HTTP": (with_(listen_ports='[{"HTTP":80},{"HTTPS":443}]', ssl_redirect="443"), []),
    "refuses without a login": (with_(auth_on_unauthenticated_request="deny"), []),
    "with OIDC": (
        {**without("auth-type"), f"{ALB}/auth-type": "oidc", f"{ALB}/auth-idp-oidc": '{"issuer":"i","secretName":"s"}'},
        [],
    ),
    "without a login": (without("auth-type", "auth-idp-cognito"), [f"{NAME} {WITHOUT}; add {ALB}/auth-type: cognito"]),
    "HTTP beside HTTPS": (
        with_(listen_ports='[{"HTTP":80},{"HTTPS":443}]'),
        [f"{NAME}: port 80 is HTTP, where a load balancer asks for no login; redirect it with {ALB}/ssl-redirect: '443'"],
    ),
    "redirects to a port that is not there": (
        with_(listen_ports='[{"HTTP":80},{"HTTPS":443}]', ssl_redirect="8443"),
        ["port 80 is HTTP, where a load balancer asks for no login"],
    ),
    "HTTP alone": (with_(listen_ports='[{"HTTP":80}]'), ["listen on HTTPS alone"]),
    "HTTP by default": (
        without("listen-ports", "certificate-arn"),
        ["port 80 is HTTP, where a load balancer asks for no login; listen on HTTPS alone"],
    ),
    "HTTPS by default": (without("listen-ports"), []),
    "without a certificate": (without("certificate-arn"), [f"{NAME}: HTTPS has no certificate; add {ALB}/certificate-arn"]),
    "lets everybody through": (
        with_(auth_on_unauthenticated_request="allow"),
        ["auth-on-unauthenticated-request is allow, so a login is not needed; set it to authenticate"],
    ),
    "without a user pool": (
        without("auth-idp-cognito"),
        ["auth-idp-cognito lacks userPoolARN, userPoolClientID, userPoolDomain"],
    ),
    "with a value that was forgotten": (
        with_(auth_idp_cognito='{"UserPoolArn":"","userPoolDomain":"d"}'),
        ["lacks userPoolARN, userPoolC"],
    ),
    "with a login that the controller does not know": (with_(auth_type="Cognito"), [WITHOUT]),
    "with ports that are none": (with_(listen_ports="443"), ["listen-ports is not understood"]),
}


def test_a_load_balancer() -> None:
    for name, (given, parts) in BALANCERS.items():
        said(a_cluster(ingresses=[an_ingress(given)]), *parts, case=name)


def test_the_service_overrides_the_login_of_its_ingress() -> None:
    service = a_service()
    service["metadata"]["annotations"] = {f"{ALB}/auth-type": "none"}
    said(a_cluster(services=[service], ingresses=[an_ingress(COGNITO)]), WITHOUT)
    service["metadata"]["annotations"] = {f"{ALB}/listen-ports": '[{"HTTPS":443}]'}  # of an Ingress alone
    said(a_cluster(services=[service], ingresses=[an_ingress(with_(listen_ports='[{"HTTP":80}]'))]), "port 80 is HTTP")


def test_annotations_of_a_controller_that_does_not_act_on_an_ingress_are_no_login() -> None:
    def a_class(name: str, controller: str, **annotations: str) -> Document:
        return {
            "kind": "IngressClass",
            "metadata": {"name": name, "annotations": annotations},
            "spec": {"controller": controller},
        }

    def check(annotations: dict[str, str], name: str, *parts: str, classes: tuple[Document, ...] = ()) -> None:
        ingress = an_object(
            "Ingress", "web", {**an_ingress({})["spec"], "tls": [{}], **({"ingressClassName": name} if name else {})}
        )
        ingress["metadata"]["annotations"] = annotations
        said(a_cluster(ingresses=[ingress], classes=classes), *parts)

    nginx = {f"{NGINX}/auth-url": "https://o/oauth2/auth"}
    check(COGNITO, "nginx", WITHOUT)
    check(nginx, "nginx")
    check(nginx, "traefik", WITHOUT)
    check(COGNITO, "public", classes=(a_class("public", "eks.amazonaws.com/alb"),))
    check(nginx, "public", classes=(a_class("public", "k8s.io/ingress-nginx"),))
    check(nginx, "public", WITHOUT, classes=(a_class("public", "haproxy.org/ingress-controller"),))
    default = a_class("public", "k8s.io/ingress-nginx", **{"ingressclass.kubernetes.io/is-default-class": "true"})
    check(COGNITO, "", classes=())
    check(COGNITO, "", WITHOUT, classes=(default,))


def test_an_alias_in_another_namespace_and_ways_that_are_not_judged_count() -> None:
    alias = a_service("way", {}, namespace="shop", type="ExternalName", externalName="istio-ingressgateway.istio-system.svc")
    ingress = an_ingress({}, to="way", ingressClassName="nginx", tls=[{}])
    ingress["metadata"]["namespace"] = "shop"
    said(a_cluster(services=[a_service(), alias], ingresses=[ingress]), f"Ingress shop/web {WITHOUT}")

    refs = [{"backendRefs": [{"name": "istio-ingressgateway", "namespace": "istio-system"}]}]
    route = an_object("HTTPRoute", "r", {"rules": refs}, namespace="shop")
    binding = an_object("TargetGroupBinding", "t", {"serviceRef": {"name": "istio-ingressgateway", "port": 80}})
    said(
        a_cluster(routes=[route, binding]),
        "HTTPRoute shop/r leads to the dashboard, and Outlast cannot say",
        "TargetGroupBinding",
    )
    said(a_cluster(routes=[route, binding], mesh=Mesh(policies=[REQUIRE_TOKEN])))
    binding["metadata"]["labels"] = {"ingress.k8s.aws/stack-name": "web"}  # of an Ingress, which is judged itself
    said(a_cluster(routes=[binding]))


def test_what_was_not_shown_is_a_finding_although_all_else_is_well() -> None:
    said(a_cluster(unread=["ann may not list ingresses"]), "ann may not list ingresses; without it nobody can say")


def test_an_ingress_of_the_group_redirects_for_all() -> None:
    grouped = with_(listen_ports='[{"HTTP":80},{"HTTPS":443}]', group_name="g")
    other = an_ingress({f"{ALB}/group.name": "g", f"{ALB}/ssl-redirect": "443"}, to="other")
    annotations = {**grouped, f"{ALB}/group.name": "g"}
    said(a_cluster(ingresses=[an_ingress(annotations), other]))
    said(a_cluster(ingresses=[an_ingress(annotations)]), "port 80 is HTTP")


def test_an_ingress_that_leads_elsewhere_is_nobodys_business() -> None:
    said(a_cluster(ingresses=[an_ingress({}, to="shop")]))


def test_a_default_backend_and_an_action_lead_to_the_gateway_too() -> None:
    backend = {"service": {"name": "istio-ingressgateway", "port": {"number": 80}}}
    bare = without("auth-type", "auth-idp-cognito")
    said(a_cluster(ingresses=[an_ingress(bare, to="shop", defaultBackend=backend)]), WITHOUT)
    action = {"type": "forward", "forwardConfig": {"targetGroups": [{"serviceName": "istio-ingressgateway"}]}}
    by_name = {"service": {"name": "rule", "port": {"name": "use-annotation"}}}
    made = an_ingress({**bare, f"{ALB}/actions.rule": json.dumps(action)}, to="shop", defaultBackend=by_name)
    said(a_cluster(ingresses=[made]), WITHOUT)


def test_what_differs_from_the_file_is_said() -> None:
    wanted = a_kubeflow()
    said(a_cluster(ingresses=[an_ingress(COGNITO)]), wanted=wanted)
    said(a_cluster(), "nothing leads to https://kubeflow.example.com; make an Ingress with a login", wanted=wanted)
    other = with_(certificate_arn=f"{CERTIFICATE}0", auth_idp_cognito=IDP.replace("zip-login", "other"))
    ingress = an_ingress(other, tls=[{"hosts": ["other.example.com"]}])
    parts = ("has the certificate", "is for other.example.com, and domain is", "logs in with other, and cognitoUserPoolDomain is")
    said(a_cluster(ingresses=[ingress]), *parts, wanted=wanted)


# Other Ingresses

NGINX = "nginx.ingress.kubernetes.io"


@pytest.mark.parametrize(
    ("annotations", "spec", "parts"),
    [
        ({f"{NGINX}/auth-url": "https://o/oauth2/auth"}, {"tls": [{}]}, []),
        ({}, {"tls": [{}]}, [WITHOUT]),
        (
            {f"{NGINX}/auth-url": "https://o/oauth2/auth"},
            {},
            ["has no TLS, so that sessions can be read on the way; add spec.tls"],
        ),
        ({f"{NGINX}/auth-url": "https://o", f"{NGINX}/ssl-redirect": "false"}, {"tls": [{}]}, ["ssl-redirect is false"]),
    ],
)
def test_an_ingress_of_another_controller(annotations: dict[str, str], spec: Document, parts: list[str]) -> None:
    said(a_cluster(ingresses=[an_ingress(annotations, ingressClassName="nginx", **spec)]), *parts)


# Services that open a port themselves


@pytest.mark.parametrize(
    ("spec", "part"),
    [
        (
            {"type": "LoadBalancer"},
            "opens the dashboard by a load balancer of its own, past every login; close it: kubectl -n istio-system",
        ),
        ({"type": "NodePort"}, "opens the dashboard on a port of every node, past every login"),
        ({"externalIPs": ["192.0.2.1"]}, "opens the dashboard at 192.0.2.1, past every login; close it: remove spec.externalIPs"),
    ],
)
def test_a_service_that_opens_a_port_goes_past_the_load_balancers_login(spec: Document, part: str) -> None:
    said(a_cluster(services=[a_service(**spec)], ingresses=[an_ingress(COGNITO)]), part)


def test_another_service_with_the_gateways_pods_counts_and_one_without_them_does_not() -> None:
    opened = a_service("mine", {"istio": "ingressgateway"}, type="NodePort")
    said(a_cluster(services=[a_service(), opened]), "Service istio-system/mine opens")
    elsewhere = a_service("other", GATEWAY, type="NodePort", namespace="shop")
    said(a_cluster(services=[a_service(), elsewhere, a_service("shop", {"app": "shop"}, type="LoadBalancer")]))


@pytest.mark.parametrize("pod", [{"hostNetwork": True}, {"containers": [{"ports": [{"hostPort": 80}]}]}])
def test_a_gateway_on_its_nodes_network_is_open(pod: Document) -> None:
    said(
        a_cluster(workloads=[a_workload("istio-ingressgateway", GATEWAY, **pod)]), "opens the dashboard on its nodes' own network"
    )


def test_the_dashboard_itself_knows_no_login() -> None:
    dashboard = a_workload("centraldashboard", {"app": "centraldashboard"}, namespace="kubeflow")
    service = a_service("centraldashboard", {"app": "centraldashboard"}, namespace="kubeflow", type="LoadBalancer")
    mesh = Mesh(policies=[REQUIRE_TOKEN])
    said(
        a_cluster(workloads=[dashboard], services=[service], mesh=mesh),
        "Service kubeflow/centraldashboard opens the dashboard by",
    )


def test_web_apps_and_notebooks_know_no_login_either() -> None:
    web = a_workload("jupyter", {"app": "jupyter-web-app"}, namespace="kubeflow")
    notebook = a_workload("nb", {"notebook-name": "nb", "statefulset": "nb"}, namespace="zip")
    opened = [
        a_service("jupyter", {"app": "jupyter-web-app"}, namespace="kubeflow", type="NodePort"),
        a_service("mine", {"statefulset": "nb"}, namespace="zip", type="LoadBalancer"),
    ]
    there = [*a_cluster().workloads, web, notebook]
    said(
        a_cluster(workloads=there, services=[a_service(), *opened], mesh=Mesh(policies=[REQUIRE_TOKEN])),
        "Service kubeflow/jupyter opens jupyter-web-app on a port of every node",
        "Service zip/mine opens the notebook nb by a load balancer",
    )
    route = {"gateways": ["open"], "http": [{"route": [{"destination": {"host": "nb.zip.svc.cluster.local"}}]}]}
    mesh = Mesh([an_object("Gateway", "open", {"selector": {"gw": "x"}})], [an_object("VirtualService", "v", route)])
    edge = [a_service("nb", {"statefulset": "nb"}, namespace="zip"), a_service("x", {"gw": "x"}, type="NodePort")]
    said(a_cluster(workloads=[*there, a_workload("x", {"gw": "x"})], services=edge, mesh=mesh), "Service istio-system/x opens")


def test_a_gateway_of_another_name_is_found_by_its_routes() -> None:
    route = {"gateways": ["kubeflow-gateway"], "http": [{"route": [{"destination": {"host": "centraldashboard"}}]}]}
    mesh = Mesh(
        gateways=[an_object("Gateway", "kubeflow-gateway", {"selector": {"gw": "ml"}}, namespace="kubeflow")],
        virtual_services=[an_object("VirtualService", "v", route, namespace="kubeflow")],
    )
    there = {"workloads": [a_workload("ml", {"gw": "ml"}, namespace="edge")]}
    said(
        a_cluster(**there, services=[a_service("ml", {"gw": "ml"}, namespace="edge", type="NodePort")], mesh=mesh),
        "Service edge/ml opens",
    )
    shop = {**route, "http": [{"route": [{"destination": {"host": "web.shop.svc.cluster.local"}}]}]}
    mesh = Mesh(mesh.gateways, [an_object("VirtualService", "v", shop, namespace="shop")])
    said(a_cluster(**there, mesh=mesh), "neither centraldashboard nor Istio's ingress gateway is here; install Kubeflow first")


# The login of the gateway itself

SELECTED = {"selector": {"matchLabels": {"app": "istio-ingressgateway"}}}
EXCEPT_LOGIN = [{"operation": {"notPaths": ["/dex/*", "/dex/**", "/oauth2/*"]}}]
TOKENLESS = [{"key": "request.headers[authorization]", "notValues": ["*"]}]


def a_policy(action: str, *rules: Document, name: str = "p", namespace: str = "istio-system", **spec: Any) -> Document:
    named, notes = {"action": action} if action != "ALLOW" else {}, spec.pop("annotations", {})
    fields = {**SELECTED, **named, "rules": list(rules), **spec}
    return an_object("AuthorizationPolicy", name, fields, namespace=namespace, **notes)


NO_TOKEN = [{"source": {"notRequestPrincipals": ["*"]}}]
WITH_TOKEN = {"from": [{"source": {"requestPrincipals": ["*"]}}]}
REQUIRE_TOKEN = a_policy("DENY", {"from": NO_TOKEN, "to": EXCEPT_LOGIN})
OAUTH2_PROXY = a_policy("CUSTOM", {"when": TOKENLESS, "to": EXCEPT_LOGIN}, provider={"name": "oauth2-proxy"})
ANYTHING = a_policy("ALLOW", {}, name="istio-ingressgateway")
JWT = an_object("RequestAuthentication", "dex-jwt", {**SELECTED, "jwtRules": [{"issuer": "http://dex"}]})


def a_filter(value: Document, **patch: Any) -> Document:
    one = {"applyTo": "HTTP_FILTER", "patch": {"operation": "INSERT_BEFORE", "value": value}, **patch}
    return an_object("EnvoyFilter", "f", {"workloadSelector": {"labels": {"istio": "ingressgateway"}}, "configPatches": [one]})


AUTHSERVICE = {
    "name": "envoy.filters.http.ext_authz",
    "typed_config": {"http_service": {"server_uri": {"uri": "http://authservice"}}},
}
SWITCHED_OFF = {"value": {"typed_per_filter_config": {"envoy.filters.http.ext_authz": {"disabled": True}}}}
LUA = {"typed_config": {"inline_code": 'if request_handle:headers():get("kubeflow-userid") ~= nil then\n  return\nend\n'}}
OPEN = "opens the dashboard by a load balancer of its own, past every login"

MESHES: dict[str, tuple[Mesh, str]] = {
    "nothing": (Mesh(), OPEN),
    "Kubeflow 1.9 and newer": (Mesh(policies=[ANYTHING, OAUTH2_PROXY, REQUIRE_TOKEN], authentications=[JWT]), ""),
    "oauth2-proxy asked about everything": (Mesh(policies=[a_policy("CUSTOM", {})]), ""),
    "any token is let through": (
        Mesh(policies=[ANYTHING, OAUTH2_PROXY], authentications=[JWT]),
        f"{OPEN}, since AuthorizationPolicy istio-system/p does not ask about requests that carry any token",
    ),
    "asked about some paths": (
        Mesh(policies=[a_policy("CUSTOM", {"to": [{"operation": {"paths": ["/jupyter/*"]}}]})]),
        f"{OPEN}, since AuthorizationPolicy istio-system/p asks about some paths only",
    ),
    "a path beside the login is open": (
        Mesh(policies=[a_policy("DENY", {"from": NO_TOKEN, "to": [{"operation": {"notPaths": ["/pipeline/*"]}}]})]),
        OPEN,
    ),
    "tokens are verified but not demanded": (
        Mesh(policies=[ANYTHING], authentications=[JWT]),
        f"{OPEN}, since RequestAuthentication istio-system/dex-jwt rejects wrong tokens but not missing ones",
    ),
    "allowed with a token alone": (
        Mesh(policies=[a_policy("ALLOW", WITH_TOKEN, {"to": [{"operation": {"paths": ["/dex/*"]}}]})]),
        "",
    ),
    "allowed with a token or without": (
        Mesh(policies=[ANYTHING, a_policy("ALLOW", WITH_TOKEN)]),
        OPEN,
    ),
    "for all pods of the namespace": (Mesh(policies=[a_policy("DENY", {"from": NO_TOKEN}, selector=None)]), ""),
    "for other pods": (Mesh(policies=[a_policy("DENY", {"from": NO_TOKEN}, selector={"matchLabels": {"app": "shop"}})]), OPEN),
    "in another namespace": (Mesh(policies=[a_policy("DENY", {"from": NO_TOKEN}, namespace="shop")]), OPEN),
    "a dry run": (
        Mesh(policies=[a_policy("DENY", {"from": NO_TOKEN}, annotations={"istio.io/dry-run": "true"})]),
        f"{OPEN}, since AuthorizationPolicy istio-system/p is a dry run of Istio and rejects nothing",
    ),
    "a provider that may be away": (
        Mesh(policies=[a_policy("CUSTOM", {}, provider={"name": "o"})], lenient=frozenset({"o"})),
        f"{OPEN}, since AuthorizationPolicy istio-system/p asks o, which lets all through when it is away (failOpen)",
    ),
    "authservice": (Mesh(filters=[a_filter(AUTHSERVICE)]), ""),
    "authservice of sidecars": (Mesh(filters=[a_filter(AUTHSERVICE, match={"context": "SIDECAR_INBOUND"})]), OPEN),
    "authservice on one port": (
        Mesh(filters=[a_filter(AUTHSERVICE, match={"context": "GATEWAY", "listener": {"portNumber": 8443}})]),
        OPEN,
    ),
    "authservice switched off for a route": (
        Mesh(filters=[a_filter(AUTHSERVICE), a_filter({}, applyTo="HTTP_ROUTE", patch=SWITCHED_OFF)]),
        f"{OPEN}, since EnvoyFilter istio-system/f lets some requests through without asking",
    ),
    "Lua that speaks of authservice": (Mesh(filters=[a_filter({"typed_config": {"inline_code": "-- before ext_authz"}})]), OPEN),
    "authservice that may be away": (
        Mesh(filters=[a_filter({**AUTHSERVICE, "typed_config": {"failure_mode_allow": True}})]),
        f"{OPEN}, since EnvoyFilter istio-system/f lets everything through when its server does not answer",
    ),
    "authservice taken away": (Mesh(filters=[a_filter(AUTHSERVICE, patch={"operation": "REMOVE", "value": AUTHSERVICE})]), OPEN),
    "a filter after authservice's": (
        Mesh(filters=[a_filter({"name": "other"}, match={"listener": {"subFilter": {"name": "envoy.filters.http.ext_authz"}}})]),
        OPEN,
    ),
}  # fmt: skip


def test_a_gateway_is_open_unless_the_mesh_demands_a_login() -> None:
    for name, (mesh, part) in MESHES.items():
        said(a_cluster(services=[a_service(type="LoadBalancer")], mesh=mesh), *filter(None, [part]), case=name)


def test_a_gateway_that_is_closed_must_not_serve_http_to_the_world() -> None:
    def gateway(**server: Any) -> Document:
        spec = {"selector": {"istio": "ingressgateway"}, "servers": [{"port": {"protocol": "HTTP", "number": 80}, **server}]}
        return an_object("Gateway", "kubeflow-gateway", spec, namespace="kubeflow")

    def mesh(**server: Any) -> Mesh:
        return Mesh(gateways=[gateway(**server)], policies=[REQUIRE_TOKEN])

    opened = a_service(type="LoadBalancer")
    said(a_cluster(services=[opened], mesh=mesh()), "Gateway kubeflow/kubeflow-gateway serves HTTP without redirect, and Service")
    said(a_cluster(services=[opened], mesh=mesh(tls={"httpsRedirect": True})))
    said(a_cluster(mesh=mesh()))
    opened["metadata"]["annotations"] = {"service.beta.kubernetes.io/aws-load-balancer-ssl-cert": CERTIFICATE}
    said(a_cluster(services=[opened], mesh=mesh()))


def test_a_header_that_names_the_user_and_comes_from_the_client_is_no_login() -> None:
    mesh = Mesh(filters=[a_filter(LUA)])
    part = "EnvoyFilter istio-system/f takes the kubeflow-userid that a client sends, so whoever is logged in"
    said(a_cluster(ingresses=[an_ingress(COGNITO)], mesh=mesh), part)


# Profiles and PodDefaults


def test_profiles_without_quota_and_pod_defaults_without_what_they_name() -> None:
    def a_profile(name: str, **spec: Any) -> Document:
        return {"kind": "Profile", "metadata": {"name": name}, "spec": spec}

    credentials = {
        "envFrom": [{"secretRef": {"name": "gone"}}, {"secretRef": {"name": "maybe", "optional": True}}],
        "env": [{"name": "A", "valueFrom": {"secretKeyRef": {"name": "there", "key": "k"}}}, {"name": "B", "value": "b"}],
        "volumes": [{"name": "v", "secret": {"secretName": "files"}}],
        "serviceAccountName": "bucket",
    }
    seen = a_cluster(
        profiles=[a_profile("a", resourceQuotaSpec={"hard": {"cpu": "8"}}), a_profile("b"), a_profile("c", resourceQuotaSpec={})],
        quotas=[an_object("ResourceQuota", "q", {}, namespace="c")],
        pod_defaults=[an_object("PodDefault", "p", credentials, namespace="a")],
        secrets=frozenset({("a", "there"), ("b", "gone")}),
    )
    said(
        seen,
        "Profile b has no quota, so its notebooks and jobs may take the whole cluster",
        "PodDefault a/p needs the Secret files, which is not there",
        "PodDefault a/p needs the Secret gone, which is not there, so no pod that asks for it starts",
        "PodDefault a/p needs the ServiceAccount bucket, which is not there",
    )
