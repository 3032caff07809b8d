"""The kinds of objects that Outlast uses, with their API paths. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from outlast.base.errors import OutlastError
from outlast.job import contract


@dataclass(frozen=True)
class Kind:
    api_version: str
    """The API version, such as `batch/v1`."""
    kind: str
    plural: str
    """The kind's name in URL paths, such as `pods`."""
    namespaced: bool = True

    @property
    def group(self) -> str:
        """The API group, such as `batch`; empty for the core group."""
        return self.api_version.rpartition("/")[0]

    @property
    def root(self) -> str:
        """The URL path of the group and version, such as `apis/batch/v1`."""
        return f"apis/{self.api_version}" if "/" in self.api_version else f"api/{self.api_version}"

    @property
    def resource(self) -> str:
        """The kind's name in messages from Kubernetes, such as `jobs.batch`."""
        return f"{self.plural}.{self.group}" if self.group else self.plural

    def __str__(self) -> str:
        return self.kind

    def document(self, metadata: Mapping[str, Any], **fields: Any) -> dict[str, Any]:
        return {"apiVersion": self.api_version, "kind": self.kind, "metadata": metadata, **fields}


POD = Kind("v1", "Pod", "pods")
SERVICE = Kind("v1", "Service", "services")
CONFIG_MAP = Kind("v1", "ConfigMap", "configmaps")
SECRET = Kind("v1", "Secret", "secrets")
EVENT = Kind("v1", "Event", "events")
CLAIM = Kind("v1", "PersistentVolumeClaim", "persistentvolumeclaims")
SERVICE_ACCOUNT = Kind("v1", "ServiceAccount", "serviceaccounts")
NODE = Kind("v1", "Node", "nodes", namespaced=False)
NAMESPACE = Kind("v1", "Namespace", "namespaces", namespaced=False)
JOB = Kind("batch/v1", "Job", "jobs")
DEPLOYMENT = Kind("apps/v1", "Deployment", "deployments")
STATEFUL_SET = Kind("apps/v1", "StatefulSet", "statefulsets")
DAEMON_SET = Kind("apps/v1", "DaemonSet", "daemonsets")
LEASE = Kind("coordination.k8s.io/v1", "Lease", "leases")
DISRUPTION_BUDGET = Kind("policy/v1", "PodDisruptionBudget", "poddisruptionbudgets")
ROLE = Kind("rbac.authorization.k8s.io/v1", "Role", "roles")
ROLE_BINDING = Kind("rbac.authorization.k8s.io/v1", "RoleBinding", "rolebindings")
CLUSTER_ROLE = Kind("rbac.authorization.k8s.io/v1", "ClusterRole", "clusterroles", namespaced=False)
CLUSTER_ROLE_BINDING = Kind("rbac.authorization.k8s.io/v1", "ClusterRoleBinding", "clusterrolebindings", namespaced=False)
STORAGE_CLASS = Kind("storage.k8s.io/v1", "StorageClass", "storageclasses", namespaced=False)
PRIORITY_CLASS = Kind("scheduling.k8s.io/v1", "PriorityClass", "priorityclasses", namespaced=False)
CRD = Kind("apiextensions.k8s.io/v1", "CustomResourceDefinition", "customresourcedefinitions", namespaced=False)

ELASTIC_JOB = Kind(contract.API_VERSION, contract.KIND, "elasticjobs")
LEGACY_JOB = Kind("elastic.pytorch.org/v1alpha1", "ElasticJob", "elasticjobs")
"""The job kind of torchelastic's archived controller, which our operator replaces."""
VOLCANO_GROUP = Kind("scheduling.volcano.sh/v1beta1", "PodGroup", "podgroups")
POD_GROUP = Kind("scheduling.x-k8s.io/v1alpha1", "PodGroup", "podgroups")
"""PodGroup of the coscheduling plugin."""
WORKLOAD = Kind("kueue.x-k8s.io/v1beta1", "Workload", "workloads")
WORKLOAD_V1BETA2 = Kind("kueue.x-k8s.io/v1beta2", "Workload", "workloads")
FLAVOR = Kind("kueue.x-k8s.io/v1beta1", "ResourceFlavor", "resourceflavors", namespaced=False)
FLAVOR_V1BETA2 = Kind("kueue.x-k8s.io/v1beta2", "ResourceFlavor", "resourceflavors", namespaced=False)
WORKLOAD_PRIORITY = Kind("kueue.x-k8s.io/v1beta1", "WorkloadPriorityClass", "workloadpriorityclasses", namespaced=False)
WORKLOAD_PRIORITY_V1BETA2 = Kind("kueue.x-k8s.io/v1beta2", "WorkloadPriorityClass", "workloadpriorityclasses", namespaced=False)
LOCAL_QUEUE = Kind("kueue.x-k8s.io/v1beta1", "LocalQueue", "localqueues")
POD_METRICS = Kind("metrics.k8s.io/v1beta1", "PodMetrics", "pods")
NODE_METRICS = Kind("metrics.k8s.io/v1beta1", "NodeMetrics", "nodes", namespaced=False)
WORKFLOW = Kind("argoproj.io/v1alpha1", "Workflow", "workflows")

KINDS = tuple(value for value in list(globals().values()) if isinstance(value, Kind))

INSTALLED_BY = {
    contract.GROUP: "install it with: outlast install; outlast submit --as indexed-job needs none",
    "elastic.pytorch.org": "install it with: outlast install",
    "scheduling.volcano.sh": "ask the cluster's administrator for Volcano (https://volcano.sh)",
    "scheduling.x-k8s.io": "ask the cluster's administrator for the coscheduling plugin, or set scheduling.gang to none",
    "kueue.x-k8s.io": "ask the cluster's administrator for Kueue (https://kueue.sigs.k8s.io)",
    "metrics.k8s.io": "ask the cluster's administrator for metrics-server",
    "argoproj.io": "ask the cluster's administrator for Argo Workflows (https://argoproj.github.io/workflows)",
}


def kind_of(document: Mapping[str, Any]) -> Kind:
    """Return a document's kind. Raises OutlastError for an unknown kind."""
    identity = (document.get("apiVersion"), document.get("kind"))
    for kind in KINDS:
        if (kind.api_version, kind.kind) == identity:
            return kind
    raise OutlastError(f"{identity[1]} of {identity[0]} is not a kind that Outlast supports; apply it with kubectl")
