"""How the dashboard of a Kubeflow can be reached without a login, and what its profiles and PodDefaults lack.

    for sentence in entrances.findings(seen, wanted): ...

An entrance is what leads from outside to the pods of Istio's gateway or of the dashboard: an Ingress, a Service that opens a
port, a pod on the host's network. It is closed if a load balancer asks for a login, or if the gateway itself does
(`gateways.guard`). Pure; `cluster.kubeflow` reads the objects.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from outlast.kubeflow import gateways
from outlast.kubeflow.documents import ALB, DASHBOARD, NAMESPACE
from outlast.kubeflow.gateways import Document, Mesh, identity, labels_of
from outlast.kubeflow.model import Kubeflow

_NGINX = "nginx.ingress.kubernetes.io"
_ALB_CONTROLLERS = ("ingress.k8s.aws/alb", "eks.amazonaws.com/alb")
_NGINX_CONTROLLER = "k8s.io/ingress-nginx"
_BINDING = "TargetGroupBinding"
_OF_CONTROLLER = ("ingress.k8s.aws/", "service.k8s.aws/", "gateway.k8s.aws.")
"""Labels of the TargetGroupBindings that the AWS Load Balancer Controller itself makes, of what is judged anyway."""
WEB_APPS = (
    DASHBOARD,
    "jupyter-web-app",
    "volumes-web-app",
    "tensorboards-web-app",
    "kserve-models-web-app",
    "ml-pipeline-ui",
    "ml-pipeline",
    "katib-ui",
)
"""`app` of what believes the header kubeflow-userid, whoever sends it, or asks nobody."""
NOTEBOOK = "notebook-name"
"""Label of notebooks, which ask for no password of their own."""
_TLS_AT_BALANCER = "service.beta.kubernetes.io/aws-load-balancer-ssl-cert"


@dataclass(frozen=True)
class Seen:
    """What a cluster has that matters here, as the API server gives it."""

    workloads: Sequence[Document] = ()
    """Deployments, StatefulSets and DaemonSets."""
    services: Sequence[Document] = ()
    ingresses: Sequence[Document] = ()
    classes: Sequence[Document] = ()
    """IngressClasses."""
    routes: Sequence[Document] = ()
    """Ways to a Service that are not judged: routes of the Gateway API, TargetGroupBindings."""
    mesh: Mesh = field(default_factory=Mesh)
    profiles: Sequence[Document] = ()
    quotas: Sequence[Document] = ()
    pod_defaults: Sequence[Document] = ()
    secrets: frozenset[tuple[str, str]] = frozenset()
    """Namespace and name of the Secrets that are there, among those that PodDefaults name."""
    accounts: frozenset[tuple[str, str]] = frozenset()
    """The same of ServiceAccounts."""
    unread: Sequence[str] = ()
    """What the API server refused to show, a sentence each: all else proves nothing."""


@dataclass(frozen=True)
class Target:
    """Pods behind which the dashboard is, and whether they ask for a login themselves."""

    workload: Document
    guard: gateways.Guard
    what: str = "the dashboard"
    """What is behind, in a sentence."""

    def selects(self, service: Document) -> bool:
        """Whether a Service leads to these pods."""
        selector = (service.get("spec") or {}).get("selector") or {}
        here = service["metadata"].get("namespace") == self.workload["metadata"].get("namespace")
        return bool(here and selector) and gateways.within(selector, labels_of(self.workload))


def findings(seen: Seen, wanted: Kubeflow | None = None) -> list[str]:
    """Sentences about what must be corrected, the dashboard's first; none if all is well. `wanted`: what the file says."""
    unread = [f"{each}; without it nobody can say that there is no way past the login" for each in seen.unread]
    return [*unread, *_entrances(seen, wanted), *_profiles(seen), *_pod_defaults(seen)]


def targets(seen: Seen) -> list[Target]:
    """The gateways that lead to Kubeflow, and the dashboard, its web apps and notebooks, which know no login."""
    bare = [target for each in seen.workloads if (target := _bare(each))]
    behind = {_key(each) for each in seen.services if any(one.selects(each) for one in bare)}
    leading = gateways.leading(seen.mesh, seen.workloads, behind)
    return [Target(each, gateways.guard(seen.mesh, each)) for each in leading] + bare


def _bare(workload: Document) -> Target | None:
    """A web app of Kubeflow or a notebook; None for anything else."""
    labels = labels_of(workload)
    open_ = gateways.Guard(closed=False)
    for name in (labels.get("app"), labels.get("app.kubernetes.io/name")):
        if name in WEB_APPS and (name == DASHBOARD or workload["metadata"].get("namespace") == NAMESPACE):
            return Target(workload, open_, "the dashboard" if name == DASHBOARD else name)
    return Target(workload, open_, f"the notebook {labels[NOTEBOOK]}") if labels.get(NOTEBOOK) else None


def to_gateway(seen: Seen) -> list[Document]:
    """The Ingresses that lead to Kubeflow."""
    all_ = targets(seen)
    return [each for each in seen.ingresses if any(_targeted(each, seen, all_))]


def _entrances(seen: Seen, wanted: Kubeflow | None) -> Iterator[str]:
    all_ = targets(seen)
    if not any(each.what == Target.what for each in all_):
        yield (
            f"neither {DASHBOARD} nor Istio's ingress gateway is here; install Kubeflow first, or name its cluster with --context"
        )
        return
    reached = 0
    for ingress in seen.ingresses:
        for service, target in _targeted(ingress, seen, all_):
            reached += 1
            yield from _ingress(ingress, service, target, seen)
            if wanted and _is_alb(ingress, seen.classes):
                yield from _as_wanted(ingress, wanted)
    for target in all_:
        for service in (each for each in seen.services if target.selects(each)):
            reached += (service["spec"].get("type") or "ClusterIP") != "ClusterIP"
            yield from _service(service, target, seen.mesh)
        yield from _host_ports(target)
        yield from _routes(target, seen)
        yield from target.guard.warnings
    if wanted and not reached:
        yield f"nothing leads to https://{wanted.domain}; make an Ingress with a login: outlast kubeflow apply"


def _targeted(ingress: Document, seen: Seen, all_: Sequence[Target]) -> Iterator[tuple[Document, Target]]:
    """The Services to which an Ingress leads, and the pods behind them."""
    namespace = ingress["metadata"].get("namespace")
    names = {(namespace, name) for name in _backends(ingress)}
    aliases = [each["spec"].get("externalName") or "" for each in seen.services if _key(each) in names]
    for name, _, rest in (alias.partition(".") for alias in aliases):
        names.add((rest.partition(".")[0], name))
    for service in seen.services:
        if _key(service) in names:
            yield from ((service, target) for target in all_ if target.selects(service))


def _key(document: Document) -> tuple[str, str]:
    """Namespace and name."""
    return document["metadata"].get("namespace", ""), document["metadata"]["name"]


def _backends(ingress: Document) -> Iterator[str]:
    """The names of the Services of an Ingress, those in annotations of actions among them."""
    fields = ingress.get("spec") or {}
    backends = [fields.get("defaultBackend")]
    for rule in fields.get("rules") or ():
        backends += [path.get("backend") for path in (rule.get("http") or {}).get("paths") or ()]
    for backend in filter(None, backends):
        service = backend.get("service") or {}
        if (service.get("port") or {}).get("name") == "use-annotation":
            yield from _of_action(_annotations(ingress).get(f"{ALB}/actions.{service.get('name')}", ""))
        elif service.get("name"):
            yield str(service["name"])


def _of_action(text: str) -> Iterator[str]:
    action = _json(text)
    if isinstance(action, dict):
        forward = action.get("forwardConfig") or action.get("ForwardConfig") or {}
        for group in forward.get("targetGroups") or forward.get("TargetGroups") or ():
            if name := group.get("serviceName") or group.get("ServiceName"):
                yield str(name)


# An Ingress


def _ingress(ingress: Document, service: Document, target: Target, seen: Seen) -> Iterator[str]:
    if _is_alb(ingress, seen.classes):
        yield from _alb(ingress, service, target, seen.ingresses)
    else:
        yield from _other(ingress, target, nginx=_is_nginx(ingress, seen.classes))


def _is_alb(ingress: Document, classes: Sequence[Document]) -> bool:
    """Whether the AWS Load Balancer Controller acts on an Ingress. Its annotations say so only where there is no class."""
    if name := _class(ingress, classes):
        return _controller(name, classes) in _ALB_CONTROLLERS or name == "alb"
    return any(name.startswith(f"{ALB}/") for name in _annotations(ingress))


def _is_nginx(ingress: Document, classes: Sequence[Document]) -> bool:
    name = _class(ingress, classes)
    controller = _controller(name, classes)
    return controller == _NGINX_CONTROLLER or (not controller and (not name or "nginx" in name))


def _controller(name: str, classes: Sequence[Document]) -> str:
    """The controller of a class; empty if there is no such class."""
    return next((str((each.get("spec") or {}).get("controller", "")) for each in classes if each["metadata"]["name"] == name), "")


def _alb(ingress: Document, service: Document, target: Target, all_: Sequence[Document]) -> Iterator[str]:
    """A load balancer of AWS. Of the login, what the Service says counts before the Ingress; logins are for HTTPS alone.

    https://kubernetes-sigs.github.io/aws-load-balancer-controller/latest/guide/ingress/annotations/#authentication
    """
    name, annotations = identity(ingress), _annotations(ingress)
    ports = _ports(annotations)
    if ports is None:
        yield f'{name}: {ALB}/listen-ports is not understood; write [{{"HTTP": 80}}, {{"HTTPS": 443}}]'
        return
    plain = [port for protocol, port in ports if protocol == "HTTP"]
    secure = [port for protocol, port in ports if protocol == "HTTPS"]
    redirect = _redirect(ingress, all_)
    if plain and (redirect is None or redirect not in secure):
        open_ = ", ".join(map(str, plain))
        problem = (
            "where a load balancer asks for no login" if not target.guard.closed else "so that sessions can be read on the way"
        )
        remedy = f"redirect it with {ALB}/ssl-redirect: '443'" if 443 in secure else 'listen on HTTPS alone: [{"HTTPS": 443}]'
        yield f"{name}: port {open_} is HTTP, {problem}; {remedy}"
    if secure and not annotations.get(f"{ALB}/certificate-arn") and not _hosts(ingress):
        yield f"{name}: HTTPS has no certificate; add {ALB}/certificate-arn"
    annotations = {**annotations, **_annotations(service)}
    login = annotations.get(f"{ALB}/auth-type", "none")
    if login not in ("cognito", "oidc") and not target.guard.closed:
        remedy = f"add {ALB}/auth-type: cognito and auth-idp-cognito, as outlast kubeflow render prints them"
        yield f"{name} leads to {target.what} without a login{target.guard.reason}; {remedy}"
    if login in ("cognito", "oidc") and (secure or not plain):
        yield from _login(name, login, annotations)


def _login(name: str, login: str, annotations: Mapping[str, str]) -> Iterator[str]:
    """What is wrong with a load balancer's login."""
    key = f"{ALB}/auth-idp-{login}"
    needed = ("userPoolARN", "userPoolClientID", "userPoolDomain") if login == "cognito" else ("issuer", "secretName")
    idp = _json(annotations.get(key, ""))
    given = {str(one).lower(): value for one, value in idp.items()} if isinstance(idp, dict) else {}
    if absent := [one for one in needed if not given.get(one.lower())]:
        yield f"{name}: {key} lacks {', '.join(absent)}, so the load balancer is not made or has no login; add it"
    behaviour = annotations.get(f"{ALB}/auth-on-unauthenticated-request", "authenticate")
    if behaviour not in ("authenticate", "deny"):
        yield f"{name}: {ALB}/auth-on-unauthenticated-request is {behaviour}, so a login is not needed; set it to authenticate"


def _as_wanted(ingress: Document, wanted: Kubeflow) -> Iterator[str]:
    """What differs from the file."""
    name, annotations = identity(ingress), _annotations(ingress)
    certificates = annotations.get(f"{ALB}/certificate-arn", "")
    if certificates and wanted.certificate_arn not in [each.strip() for each in certificates.split(",")]:
        yield f"{name} has the certificate {certificates}, and certificateArn is {wanted.certificate_arn}; correct one of them"
    if (hosts := _hosts(ingress)) and wanted.domain not in hosts:
        yield f"{name} is for {', '.join(sorted(hosts))}, and domain is {wanted.domain}; correct one of them"
    idp = _json(annotations.get(f"{ALB}/auth-idp-cognito", ""))
    given = {str(one).lower(): value for one, value in idp.items()} if isinstance(idp, dict) else {}
    cognito = wanted.cognito
    for option, there, here in (
        ("cognitoUserPoolArn", given.get("userpoolarn"), cognito.cognito_user_pool_arn),
        ("cognitoAppClientId", given.get("userpoolclientid"), cognito.cognito_app_client_id),
        ("cognitoUserPoolDomain", given.get("userpooldomain"), cognito.cognito_user_pool_domain),
    ):
        if there and there != here:
            yield f"{name} logs in with {there}, and {option} is {here}; correct one of them"


def _other(ingress: Document, target: Target, *, nginx: bool) -> Iterator[str]:
    """An Ingress of nginx or of another controller."""
    name, annotations = identity(ingress), _annotations(ingress)
    login = annotations.get(f"{_NGINX}/auth-url") or annotations.get(f"{_NGINX}/auth-type") in ("basic", "digest")
    if not (nginx and login) and not target.guard.closed:
        remedy = "give the gateway one (oauth2-proxy), or use a load balancer of AWS with Cognito"
        yield f"{name} leads to {target.what} without a login{target.guard.reason}; {remedy}"
    if not (ingress.get("spec") or {}).get("tls"):
        yield f"{name} has no TLS, so that sessions can be read on the way; add spec.tls"
    elif annotations.get(f"{_NGINX}/ssl-redirect") == "false":
        yield f"{name}: {_NGINX}/ssl-redirect is false, so HTTP is served as well; remove it"


def _ports(annotations: Mapping[str, str]) -> list[tuple[str, int]] | None:
    """Protocols and ports on which a load balancer listens; None if they are not understood."""
    text = annotations.get(f"{ALB}/listen-ports")
    if text is None:
        return [("HTTPS", 443)] if annotations.get(f"{ALB}/certificate-arn") else [("HTTP", 80)]
    found = _json(text)
    if not isinstance(found, list) or not found or not all(isinstance(each, dict) for each in found):
        return None
    ports = [(str(protocol), port) for each in found for protocol, port in each.items()]
    return ports if all(protocol in ("HTTP", "HTTPS") and isinstance(port, int) for protocol, port in ports) else None


def _redirect(ingress: Document, all_: Sequence[Document]) -> int | None:
    """The port to which HTTP is redirected: one Ingress of a group says it for all."""
    group = _annotations(ingress).get(f"{ALB}/group.name")
    others = [each for each in all_ if group and _annotations(each).get(f"{ALB}/group.name") == group]
    for each in (ingress, *others):
        if (found := _annotations(each).get(f"{ALB}/ssl-redirect", "")).isdecimal():
            return int(found)
    return None


# Ports


def _service(service: Document, target: Target, mesh: Mesh) -> Iterator[str]:
    """A Service that opens a port by itself, beside every Ingress."""
    meta, fields = service["metadata"], service["spec"]
    type_ = fields.get("type") or "ClusterIP"
    to_cluster_ip = f'kubectl -n {meta["namespace"]} patch service {meta["name"]} -p \'{{"spec": {{"type": "ClusterIP"}}}}\''
    where = {"LoadBalancer": "by a load balancer of its own", "NodePort": "on a port of every node"}.get(type_)
    if not where and fields.get("externalIPs"):
        where, to_cluster_ip = f"at {', '.join(fields['externalIPs'])}", "remove spec.externalIPs"
    if where and not target.guard.closed:
        yield f"{identity(service)} opens {target.what} {where}, past every login{target.guard.reason}; close it: {to_cluster_ip}"
    if type_ == "LoadBalancer" and target.guard.closed and not _annotations(service).get(_TLS_AT_BALANCER):
        for gateway in gateways.plain(mesh, target.workload):
            remedy = "add tls: {httpsRedirect: true} to that server"
            yield f"{identity(gateway)} serves HTTP without redirect, and {identity(service)} opens it; {remedy}"


def _host_ports(target: Target) -> Iterator[str]:
    """Pods that open a port of their node."""
    spec = ((target.workload["spec"].get("template") or {}).get("spec")) or {}
    ports = [port for each in spec.get("containers") or () for port in each.get("ports") or () if port.get("hostPort")]
    if (spec.get("hostNetwork") or ports) and not target.guard.closed:
        yield (
            f"{identity(target.workload)} opens {target.what} on its nodes' own network, past every login{target.guard.reason}; "
            "remove hostNetwork and hostPort"
        )


def _routes(target: Target, seen: Seen) -> Iterator[str]:
    """Ways past the Ingresses that are not understood, and so count as open."""
    names = {_key(each) for each in seen.services if target.selects(each)}
    for each in seen.routes if not target.guard.closed else ():
        if not names.isdisjoint(_led_to(each)):
            yield (
                f"{identity(each)} leads to {target.what}, and Outlast cannot say whether with a login{target.guard.reason}; "
                "give the gateway one (oauth2-proxy), or remove this way"
            )


def _led_to(route: Document) -> Iterator[tuple[str, str]]:
    """Namespace and name of the Services of a route of the Gateway API, or of a TargetGroupBinding that is not of an Ingress."""
    namespace, fields = route["metadata"].get("namespace", ""), route.get("spec") or {}
    if route["kind"] == _BINDING:
        if not any(name.startswith(_OF_CONTROLLER) for name in route["metadata"].get("labels") or {}):
            yield namespace, str((fields.get("serviceRef") or {}).get("name", ""))
        return
    for rule in fields.get("rules") or ():
        for backend in rule.get("backendRefs") or ():
            yield backend.get("namespace") or namespace, str(backend.get("name", ""))


# Profiles and PodDefaults


def _profiles(seen: Seen) -> Iterator[str]:
    limited = {each["metadata"].get("namespace") for each in seen.quotas}
    for profile in seen.profiles:
        name = profile["metadata"]["name"]
        if not ((profile.get("spec") or {}).get("resourceQuotaSpec") or {}).get("hard") and name not in limited:
            yield f"Profile {name} has no quota, so its notebooks and jobs may take the whole cluster; give it one"


def _pod_defaults(seen: Seen) -> Iterator[str]:
    for each in seen.pod_defaults:
        namespace = str(each["metadata"].get("namespace"))
        for secret in sorted(secrets(each)):
            if (namespace, secret) not in seen.secrets:
                yield (
                    f"{identity(each)} needs the Secret {secret}, which is not there, so no pod that asks for it starts; "
                    f"make it: kubectl -n {namespace} create secret generic {secret} --from-literal=NAME=VALUE"
                )
        account = (each.get("spec") or {}).get("serviceAccountName")
        if account and (namespace, account) not in seen.accounts:
            yield f"{identity(each)} needs the ServiceAccount {account}, which is not there; run outlast kubeflow apply"


def secrets(pod_default: Document) -> set[str]:
    """Names of the Secrets without which pods with this PodDefault do not start."""
    fields = pod_default.get("spec") or {}
    keys = [(each.get("valueFrom") or {}).get("secretKeyRef") for each in fields.get("env") or ()]
    whole = [each.get("secretRef") for each in fields.get("envFrom") or ()]
    mounted = [each.get("secret") for each in fields.get("volumes") or ()]
    found = [each for each in (*keys, *whole, *mounted) if each and not each.get("optional")]
    return {str(each.get("name") or each.get("secretName")) for each in found}


def _annotations(document: Document) -> Mapping[str, str]:
    return document["metadata"].get("annotations") or {}


def _class(ingress: Document, classes: Sequence[Document]) -> str:
    """The class of an Ingress: the one it names, or the cluster's default."""
    named = (ingress.get("spec") or {}).get("ingressClassName") or _annotations(ingress).get("kubernetes.io/ingress.class")
    default = "ingressclass.kubernetes.io/is-default-class"
    return str(named or next((each["metadata"]["name"] for each in classes if _annotations(each).get(default) == "true"), ""))


def _hosts(ingress: Document) -> set[str]:
    fields = ingress.get("spec") or {}
    named = {str(rule["host"]) for rule in fields.get("rules") or () if rule.get("host")}
    return named | {str(host) for each in fields.get("tls") or () for host in each.get("hosts") or ()}


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return None
