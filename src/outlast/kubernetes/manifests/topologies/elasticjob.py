"""The ElasticJob itself, for the operator: the job file with paths as in the job's pods."""

from __future__ import annotations

import json

from outlast.job import contract
from outlast.kubernetes.api import document_parsing
from outlast.kubernetes.manifests import configmaps_and_service, labels, volumes
from outlast.kubernetes.manifests.render_request import Document, Request, wrong


def documents(request: Request) -> list[Document]:
    """The ElasticJob and its claims. Raises InvalidJob if the operator would be unable to render its pods."""
    job = request.job
    if job.spec.image is None:
        raise wrong(job, "image is missing; say which one pods run, e.g. image: ghcr.io/outlast/outlast:0.1")
    if files := volumes.files(job.spec):
        raise wrong(job, f"environment ({files[0]}) is on this machine, which pods do not see; put it into the code, in a store")
    if job.spec.rendezvous.backend == "etcd":
        raise wrong(
            job, "rendezvous.backend is etcd, but the operator decides here; leave rendezvous out, or say --as indexed-job"
        )
    seen = volumes.document(job).model_dump(mode="json", by_alias=True, exclude_defaults=True)
    if job.spec.suspend:
        seen["spec"]["suspend"] = True
    if (size := len(json.dumps(seen["spec"]))) > document_parsing.MAX_BYTES:
        most = document_parsing.MAX_BYTES >> 10
        raise wrong(job, f"spec takes {size >> 10} KiB; at most {most} KiB are read: put what is long into the code")
    meta = {**seen["metadata"], "labels": {**labels.common(job), **labels.kueue(job.spec)}}
    if job.metadata.namespace:
        meta["namespace"] = job.metadata.namespace
    if request.fresh:
        meta["annotations"] = {**(meta.get("annotations") or {}), contract.Annotation.FRESH: "true"}
    made: Document = {"apiVersion": contract.API_VERSION, "kind": contract.KIND, "metadata": meta, "spec": seen["spec"]}
    return [*configmaps_and_service.claims(request), made]
