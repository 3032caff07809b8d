"""`outlast kubeflow`: what Outlast adds to a Kubeflow that is there, and whether its dashboard asks for a login."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from outlast.cli import show, terminal
from outlast.cli.which import ContextOption
from outlast.errors import OutlastError

if TYPE_CHECKING:
    from outlast.kubeflow import Kubeflow

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode=None,
    help="Notebook images, profiles and a safe dashboard for a Kubeflow that is there.",
)
KubeflowFile = Annotated[Path, typer.Argument(metavar="FILE", help="A kubeflow.yaml.", show_default=False)]


@app.callback()
def group() -> None:
    """Notebook images, profiles and a safe dashboard for a Kubeflow that is there."""


@app.command()
def render(
    file: KubeflowFile,
    values: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Write the values of AWS's distribution of Kubeflow below DIR instead, such as a copy of it.",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Print what Outlast adds to a Kubeflow: the Ingress with Cognito's login, profiles, namespaces, PodDefaults, rights.

    Nothing is asked of AWS or of a cluster. Every Ingress has a login: there is no way to print one without. With --values the
    same certificate and user pool are written as params.env and values.yaml where AWS's distribution reads them, the settings
    of kfctl for older ones, and a component of kustomize that has Kubeflow run on the node group.

    \b
    Examples:
      outlast kubeflow render kubeflow.yaml
      outlast kubeflow render kubeflow.yaml | kubectl apply --server-side -f -
      outlast kubeflow render kubeflow.yaml --values kubeflow-manifests
    """
    from outlast import kubeflow
    from outlast.cli import render as rendered
    from outlast.kubeflow import documents

    wanted = kubeflow.load(file)
    if not values:
        print(rendered.text(documents.render(wanted)), end="")
        return
    written = _write(wanted, values)
    terminal.say(f"wrote {len(written)} files to {values}: {', '.join(written)}")


@app.command()
def apply(
    file: KubeflowFile,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only say what would be changed, as the API server sees it.")
    ] = False,
    context: ContextOption = None,
) -> None:
    """Bring that into a cluster, and add the images to the form for notebooks.

    The form is the ConfigMap of Kubeflow's Jupyter web app, whatever suffix its name has. Lines are added to it and all others
    stay, comments too; the web app starts again only if something changed. Doing it again changes nothing. Nothing is deleted,
    and what others have made under the same name is an error. An Ingress of another that leads to the dashboard stays, and ours
    is not made beside it.

    \b
    Examples:
      outlast kubeflow apply kubeflow.yaml --dry-run
      outlast kubeflow apply kubeflow.yaml
      outlast kubeflow apply kubeflow.yaml --context production
    """
    from outlast import kube, kubeflow
    from outlast.cluster import kubeflow as there

    wanted = kubeflow.load(file)
    cluster = kube.connect(context)
    try:
        for done in there.bring(cluster, wanted, dry_run=dry_run):
            print(done, flush=True)
    finally:
        cluster.close()


@app.command()
def check(
    file: Annotated[
        Path | None, typer.Argument(metavar="[FILE]", help="A kubeflow.yaml, to compare with.", show_default=False)
    ] = None,
    aws: Annotated[bool, typer.Option(help="Ask AWS about the certificate and the user pool of FILE.")] = True,
    request: Annotated[
        bool, typer.Option("--request", help="Also send a request without a login to the domain of FILE, by HTTPS and HTTP.")
    ] = False,
    context: ContextOption = None,
) -> None:
    """Say how the dashboard of a cluster can be reached without a login; exit with 1 if it can, or if anything else is wrong.

    Looks at each Ingress, and each Service of type LoadBalancer or NodePort, that leads to Istio's gateway or to the dashboard:
    a login at the load balancer, or one of Istio's (oauth2-proxy, authservice), HTTPS and nothing else. Also at profiles without
    quota, and PodDefaults whose Secret is missing. With FILE, AWS is asked whether the certificate is issued and for this domain,
    and whether the app client has a secret and the load balancer's callback URL. Changes nothing.

    \b
    Examples:
      outlast kubeflow check
      outlast kubeflow check kubeflow.yaml
      outlast kubeflow check kubeflow.yaml --request
      outlast kubeflow check kubeflow.yaml --no-aws --context production
    """
    from outlast import kube, kubeflow
    from outlast.cluster import kubeflow as there
    from outlast.kubeflow import entrances

    wanted = kubeflow.load(file) if file else None
    if request and not wanted:
        raise OutlastError("--request needs the domain; give a kubeflow.yaml")
    cluster = kube.connect(context)
    try:
        found = entrances.findings(there.look(cluster), wanted)
    finally:
        cluster.close()
    if wanted and aws:
        try:
            found += _of_aws(wanted)
        except OutlastError as error:  # what the cluster has is said anyway
            found.append(f"certificate and user pool could not be looked at: {error}")
    if wanted and request:
        found += filter(None, (there.request(f"{scheme}://{wanted.domain}/") for scheme in ("https", "http")))
    found = list(dict.fromkeys(found))
    for sentence in found:
        print(sentence)
    if found:
        terminal.say(f"{show.count(len(found), 'finding')}")
        raise typer.Exit(1)
    terminal.say("no way to the dashboard without a login was found")


def _of_aws(wanted: Kubeflow) -> list[str]:
    """What is wrong with the certificate and the user pool; said aloud if nobody can be asked."""
    from outlast.cloud import aws, clusters, logins
    from outlast.kubeflow import login

    if not aws.has_credentials():
        terminal.say("AWS is not asked about certificate and user pool: there are no credentials; --no-aws says nothing about it")
        return []
    account = clusters.account(wanted.region)
    if account != wanted.certificate.account:
        return [
            f"the credentials are of account {account}, and certificate and user pool of {wanted.certificate.account}, "
            "so they are not looked at; set AWS_PROFILE, or say --no-aws"
        ]
    cognito = wanted.cognito
    certificate = logins.certificate(wanted.certificate_arn, wanted.region)
    pool = logins.pool(cognito.pool_id, cognito.cognito_app_client_id, cognito.pool.region)
    return login.findings(wanted, certificate, pool, time.time())


def _write(wanted: Kubeflow, to: Path) -> list[str]:
    """Write the values, each file as a whole; returns their names."""
    from outlast import files
    from outlast.cli import render as rendered
    from outlast.kubeflow import values

    made = values.files(wanted)
    for name, content in made.items():
        path = to / name
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            files.replace(path, content if isinstance(content, str) else rendered.text([content]))
        except OSError as error:
            raise OutlastError(f"{path} cannot be written: {error.strerror}; give another directory with --values") from error
    return list(made)
