"""The ElasticJob itself, for the operator: the job file with paths as in the job's pods."""

from __future__ import annotations

import json

from outlast.job import contract
from outlast.kubernetes.api import document_parsing, kinds
from outlast.kubernetes.manifests import configmaps_and_service, labels, volumes
from outlast.kubernetes.manifests.render_request import Document, Request, invalid_job


def documents(request: Request) -> list[Document]:
    """Return the ElasticJob and its claims. Raises InvalidJob if the operator would be unable to render its pods."""
    job = request.job
    if job.spec.image is None:
        raise invalid_job(job, "image is missing; say which one pods run, e.g. image: ghcr.io/outlast/outlast:0.1")
    if files := volumes.files(job.spec):
        raise invalid_job(
            job, f"environment ({files[0]}) is on this machine, which pods do not see; put it into the code, in a store"
        )
    if job.spec.rendezvous.backend == "etcd":
        raise invalid_job(
            job, "rendezvous.backend is etcd, but the operator decides here; leave rendezvous out, or say --as indexed-job"
        )
    document = volumes.document(job).model_dump(mode="json", by_alias=True, exclude_defaults=True)
    if job.spec.suspend:
        document["spec"]["suspend"] = True
    if (size := len(json.dumps(document["spec"]))) > document_parsing.MAX_BYTES:
        limit = document_parsing.MAX_BYTES >> 10
        raise invalid_job(job, f"spec takes {size >> 10} KiB; at most {limit} KiB are read: put what is long into the code")
    meta = {**document["metadata"], "labels": {**labels.common(job), **labels.queue_label(job.spec)}}
    if job.metadata.namespace:
        meta["namespace"] = job.metadata.namespace
    if request.fresh:
        meta["annotations"] = {**(meta.get("annotations") or {}), contract.Annotation.FRESH: "true"}
    return [*configmaps_and_service.claims(request), kinds.ELASTIC_JOB.document(meta, spec=document["spec"])]
