"""A Kubeflow in a cluster: read for `outlast kubeflow check`, completed for `outlast kubeflow apply`.

Documents are applied whole (server-side), so that applying again changes nothing. What has one of our names and is not ours
stays, and is an error before anything is changed. Nothing is ever deleted. The form for notebooks is changed as text and under
the condition that nobody has written it in between; a mark on it and on the web app says whether the web app has read it, so that
a command that was cut off between the two is completed by the next.
"""

from __future__ import annotations

import hashlib
import http.client
import re
import ssl
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import yaml

from outlast import contract
from outlast.cluster.installation import Done
from outlast.errors import Conflict, Forbidden, NotServed, OutlastError
from outlast.kube import kinds, without_server_fields
from outlast.kube.kinds import Kind, kind_of
from outlast.kubeflow import documents, entrances, spawner
from outlast.kubeflow.gateways import Document, Mesh

if TYPE_CHECKING:
    from outlast.kube import Cluster
    from outlast.kubeflow import Kubeflow

WEB_APP = "jupyter-web-app"
MARK = f"{contract.GROUP}/spawner"
"""Annotation of the form and of the web app's pods: the form as we left it."""
_WORKLOADS = (kinds.DEPLOYMENT, kinds.STATEFUL_SET, kinds.DAEMON_SET)
_OWN = (*_WORKLOADS, kinds.SERVICE, kinds.INGRESS, kinds.INGRESS_CLASS, kinds.QUOTA)
"""Kinds that every Kubernetes has."""
_MESHES = ("networking.istio.io", "security.istio.io", "gateway.networking.k8s.io")
_VERSIONS = ("v1", "v1beta1")
_TRIES = 5
_ANSWER_S = 20.0


# Looking


def look(cluster: Cluster) -> entrances.Seen:
    """What the cluster has that matters for its dashboard, and what of it may not be read. Raises ClusterError."""
    unread: list[str] = []

    def all_(*several: Kind) -> list[Document]:
        found = []
        for kind in several:
            try:
                found += _everywhere(cluster, kind)
            except Forbidden as error:
                unread.append(str(error))
        return found

    def there(kind: Kind, named: set[tuple[str, str]]) -> frozenset[tuple[str, str]]:
        try:
            return _there(cluster, kind, named)
        except Forbidden as error:
            unread.append(str(error))
            return frozenset(named)

    pod_defaults = all_(kinds.POD_DEFAULT)
    secrets = {(each["metadata"]["namespace"], name) for each in pod_defaults for name in entrances.secrets(each)}
    accounts = {(each["metadata"]["namespace"], each["spec"].get("serviceAccountName", "")) for each in pod_defaults}
    return entrances.Seen(
        workloads=all_(*_WORKLOADS),
        services=all_(kinds.SERVICE),
        ingresses=all_(kinds.INGRESS),
        classes=all_(kinds.INGRESS_CLASS),
        routes=all_(kinds.HTTP_ROUTE, kinds.TLS_ROUTE, kinds.TCP_ROUTE, kinds.TARGET_GROUP_BINDING),
        mesh=Mesh(
            gateways=all_(kinds.GATEWAY),
            virtual_services=all_(kinds.VIRTUAL_SERVICE),
            policies=all_(kinds.AUTHORIZATION_POLICY),
            authentications=all_(kinds.REQUEST_AUTHENTICATION),
            filters=all_(kinds.ENVOY_FILTER),
            lenient=_lenient(cluster, unread),
        ),
        profiles=all_(kinds.PROFILE),
        quotas=all_(kinds.QUOTA),
        pod_defaults=pod_defaults,
        secrets=there(kinds.SECRET, secrets),
        accounts=there(kinds.SERVICE_ACCOUNT, accounts),
        unread=unread,
    )


def _lenient(cluster: Cluster, unread: list[str]) -> frozenset[str]:
    """The providers with `failOpen` in the configuration of Istio's control plane."""
    try:
        found = cluster.find(kinds.CONFIG_MAP, "istio", namespace=documents.GATEWAY_NAMESPACE) or {}
        mesh = yaml.safe_load((found.get("data") or {}).get("mesh", "")) or {}
    except Forbidden as error:
        unread.append(str(error))
        return frozenset()
    except yaml.YAMLError:
        unread.append(f"ConfigMap istio in {documents.GATEWAY_NAMESPACE} has a mesh that is not YAML; correct it")
        return frozenset()
    providers = [each for each in mesh.get("extensionProviders") or () if isinstance(each, dict)]
    configs = [(each.get("name"), config) for each in providers for config in each.values() if isinstance(config, dict)]
    return frozenset(str(name) for name, config in configs if config.get("failOpen"))


def _everywhere(cluster: Cluster, kind: Kind) -> list[Document]:
    """All documents of a kind, in v1 where its beta is no longer served; none if the cluster does not know it.

    Items of a list have no kind; they get theirs. Raises NotServed if Kubernetes itself does not serve one of its own kinds.
    """
    versions = dict.fromkeys((kind.api_version, *(f"{kind.group}/{each}" for each in _VERSIONS if kind.group in _MESHES)))
    for version in (replace(kind, api_version=each) for each in versions):
        try:
            found = cluster.list_(version, everywhere=True)
        except NotServed:
            if kind in _OWN:
                raise
            continue
        return [{**each, "kind": kind.kind, "apiVersion": version.api_version} for each in found]
    return []


def _there(cluster: Cluster, kind: Kind, named: set[tuple[str, str]]) -> frozenset[tuple[str, str]]:
    """Which of these documents, by namespace and name, exist."""
    return frozenset(each for each in named if each[1] and cluster.find(kind, each[1], namespace=each[0]))


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *_: Any) -> None:
        """Follow nothing: where we are sent is the answer."""


def request(url: str) -> str:
    """What is wrong with the answer of a dashboard to somebody who has not logged in; empty if nothing is.

    `url`: https://DOMAIN must send to a login or refuse; http://DOMAIN must send to HTTPS, refuse, or not be there.
    """
    secure = url.startswith("https:")
    opener = urllib.request.build_opener(_NoRedirect, urllib.request.ProxyHandler({}))
    try:
        with opener.open(url, timeout=_ANSWER_S) as answer:
            return f"{url} answers {answer.status} without a login; close it: the findings about its cluster say where"
    except urllib.error.HTTPError as error:
        error.close()
        if _is_login(url, error.code, error.headers.get("Location") or ""):
            return ""
        if 300 <= error.code < 400:
            return f"{url} sends to {error.headers.get('Location')}, which is no login by HTTPS; correct the redirect"
        return f"{url} answers {error.code}, so it is not known whether it asks for a login; look at its load balancer"
    except (OSError, http.client.HTTPException) as error:
        if not secure:
            return ""
        why = getattr(error, "reason", error)
        if isinstance(why, ssl.SSLCertVerificationError):
            return f"{url} has a certificate that browsers reject ({why.verify_message}); correct certificateArn or domain"
        return f"{url} cannot be reached ({why}); point its name in DNS to the load balancer, or ask from inside its network"


def _is_login(url: str, code: int, location: str) -> bool:
    """Whether an answer refuses people who have not logged in, or sends them to a login (from HTTP: to HTTPS).

    On the dashboard's own host only paths of a login are one: its pages send people on as well.
    """
    asked, to = urlsplit(url), urlsplit(location)
    if not 300 <= code < 400:
        return code in (401, 403, 426) or (code == 404 and asked.scheme == "http")
    if asked.scheme == "http" or (to.netloc and to.hostname != asked.hostname):
        return to.scheme == "https"
    return to.scheme in ("", "https") and bool(re.match(r"/(oauth2|dex|authservice|login)(/|$)", to.path))


# Completing


def bring(cluster: Cluster, wanted: Kubeflow, *, dry_run: bool = False) -> Iterator[Done]:
    """Apply what `kubeflow.yaml` says, and yield what changed, one document after the other.

    Raises OutlastError before anything is changed if Kubeflow is not there or a name is another's; ClusterError.
    """
    rendered = documents.render(wanted)
    there = _check(cluster, rendered)
    form = _form(cluster) if wanted.spawner.options else None
    if form:
        spawner.added(form[1]["data"][spawner.KEY], wanted.spawner.options)  # a form that is not understood is an error now
    coming: set[str] = set()
    """Namespaces that a dry run would create: the server cannot try to create anything in them."""
    for document, old in zip(rendered, there, strict=True):
        meta = document["metadata"]
        if document["kind"] == kinds.INGRESS.kind and old is None and (others := _ways_in(cluster)):
            yield Done("kept", document, f"{', '.join(others)} leads to the dashboard already; outlast kubeflow check judges it")
            continue
        if old is not None and _of_spark(document) and not _ours(old):
            yield Done("kept", document, "somebody else made it")
            continue
        if dry_run and meta.get("namespace") in coming:
            yield Done("created", document)
            continue
        if old is None and document["kind"] == kinds.NAMESPACE.kind:
            coming.add(meta["name"])
        made = cluster.apply(document, dry_run=dry_run)
        same = old is not None and without_server_fields(old) == without_server_fields(made)
        yield Done("created" if old is None else "unchanged" if same else "changed", document)
    if form:
        yield from _offer(cluster, form[0], form[1], wanted.spawner.options, dry_run=dry_run)


def _check(cluster: Cluster, rendered: Sequence[Document]) -> list[Document | None]:
    """The documents as they are. Raises OutlastError if one is another's, or Kubeflow is not there."""
    for kind in (kinds.PROFILE, kinds.POD_DEFAULT):
        if any(each["kind"] == kind.kind for each in rendered) and not cluster.serves(kind):
            raise OutlastError(
                f"this cluster knows no {kind.kind} ({kind.resource}); install Kubeflow first, or name another --context"
            )
    found = []
    for each in rendered:
        meta = each["metadata"]
        old = cluster.find(kind_of(each), meta["name"], namespace=meta.get("namespace"))
        if old is not None:
            _check_owner(each, old)
        found.append(old)
    return found


def _check_owner(document: Document, old: Document) -> None:
    """Raises OutlastError if what is there belongs to somebody else."""
    name = document["metadata"]["name"]
    if document["kind"] == kinds.PROFILE.kind:
        owner, has = document["spec"]["owner"]["name"], ((old.get("spec") or {}).get("owner") or {}).get("name")
        if has != owner:
            raise OutlastError(f"Profile {name} belongs to {has}, and not to {owner}; correct owner, or choose another name")
    elif document["kind"] == kinds.NAMESPACE.kind:
        owner, has = document["metadata"]["annotations"]["owner"], (old["metadata"].get("annotations") or {}).get("owner")
        if has != owner:
            raise OutlastError(
                f"the namespace {name} is there and belongs to {has or 'no profile'}, so Kubeflow would refuse the profile; "
                f"choose another name, or: kubectl annotate namespace {name} owner={owner}"
            )
    elif not _ours(old) and not _of_spark(document):
        where = f" in {document['metadata']['namespace']}" if "namespace" in document["metadata"] else ""
        raise OutlastError(f"{document['kind']} {name}{where} is there and not Outlast's; choose another name, or delete it")


def _ours(document: Document) -> bool:
    return bool((document["metadata"].get("labels") or {}).get("app.kubernetes.io/part-of") == "outlast")


def _of_spark(document: Document) -> bool:
    """Whether this is of the account of Spark's drivers, which has had this name for long: one that is there is used as it is."""
    return bool(document["metadata"].get("labels", {}).get("app.kubernetes.io/component") == "spark")


def _ways_in(cluster: Cluster) -> list[str]:
    """The Ingresses of others that lead to the dashboard."""
    seen = entrances.Seen(
        workloads=[each for kind in _WORKLOADS for each in _everywhere(cluster, kind)],
        services=_everywhere(cluster, kinds.SERVICE),
        ingresses=_everywhere(cluster, kinds.INGRESS),
    )
    found = (each["metadata"] for each in entrances.to_gateway(seen))
    return [f"Ingress {each['name']} in {each['namespace']}" for each in found if each["name"] != documents.INGRESS]


# The form for notebooks


def _form(cluster: Cluster) -> tuple[Document, Document]:
    """The web app for notebooks, and the ConfigMap with its form, whatever kustomize has called it."""
    all_ = cluster.list_(kinds.DEPLOYMENT, namespace=documents.NAMESPACE)
    labels = ("app", "app.kubernetes.io/name")
    found = [each for each in all_ if any((each["metadata"].get("labels") or {}).get(label) == WEB_APP for label in labels)]
    for app in found:
        for volume in app["spec"]["template"]["spec"].get("volumes") or ():
            name = (volume.get("configMap") or {}).get("name")
            config = cluster.find(kinds.CONFIG_MAP, name, namespace=documents.NAMESPACE) if name else None
            if config and spawner.KEY in (config.get("data") or {}):
                return app, config
    raise OutlastError(
        f"there is no {WEB_APP} with {spawner.KEY} in namespace {documents.NAMESPACE}; "
        "install Kubeflow's Jupyter web app, or remove spawner from the file"
    )


def _offer(
    cluster: Cluster, app: Document, config: Document, options: Mapping[str, Sequence[str]], *, dry_run: bool
) -> Iterator[Done]:
    """Add images to the form, and have the web app read it if it has not yet."""
    name = config["metadata"]["name"]
    for attempt in range(_TRIES):
        text = config["data"][spawner.KEY]
        new = [image for images in spawner.missing(text, options).values() for image in images]
        if not new:
            break
        mark = _digest(changed := spawner.added(text, options))
        meta = {"annotations": {MARK: mark}, "resourceVersion": config["metadata"]["resourceVersion"]}
        change = {"metadata": meta, "data": {spawner.KEY: changed}}
        try:
            if not dry_run:
                config = cluster.patch(kinds.CONFIG_MAP, name, change, namespace=documents.NAMESPACE)
            break
        except Conflict:
            if attempt == _TRIES - 1:
                raise
            config = cluster.get(kinds.CONFIG_MAP, name, namespace=documents.NAMESPACE)
    named = _typed(config, kinds.CONFIG_MAP)
    yield Done("changed", named, f"offers {', '.join(new)}") if new else Done("unchanged", named)
    mark = (config["metadata"].get("annotations") or {}).get(MARK, "")
    template = (app["spec"]["template"].get("metadata") or {}).get("annotations") or {}
    stale = bool(new) if dry_run else bool(mark) and template.get(MARK) != mark
    if stale and not dry_run:
        again = {"spec": {"template": {"metadata": {"annotations": {MARK: mark}}}}}
        cluster.patch(kinds.DEPLOYMENT, app["metadata"]["name"], again, namespace=documents.NAMESPACE)
    named = _typed(app, kinds.DEPLOYMENT)
    yield Done("changed", named, "starts again, and reads the form") if stale else Done("unchanged", named)


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _typed(document: Document, kind: Kind) -> Document:
    """Items of a list have no kind."""
    return {**document, "kind": kind.kind}
