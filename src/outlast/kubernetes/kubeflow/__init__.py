"""Translates Kubeflow's `TrainJob` and `PyTorchJob` to job files.

`fields.yaml` says which fields are copied, dropped or left to `translation`; other fields are refused. See
docs/decisions/0064-documents-of-others.md.
"""

from outlast.kubernetes.kubeflow.translation import convert as convert
