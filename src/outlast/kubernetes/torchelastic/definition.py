"""The CustomResourceDefinition: the Go types of the archived controller as a structural schema, with added CEL rules."""

from __future__ import annotations

from outlast.kubernetes.api.kinds import LEGACY_JOB
from outlast.kubernetes.manifests.installed import cel, crd
from outlast.kubernetes.manifests.installed.crd import Schema, object_with, typed
from outlast.kubernetes.manifests.render_request import Document
from outlast.kubernetes.torchelastic.torchrun_pod import CONTAINER, MAX_RESTARTS, RENDEZVOUS

_REPLICAS = "self.replicaSpecs.Worker.replicas"


def definition() -> Document:
    """Return the CustomResourceDefinition."""
    columns = [
        crd.column("Min", ".spec.minReplicas", "integer"),
        crd.column("Max", ".spec.maxReplicas", "integer"),
        crd.column("Desired", ".spec.replicaSpecs.Worker.replicas", "integer"),
        crd.column("State", ".status.state"),
        crd.column("Age", ".metadata.creationTimestamp", "date"),
    ]
    desired, active = ".spec.replicaSpecs.Worker.replicas", ".status.replicaStatuses.Worker.active"
    return crd.resource(LEGACY_JOB, schema(), columns, desired, active, {})


def schema() -> Schema:
    about = "A training job of torchelastic: its workers run torchrun, and their number may change."
    parts = {"apiVersion": {"type": "string"}, "kind": {"type": "string"}, "metadata": {"type": "object"}}
    return typed("object", about, required=["spec"], properties={**parts, "spec": _spec(), "status": _status()})


def _spec() -> Schema:
    # Other types of replicas are preserved, so that the status can report that they are not used.
    replicas = {**object_with("What to run.", Worker=_worker()), "required": ["Worker"]}
    limit = f"The job fails after more restarts of its workers than this. Default: {MAX_RESTARTS}."
    etcd = f"Address of an etcd v3. It is used when the annotation {RENDEZVOUS} says etcd."
    fields = {
        "rdzvEndpoint": typed("string", etcd),
        "minReplicas": typed("integer", "Training goes on with no fewer workers. Default: replicas.", minimum=1),
        "maxReplicas": typed("integer", "Training takes no more workers. Default: replicas.", minimum=1),
        "replicaSpecs": replicas,
        "activeDeadlineSeconds": typed("integer", "The job fails when it has run for longer. Default: no limit.", minimum=1),
        "backoffLimit": typed("integer", limit, minimum=0),
        "cleanPodPolicy": typed(
            "string",
            "Which pods are deleted when the job ends; running ones always are. Default: None.",
            enum=["All", "Running", "None"],
        ),
        "schedulingPolicy": object_with(
            "For gang schedulers. It is not used.", minAvailable=typed("integer", "Workers that are started all or none.")
        ),
        "ttlSecondsAfterFinished": typed("integer", "A finished job is deleted after this time. Default: never.", minimum=0),
    }
    rules = [
        cel.rule(
            "!has(self.minReplicas) || !has(self.maxReplicas) || self.minReplicas <= self.maxReplicas",
            "minReplicas is above maxReplicas; swap them or raise maxReplicas",
            at=".minReplicas",
        ),
        cel.rule(
            f"!has(self.minReplicas) || {_REPLICAS} == 0 || {_REPLICAS} >= self.minReplicas",
            "replicas is below minReplicas; raise replicas or lower minReplicas",
            at=".replicaSpecs.Worker.replicas",
        ),
        cel.rule(
            f"!has(self.maxReplicas) || {_REPLICAS} <= self.maxReplicas",
            "replicas is above maxReplicas; lower replicas or raise maxReplicas",
            at=".replicaSpecs.Worker.replicas",
        ),
    ]
    rest = {"required": ["replicaSpecs"], "properties": fields, "x-kubernetes-validations": rules}
    return typed("object", "What to run, and with how many workers.", **rest)


def _worker() -> Schema:
    replicas = typed("integer", "How many are wanted; 0 suspends the job. Default: 1.", minimum=0, maximum=10_000, default=1)
    policy = typed(
        "string",
        "Never, OnFailure, Always: as of pods. ExitCode: pods that ended with 130, 137, 138 or 143, were lost, or never "
        "began, are replaced; any other failure fails the job. Default: ExitCode.",
        enum=["Always", "OnFailure", "Never", "ExitCode"],
    )
    named = {"type": "object", "required": ["name"], "x-kubernetes-preserve-unknown-fields": True}
    env = {"type": "array", "nullable": True, "items": {**named, "properties": {"name": {"type": "string"}}}}
    container = {**named, "properties": {"name": {"type": "string"}, "env": env}}
    texts = {"type": "object", "nullable": True, "additionalProperties": {"type": "string"}}
    template = {
        **object_with(
            f"The pods. torchrun runs in the only container, or in the one that is called {CONTAINER}.",
            metadata=object_with("Labels and annotations of the pods.", labels=texts, annotations=texts),
            spec={
                **object_with("A PodSpec.", containers=typed("array", "The containers.", minItems=1, items=container)),
                "required": ["containers"],
            },
        ),
        "required": ["spec"],
    }
    properties = {"replicas": replicas, "restartPolicy": policy, "template": template}
    return typed("object", "The workers.", required=["template"], properties=properties)


def _status() -> Schema:
    """Return a schema without types, which preserves statuses by an earlier operator or the archived controller."""
    return object_with(
        "What is known of the job, written by the operator: state (Created, Running, Restarting, Suspended, Succeeded, Failed), "
        "conditions (the same, and Limited for what cannot be honoured), replicaStatuses (pods that are active, have succeeded, "
        "have failed), restarts, startTime, completionTime; as job what ElasticJobs of Outlast have."
    )
