"""A step of a pipeline that submits a job and waits for it, for Argo Workflows and for Kubeflow Pipelines. Pure.

    step = Step(job, "elasticjob")
    argo.documents(step, "digits")      # account, rights, WorkflowTemplate
    kfp.component(step, "digits")       # a component; kfp.rights(step, ...) for its account

The container is the same in both: `outlast pipeline step`, with the job file as an argument.
"""

from outlast.manifests.pipelines.outputs import OUTPUTS
from outlast.manifests.pipelines.step import Step

__all__ = ["OUTPUTS", "Step"]
