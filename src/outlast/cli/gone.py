"""Removed commands and options, with their replacements. An entry stays for one minor version."""

from __future__ import annotations

from collections.abc import Sequence

_ETCD = "kubectl apply -f examples/kubernetes/etcd-server.yaml makes one; a job with an operator needs none"
_OTHER_CLOUDS = "GKE and AKS taint their nodes themselves, and the operator acts on that (docs/guide/spot.md)"
_SPARK = "Spark on Kubernetes is started by spark-submit or in a pod of the cluster, as in examples/spark (docs/guide/spark.md)"
GONE: dict[str, str] = {
    "cluster create": "`eksctl create cluster -f examples/aws/workshop.yaml` makes it (docs/guide/aws.md)",
    "cluster delete": "`eksctl delete cluster -f FILE` deletes it, once its network is empty (docs/guide/aws.md has the order)",
    "cluster plan": "examples/aws has files for eksctl, CloudFormation, kubectl and Helm (docs/guide/aws.md)",
    "cluster status": "`eksctl get nodegroup --cluster NAME` and `kubectl get nodes` show it",
    "cluster": "eksctl creates and deletes clusters, from the files in examples/aws (docs/guide/aws.md)",
    "dashboard cloudwatch": "`aws cloudformation deploy` of examples/aws/stacks/cloudwatch.yaml makes it (docs/guide/aws.md)",
    "dashboard": "CloudFormation creates it, from examples/aws/stacks/cloudwatch.yaml (docs/guide/aws.md)",
    "data get --connections": "a file comes over one connection; leave the option out",
    "data list": "`outlast data get` without a name lists the datasets",
    "data prepare --claim": _SPARK,
    "data prepare --context": _SPARK,
    "data prepare --follow": _SPARK,
    "data prepare --image": _SPARK,
    "data prepare --job": _SPARK,
    "data prepare --namespace": _SPARK,
    "data prepare --print": _SPARK,
    "data prepare --secret": _SPARK,
    "data prepare -f": _SPARK,
    "data prepare -n": _SPARK,
    "image build": "`docker build --file images/Dockerfile --target cpu --tag NAME .` makes it (docs/guide/images.md)",
    "image push": "`docker push NAME`; `aws ecr get-login-password` logs in to Amazon's registry (docs/guide/images.md)",
    "image": "four docker commands replace it (docs/guide/images.md)",
    "install --etcd": _ETCD,
    "install --etcd-for": _ETCD,
    "install --etcd-members": _ETCD,
    "install --etcd-storage": _ETCD,
    "install --node-watch-queue": "an EventBridge rule of the account sends notices to the queue (docs/guide/spot.md)",
    "kubeflow": "edit the files of examples/kubeflow and apply them with kubectl (docs/guide/kubeflow.md)",
    "node-watch --ahead": "maintenance is acted on 15 minutes before it begins; leave the option out",
    "node-watch --cloud": f"it watches machines of AWS; {_OTHER_CLOUDS}",
    "node-watch --dry-run": "its log says what it does; leave the option out",
    "node-watch --log": "its log is text; leave the option out",
    "node-watch --notice-url": "name another address of the metadata service with --metadata",
    "node-watch --port": "it has no probes and needs no port; leave the option out",
    "node-watch --queue": "an EventBridge rule of the account sends notices to the queue (docs/guide/spot.md)",
    "notebook --on": "apply examples/notebook, or examples/kubeflow/notebook.yaml, with kubectl (docs/guide/notebooks.md)",
    "pipeline": "a step runs outlast submit --wait, as in examples/pipelines for Argo and Kubeflow (docs/guide/pipelines.md)",
    "simulate": "it has no replacement; `outlast report` shows what interruptions have cost a run",
    "version": "`outlast --version` prints it",
    "volume create": "`aws cloudformation deploy` of examples/aws/stacks/efs.yaml makes it (docs/guide/aws.md)",
    "volume delete": "`aws cloudformation delete-stack` deletes it, once no pod uses it (docs/guide/aws.md has the order)",
    "volume status": "`aws cloudformation describe-stacks` and `kubectl get pvc` show it",
    "volume": "CloudFormation creates and deletes file systems, from examples/aws/stacks (docs/guide/aws.md)",
}
"""Sentences about replacements, keyed by command (`"cluster create"`) or by command and option (`"install --etcd"`)."""


def sentence(args: Sequence[str]) -> str | None:
    """Return the sentence about the replacement if the arguments contain a removed command or option; else None."""
    words = [word.partition("=")[0] for word in args]
    for gone in sorted(GONE, key=len, reverse=True):  # "cluster create" before "cluster"
        verbs = [word for word in gone.split() if not word.startswith("-")]
        options = [word for word in gone.split() if word.startswith("-")]
        if words[: len(verbs)] == verbs and all(option in words for option in options):
            return f"outlast {gone} has been removed: {GONE[gone]}"
    return None
