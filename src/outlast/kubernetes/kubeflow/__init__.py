"""Translates Kubeflow's `TrainJob` and `PyTorchJob` to job files.

`fields.yaml` says which field of an ElasticJob each of their fields becomes, which are dropped with a sentence, and which
`translation` translates. Other fields are refused. See docs/decisions/0064-documents-of-others.md.
"""

from outlast.kubernetes.kubeflow.translation import convert as convert
