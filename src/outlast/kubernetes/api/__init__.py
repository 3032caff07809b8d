"""A client for a Kubernetes cluster's API server. Documents are plain dicts.

    cluster = api.connect()
    for pod in cluster.list_(kinds.POD, labels="outlast.dev/job=train"): ...

`client` sends requests, `watch` watches, `streams` runs commands in pods, `login` connects to a cluster, `error_mapping` maps
errors, and `pod_status` reads pods.
"""

from outlast.kubernetes.api.client import Cluster, LogOptions, without_server_fields
from outlast.kubernetes.api.login import connect, load
from outlast.kubernetes.api.requests import Document
from outlast.kubernetes.api.stop import Stop, within
from outlast.kubernetes.api.streams import Ended
from outlast.kubernetes.api.watch import Change

__all__ = ["Change", "Cluster", "Document", "Ended", "LogOptions", "Stop", "connect", "load", "within", "without_server_fields"]
