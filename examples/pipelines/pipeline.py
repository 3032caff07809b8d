"""prepare -> train -> evaluate with Kubeflow Pipelines: texts are tokenized on Spark, a GPT is trained on them by Outlast, and
its best checkpoint is evaluated.

    pip install kfp kfp-kubernetes
    outlast pipeline kfp examples/pipelines/job.yaml --rights -n PROFILE | kubectl apply -f -     # once for each profile
    python examples/pipelines/pipeline.py                                                         # writes pipeline.yaml

The Secret s3 in the profile's namespace has the credentials of the store.
"""

from pathlib import Path

from kfp import compiler, components, dsl, kubernetes

KEYS = {name: name for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY")}
GET_AND_PREPARE = """\
outlast data get "$0" --to /tmp/texts
outlast data prepare text /tmp/texts --vocab-size 2048 --to "$1" --engine spark
"""

train = components.load_component_from_text(Path(__file__).with_name("kfp-component.yaml").read_text())


@dsl.container_component
def prepare(texts: str, to: str) -> dsl.ContainerSpec:
    """Tokenize texts on Spark, in one pod."""
    return dsl.ContainerSpec(image="ghcr.io/outlast/outlast:0.1-spark", command=["sh", "-ec", GET_AND_PREPARE], args=[texts, to])


@dsl.container_component
def evaluate(job: str) -> dsl.ContainerSpec:
    """Evaluate the best checkpoint of a job, in a pod of the job's image."""
    return dsl.ContainerSpec(image="ghcr.io/outlast/operator:0.1", command=["outlast", "evaluate", job, "--best"])


@dsl.pipeline(name="gpt")
def gpt(
    texts: str = "https://www.gutenberg.org/cache/epub/2600/pg2600.txt",
    prepared: str = "s3://my-bucket/prepared",
    workers: int = 2,
) -> str:
    data = prepare(texts=texts, to=prepared)
    model = train(key=dsl.PIPELINE_JOB_ID_PLACEHOLDER, workers=workers, set="checkpoint.every=50 steps").after(data)
    model.set_caching_options(False)  # each run of the pipeline trains
    for task in (data, model):
        kubernetes.use_secret_as_env(task, secret_name="s3", secret_key_to_env=KEYS)
    evaluate(job=model.outputs["job"]).set_caching_options(False)
    return model.outputs["best_checkpoint"]


if __name__ == "__main__":
    compiler.Compiler().compile(gpt, "pipeline.yaml")
