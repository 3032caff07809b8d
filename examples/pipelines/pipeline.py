"""prepare -> train -> evaluate with Kubeflow Pipelines: texts are tokenized on Spark, a GPT is trained on them by Outlast, and
its best checkpoint is evaluated.

    pip install kfp kfp-kubernetes
    kubectl apply -f examples/kubeflow/rights.yaml     # once: ElasticJobs for the accounts of profiles
    python examples/pipelines/pipeline.py              # writes pipeline.yaml, to be uploaded

The Secret s3 in the profile's namespace has the credentials of the store.
"""

from pathlib import Path

from kfp import compiler, dsl, kubernetes

KEYS = {name: name for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY")}
JOB = Path(__file__).with_name("job.yaml").read_text()
GET_AND_PREPARE = """\
outlast data get "$0" --to /tmp/texts
outlast data prepare text /tmp/texts --vocab-size 2048 --to "$1" --engine spark
"""
TRAIN = """\
printf '%s' "$0" > /tmp/job.yaml
mkdir -p "$(dirname "$3")" "$(dirname "$4")" "$(dirname "$5")"
outlast submit /tmp/job.yaml --wait --outputs /tmp/outputs --idempotency-key "$1" --set "workers.replicas=$2"
cp /tmp/outputs/job "$3"
cp /tmp/outputs/best_checkpoint "$4"
cp /tmp/outputs/loss "$5"
"""


@dsl.container_component
def prepare(texts: str, to: str) -> dsl.ContainerSpec:
    """Tokenize texts on Spark, in one pod."""
    return dsl.ContainerSpec(image="ghcr.io/outlast/outlast:0.1-spark", command=["sh", "-ec", GET_AND_PREPARE], args=[texts, to])


@dsl.container_component
def train(
    job: str,
    key: str,
    workers: int,
    name: dsl.OutputPath(str),
    best_checkpoint: dsl.OutputPath(str),
    loss: dsl.OutputPath(str),
) -> dsl.ContainerSpec:
    """Submit a job and wait for its end; one job for each key."""
    args = [job, key, workers, name, best_checkpoint, loss]
    return dsl.ContainerSpec(image="ghcr.io/outlast/operator:0.1", command=["sh", "-ec", TRAIN], args=args)


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
    model = train(job=JOB, key=dsl.PIPELINE_JOB_ID_PLACEHOLDER, workers=workers).after(data)
    model.set_caching_options(False)  # each run of the pipeline trains
    model.set_retry(20)  # a pod that is lost is made again, and waits for the same job
    for task in (data, model):
        kubernetes.use_secret_as_env(task, secret_name="s3", secret_key_to_env=KEYS)
    evaluate(job=model.outputs["name"]).set_caching_options(False)
    return model.outputs["best_checkpoint"]


if __name__ == "__main__":
    compiler.Compiler().compile(gpt, "pipeline.yaml")
