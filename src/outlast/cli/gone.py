"""Commands and options that are no more, each with what to do now. An entry stays for one minor version."""

from __future__ import annotations

from collections.abc import Sequence

_SPARK = "Spark on Kubernetes is started by spark-submit or in a pod of the cluster, as in examples/spark (docs/guide/spark.md)"

GONE: dict[str, str] = {
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
    "kubeflow": "edit the files of examples/kubeflow and apply them with kubectl (docs/guide/kubeflow.md)",
    "notebook --on": "apply examples/notebook, or examples/kubeflow/notebook.yaml, with kubectl (docs/guide/notebooks.md)",
    "pipeline": "a step runs outlast submit --wait, as in examples/pipelines for Argo and Kubeflow (docs/guide/pipelines.md)",
}
"""A command (`"cluster create"`), or a command with an option (`"install --etcd"`), and one sentence for its users."""


def sentence(args: Sequence[str]) -> str | None:
    """What to do instead of the command that these arguments ask for, if it is gone."""
    words = [word.partition("=")[0] for word in args]
    for gone, instead in GONE.items():
        verbs = [word for word in gone.split() if not word.startswith("-")]
        options = [word for word in gone.split() if word.startswith("-")]
        if words[: len(verbs)] == verbs and all(option in words for option in options):
            return f"outlast {gone} is no more: {instead}"
    return None
