"""A one-pod Job that downloads a dataset to a claim or a store. The Job's labels let `outlast list`, `status`, `logs`, `why` and
`cancel` find it."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from pathlib import PurePosixPath

from outlast.base.errors import OutlastError
from outlast.job import url_logins
from outlast.job.contract import Env, Label, Pod
from outlast.kubernetes.api import kinds
from outlast.kubernetes.manifests import labels, names, volumes
from outlast.kubernetes.manifests.render_request import OPERATOR_IMAGE, Document

_TTL_S = 86_400
_RETRIES = 3
"""Maximum number of retries. Each retry continues with the files that are already on the claim."""


@dataclasses.dataclass(frozen=True)
class Download:
    dataset: str
    directory: str
    """The dataset's name as a directory name."""
    to: str = ""
    """Directory on the claim, or URL in a store; by default `directory` on the claim."""
    claim: str = ""
    """The claim and its mount path, as `NAME:/PATH`."""
    image: str = OPERATOR_IMAGE
    """An image with Outlast. The default has no torch."""
    secrets: Sequence[str] = ()
    """Names of Secrets whose entries become environment variables."""

    @property
    def name(self) -> str:
        return names.fit(f"data-{re.sub(r'[^a-z0-9]+', '-', self.directory.lower()).strip('-')}", names.MAX_LENGTH - 6)

    def target(self) -> tuple[str, str, str]:
        """Return the destination, the claim's name and its mount path. The last two are empty without a claim. Raises
        OutlastError if the destination is invalid."""
        if not self.claim:
            if "://" not in self.to or self.to.startswith("file://"):
                raise OutlastError(
                    "in a cluster the data need a place that stays: --claim NAME:/PATH for a volume, or --to s3://BUCKET/PREFIX"
                )
            return self.to, "", ""
        claim, path = parse_claim(self.claim)
        to = self.to or f"{path}/{self.directory}"
        if "://" not in to and PurePosixPath(path) not in (PurePosixPath(to), *PurePosixPath(to).parents):
            raise OutlastError(
                f"--to {to} is not on the claim, which is at {path}; give a directory there, e.g. {path}/{self.directory}"
            )
        return to, claim, path


def parse_claim(option: str) -> tuple[str, str]:
    """Return the name and the mount path in `--claim NAME:/PATH`. Raises OutlastError if the option is malformed."""
    claim, colon, path = option.partition(":")
    if not colon or not re.fullmatch(r"(/[^/:.][^/:]*)+", path) or not re.fullmatch(r"[a-z0-9]([-a-z0-9.]*[a-z0-9])?", claim):
        raise OutlastError(f"--claim {option} is no claim with a path; write --claim NAME:/PATH, e.g. efs-pvc:/data")
    return claim, path


def document(download: Download) -> Document:
    """Return the Job that downloads the dataset. Raises OutlastError for an invalid destination or credentials in a URL."""
    for url in (download.dataset, download.to):
        if problem := url_logins.exposed(url, "whoever may view the Job reads its command"):
            raise OutlastError(f"{url_logins.hidden(url)} {problem}; a pod has the variables of the Secrets that --secret names")
    to, claim, path = download.target()
    meta = {
        "app.kubernetes.io/name": "outlast",
        "app.kubernetes.io/managed-by": "outlast",
        "app.kubernetes.io/part-of": "outlast",
        **labels.selector(download.name),
        Label.DATASET: names.fit(download.name, 63),
    }
    volumes_: list[Document] = [{"name": name, "emptyDir": {}} for name in ("cache", "home", "tmp")]
    mounts = dict(zip(("cache", "home", "tmp"), (Pod.CACHE, Pod.HOME, "/tmp"), strict=True))
    if claim:
        volumes_.append({"name": "claim", "persistentVolumeClaim": {"claimName": claim}})
        mounts["claim"] = path
    variables = {Env.CACHE: Pod.CACHE, "HOME": Pod.HOME, "USER": "outlast", "PYTHONUNBUFFERED": "1"}
    container: Document = {
        "name": Pod.CONTAINER,
        "image": download.image,
        "command": ["outlast", "data", "get", download.dataset, "--to", to],
        "workingDir": Pod.HOME,
        "env": [{"name": name, "value": value} for name, value in variables.items()],
        **({"envFrom": [{"secretRef": {"name": secret}} for secret in download.secrets]} if download.secrets else {}),
        "resources": {"requests": {"cpu": "500m", "memory": "512Mi"}},
        "securityContext": volumes.container_security(),
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "volumeMounts": [{"name": name, "mountPath": place} for name, place in mounts.items()],
    }
    pod = {
        "restartPolicy": "Never",
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "securityContext": volumes.pod_security(),
        "containers": [container],
        "volumes": volumes_,
    }
    # A user's mistake ends the Job at once, and the log's last line explains it. Disruptions do not count as failures.
    mistake = {"action": "FailJob", "onExitCodes": {"containerName": Pod.CONTAINER, "operator": "In", "values": [2]}}
    disruption = {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]}
    fields = {
        "backoffLimit": _RETRIES,
        "ttlSecondsAfterFinished": _TTL_S,
        "podReplacementPolicy": "Failed",  # one writer at a time
        "podFailurePolicy": {"rules": [mistake, disruption]},
        "template": {"metadata": {"labels": {**labels.NO_SIDECAR, **meta}}, "spec": pod},
    }
    return kinds.JOB.document({"name": download.name, "labels": meta}, spec=fields)
