"""Kubeflow's documents as job files: `TrainJob` from its Trainer, and `PyTorchJob` from its training operator.

`fields.yaml` lists their fields: each becomes a field of an ElasticJob, is dropped with a sentence, or is translated by
`translation`. A field that cannot be honoured is refused. See docs/decisions/0064-documents-of-others.md.
"""

from outlast.kubernetes.kubeflow.translation import convert as convert
