"""The job file: what is read, what is refused and in which words, what is written back."""

from __future__ import annotations

import json
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from outlast.base.errors import InvalidJob, NotFound, OutlastError
from outlast.base.units import Every
from outlast.cli.train.validate import validate
from outlast.job import contract, spec
from outlast.job.spec import unused_fields

HEAD = """\
apiVersion: outlast.dev/v1alpha1
kind: ElasticJob
metadata: {name: a}
spec:
"""
FIRST = 5
"""The line of the first field of the spec below HEAD."""


def a_job(fields: str = "", *, run: str = "  module: recipes.smoke\n") -> str:
    """A job file with these lines in its spec, each with the two spaces that it needs; `run` comes last."""
    return HEAD + "".join(f"  {line}\n" for line in fields.splitlines()) + run


def problems(text: str) -> list[tuple[int | None, str]]:
    """What is wrong with a job file."""
    with pytest.raises(InvalidJob) as caught:
        spec.parse(text)
    return list(caught.value.problems)


def problem(fields: str) -> str:
    """The only thing that is wrong with a job, on the first line of its spec."""
    ((line, sentence),) = problems(a_job(fields))
    assert line == FIRST
    return sentence


# What is read


def test_the_smallest_job_has_sensible_defaults() -> None:
    job = spec.parse(a_job())
    assert job.metadata.name == "a"
    assert job.spec.workers.allowed() == (1,)
    assert job.spec.processes_per_worker == "auto"
    assert job.spec.checkpoint == spec.Checkpoint(every=Every(duration=timedelta(minutes=5)), keep=3)
    assert job.spec.restarts == spec.Restarts(limit=10, window=timedelta(hours=1))
    assert job.spec.interruption.grace == timedelta(seconds=75)
    assert job.spec.hang.limit == timedelta(minutes=10)
    assert not job.spec.suspend


def test_a_whole_job_is_read() -> None:
    job = spec.parse("""\
apiVersion: outlast.dev/v1alpha1
kind: ElasticJob
metadata: {name: cifar10, namespace: team-a, labels: {cost-center: 007}}
spec:
  image: ghcr.io/outlast/outlast:0.1
  script: src/train.py
  args: [--epochs=10, --batch=128]
  code: ./
  data: [{from: s3://bucket/cifar-10-batches-py, to: /data}]
  models: [{from: s3://bucket/weights, name: base}]
  output: s3://bucket/runs
  workers: {replicas: 2, min: 1, max: 4}
  processesPerWorker: 4
  resources: {cpu: 4, memory: 16Gi, gpu: 4, accelerator: nvidia, sharedMemory: 4Gi}
  rendezvous: {backend: etcd, endpoint: "etcd:2379"}
  checkpoint: {every: 200 steps, keep: 2, memory: 8Gi, replicas: 2}
  sync: {every: 10m}
  restarts: {limit: 3, window: 1h}
  interruption: {grace: 90s}
  scheduling: {queue: research, gang: volcano, priorityClassName: high, spot: avoid}
  environment: {requirements: requirements.txt}
  env: {NCCL_DEBUG: INFO}
  hang: {limit: 1m}
  suspend: true
  activeDeadlineSeconds: 86400
  startupDeadlineSeconds: 600
  ttlSecondsAfterFinished: 0
  cleanPodPolicy: None
  volumes: [{claim: scratch, to: /scratch, subPath: a, readOnly: true}]
  nodeSelector: {zone: a}
  tolerations: [{key: spot, operator: Exists, effect: NoSchedule}]
  secrets: [{name: token}, {name: certificates, to: /certificates}]
  tracking: {mlflow: "http://mlflow:5000"}
  template: {spec: {containers: [{name: worker, tty: true}]}}
""")
    read = job.spec
    assert job.metadata.labels == {"cost-center": "007"}
    assert read.data[0].from_ == "s3://bucket/cifar-10-batches-py"
    assert read.processes_per_worker == 4
    assert read.resources == spec.Resources(cpu=4.0, memory=16 * 2**30, gpu=4, accelerator="nvidia", shared_memory=4 * 2**30)
    assert read.checkpoint.every == Every(steps=200)
    assert read.clean_pod_policy == "None"
    assert read.template == {"spec": {"containers": [{"name": "worker", "tty": True}]}}
    assert spec.parse(spec.dump(job)) == job


@pytest.mark.parametrize(
    ("written", "read"),
    [("auto", "auto"), ("off", "off"), ("'off'", "off"), ("false", "off"), ("8Gi", 8 * 2**30), ("1048576", 2**20)],
)
def test_the_memory_of_snapshots_is_a_quantity_or_a_word(written: str, read: object) -> None:
    job = spec.parse(a_job(f"checkpoint: {{memory: {written}}}"))
    assert job.spec.checkpoint.memory == read
    assert spec.parse(spec.dump(job)) == job
    assert job.spec.checkpoint.variables() == {
        "OUTLAST_CHECKPOINT_EVERY": "300s",
        "OUTLAST_CHECKPOINT_KEEP": "3",
        "OUTLAST_CHECKPOINT_MEMORY": str(read),
        "OUTLAST_CHECKPOINT_REPLICAS": "1",
    }


def test_arguments_and_environment_are_what_is_written() -> None:
    job = spec.parse(a_job("args: [--lr, 3e-3, --id, 0123, --flag, no, --day, 2024-13-45]\nenv: {A: 1.10, B: yes, ON: off, C: }"))
    assert job.spec.args == ("--lr", "3e-3", "--id", "0123", "--flag", "no", "--day", "2024-13-45")
    assert job.spec.env == {"A": "1.10", "B": "yes", "ON": "off", "C": ""}


def test_a_field_given_as_nothing_has_its_default() -> None:
    assert spec.parse(a_job("args:\nworkers: {replicas: 2, max: ~}\nhang:")) == spec.parse(a_job("workers: {replicas: 2}"))


def test_aliases_that_multiply_are_refused_at_once() -> None:
    """Some 300 bytes that are 10^8 values; a hundredth of that took 3.5 s."""
    levels = ["args: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    levels += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]" for i in range(1, 8)]
    with pytest.raises(InvalidJob, match="aliases repeat more than 10,000 values; write fewer, or what they stand for"):
        spec.parse("\n".join(levels))
    merged = "\n".join(
        ["b0: &b0 {x: 1, y: 2}", *(f"b{i}: &b{i} {{<<: [{', '.join([f'*b{i - 1}'] * 10)}]}}" for i in range(1, 8))]
    )
    with pytest.raises(InvalidJob, match="aliases repeat"):
        spec.parse(merged)


def test_a_list_may_be_shared_by_an_alias_and_a_mapping_merged() -> None:
    job = spec.parse(a_job("env: &both {A: x, B: y}\nnodeSelector: {<<: *both, B: z}"))
    assert job.spec.node_selector == {"A": "x", "B": "z"}


def test_a_job_cannot_be_changed() -> None:
    job = spec.parse(a_job())
    with pytest.raises(ValueError, match="frozen"):
        job.spec.suspend = True  # type: ignore[misc]


# Numbers of workers


@pytest.mark.parametrize(
    ("workers", "allowed"),
    [
        ("{replicas: 2}", (2,)),
        ("{replicas: 2, min: 1, max: 4}", (1, 2, 3, 4)),
        ("{replicas: 2, max: 3}", (2, 3)),
        ("{replicas: 4, min: 2, max: 7, step: 2}", (2, 4, 6)),
        ("{replicas: 2, sizes: [4, 1, 2]}", (1, 2, 4)),
        ("{replicas: 2, sizes: [1, 2, 4], min: 2}", (2, 4)),
        ("{replicas: 0}", (1,)),
        ("{replicas: 0, min: 2}", (2,)),
        ("{replicas: 0, min: 2, max: 4}", (2, 3, 4)),
        ("{replicas: 0, max: 2}", (1, 2)),
        ("{replicas: 0, min: 2, max: 7, step: 2}", (2, 4, 6)),
        ("{replicas: 0, sizes: [2, 4]}", (2, 4)),
    ],
)
def test_the_allowed_numbers_of_workers_of_a_job_that_may_have_none_now(workers: str, allowed: tuple[int, ...]) -> None:
    found = spec.parse(a_job(f"workers: {workers}"))
    assert found.spec.workers.allowed() == allowed
    assert spec.parse(spec.dump(found)) == found, "also with no replicas, which no size allows"


@pytest.mark.parametrize(
    ("workers", "sentence"),
    [
        ("{replicas: 3, min: 9, max: 2}", "workers.min (9) is above workers.max (2); swap them or raise max"),
        ("{replicas: 4, max: 2}", "workers.replicas (4) is above workers.max (2); lower replicas or raise max"),
        ("{replicas: 1, min: 2, max: 4}", "workers.replicas (1) is below workers.min (2); raise replicas or lower min"),
        ("{min: 2, max: 4}", "workers.replicas (1, the default) is below workers.min (2); raise replicas or lower min"),
        ("{replicas: 3, sizes: [1, 2, 4]}", "workers.replicas (3) is not an allowed number of workers (1, 2, 4); choose one"),
        (
            "{replicas: 3, min: 2, max: 6, step: 2}",
            "workers.replicas (3) is not an allowed number of workers (2, 4, 6); choose one",
        ),
        ("{replicas: 4, sizes: [2, 4], min: 3}", "workers.min (3) is not one of workers.sizes (2, 4); add it or raise min"),
        ("{replicas: 2, sizes: [2], step: 2}", "workers.step and workers.sizes are both given; keep one"),
        ("{replicas: -1}", "workers.replicas (-1) must be at least 0"),
        ("{replicas: 0, min: 3, max: 2}", "workers.min (3) is above workers.max (2); swap them or raise max"),
        ("{replicas: 0, sizes: [4, 8], max: 2}", "workers.max (2) is below all of workers.sizes (4, 8); raise max or add a size"),
        ("{replicas: 10001}", "workers.replicas (10001) must be at most 10000"),
        ("{replicas: 2.5}", "workers.replicas (2.5) must be a whole number"),
        ("{replicas: two}", "workers.replicas (two) must be a whole number"),
        ("{replicas: true}", "workers.replicas (true) must be a whole number"),
        ("{replicas: 1, sizes: []}", "workers.sizes (an empty list) must not be empty"),
        ("2", "workers (2) must be a mapping of names to values"),
    ],
)
def test_impossible_numbers_of_workers_are_refused(workers: str, sentence: str) -> None:
    assert problem(f"workers: {workers}") == sentence


# What is refused


@pytest.mark.parametrize(
    ("field", "sentence"),
    [
        ("image: 5", 'image (5) must be text; put it in quotes: "5"'),
        ("args: --epochs 2", "args (--epochs 2) must be a list; put it in brackets: [ ... ]"),
        (
            "code: ftp://host/code",
            "code (ftp://host/code) is not in a store that Outlast supports; use a path, or one of s3://, gs://, az://, file://, memory://",
        ),
        ("output: 's3://'", "output (s3://) must be a path or the URL of a store"),
        (
            "code: s3://b/a.zip#sha256=12",
            "code (s3://b/a.zip#sha256=12) must end with #sha256= and 64 hexadecimal digits, as sha256sum prints them",
        ),
        (
            f"code: src#sha256={'0' * 64}",
            f"code (src#sha256={'0' * 46}...) is no archive (.tar.gz, .tgz, .tar, .zip), and only those have a checksum; "
            "remove #sha256=...",
        ),
        (
            "code: s3://bucket/code.tar.bz2",
            "code (s3://bucket/code.tar.bz2) is an archive of a kind not known here; make it a .tar.gz or .zip",
        ),
        ("data: [{to: /data}]", "data[0].from is missing; add it"),
        *(
            (f"checkpoint: {{memory: {value}}}", f"checkpoint.memory ({value}) must be auto, off or a quantity, e.g. 8Gi")
            for value in ("much", "true", "-1")
        ),
        (
            "checkpoint: {memory: 64k}",
            "checkpoint.memory (64k) means 64000 bytes, less than any snapshot needs; write 8Gi, or off",
        ),
        ("checkpoint: {replicas: 4}", "checkpoint.replicas (4) must be at most 3"),
        (
            "data: [{from: a}, {from: b, to: /data/b}]",
            "data[1].to (/data/b) is inside data[0].to (/data); choose separate directories",
        ),
        *(
            (
                f"data: [{{from: a, to: {to}}}]",
                f"data[0].to ({to}) must be an absolute path in the worker, e.g. /data, without : and parts that are . or ..",
            )
            for to in ("data", "/", "/data/", "/etc/../data", "//etc", "/.", "/a:b")
        ),
        *(
            (field, f"{place} is reserved for Outlast or the system; choose another, e.g. /mnt/data")
            for field, place in (
                ("volumes: [{claim: a, to: /etc/outlast}]", "volumes[0].to (/etc/outlast)"),
                ("secrets: [{name: a, to: /run/outlast/state}]", "secrets[0].to (/run/outlast/state)"),
                ("data: [{from: a, to: /opt/outlast/lib}]", "data[0].to (/opt/outlast/lib)"),
                ("volumes: [{claim: a, to: /dev/shm}]", "volumes[0].to (/dev/shm)"),
                ("volumes: [{claim: a, to: /usr}]", "volumes[0].to (/usr)"),
            )
        ),
        *(
            (
                field,
                f"{place} must be a name in the cluster: lower-case letters, digits, dashes and dots, at most {most} characters",
            )
            for field, place, most in (
                ("volumes: [{claim: My_Data, to: /data}]", "volumes[0].claim (My_Data)", 253),
                ("secrets: [{name: HF-token}]", "secrets[0].name (HF-token)", 253),
                ("scheduling: {queue: team_a}", "scheduling.queue (team_a)", 63),
                ("scheduling: {priorityClassName: High}", "scheduling.priorityClassName (High)", 253),
            )
        ),
        (
            "tolerations: [{key: a b, operator: Exists}]",
            "tolerations[0].key (a b) must be the key of a taint, e.g. nvidia.com/gpu: letters, digits, -, _ and .",
        ),
        ("tolerations: [{key: a, value: b c}]", "tolerations[0].value (b c) must be at most 63 letters, digits, -, _ and ."),
        (
            "tolerations: [{key: a, value: b, operator: Exists}]",
            "the toleration's value (b) has no effect with operator Exists; remove one of them",
        ),
        ("tolerations: [{value: b}]", "the toleration has no key, which means any; set operator: Exists, or give the key"),
        (
            "tolerations: [{operator: Exists, tolerationSeconds: 5}]",
            "tolerationSeconds needs effect: NoExecute; add that, or remove tolerationSeconds",
        ),
        ("data: [{from: a}, {from: b}]", "data[1].to is /data, as data[0].to is; choose another directory for one of them"),
        ("models: [{from: a, name: ..}]", "models[0].name (..) must be a directory's name: letters, digits, dashes and dots"),
        ("processesPerWorker: 0", "processesPerWorker (0) must be auto or a number from 1 on"),
        ("processesPerWorker: all", "processesPerWorker (all) must be auto or a number from 1 on"),
        ("resources: {cpu: 4x}", "resources.cpu (4x) is not a quantity; write 500m or 2"),
        ("resources: {memory: 16GB}", "resources.memory (16GB) is not a quantity; write 16Gi"),
        ("resources: {memory: 16}", "resources.memory (16) means 16 bytes, less than any process needs; write 16Gi"),
        ("resources: {gpu: -1}", "resources.gpu (-1) must be at least 0"),
        (
            "resources: {accelerator: tpu}",
            "resources.accelerator (tpu) must be nvidia, amd, neuron or a resource such as nvidia.com/gpu",
        ),
        ("managedBy: kueue", "managedBy (kueue) must be a domain and a name with a slash between them: outlast.dev/operator"),
        ("rendezvous: {backend: zookeeper}", "rendezvous.backend (zookeeper) must be auto, etcd or c10d"),
        ("rendezvous: {backend: etcd}", "rendezvous.backend is etcd, which needs rendezvous.endpoint, e.g. etcd:2379"),
        (
            "rendezvous: {endpoint: 'etcd:2379'}",
            "rendezvous.endpoint (etcd:2379) has no effect with backend auto; set backend: etcd or c10d",
        ),
        (
            "rendezvous: {backend: etcd, endpoint: etcd}",
            "rendezvous.endpoint (etcd) must be an address with a port, e.g. etcd:2379",
        ),
        ("checkpoint: {every: 0}", 'checkpoint.every (0) must be more than 0; write 5m or "200 steps"'),
        (
            "checkpoint: {every: often}",
            'checkpoint.every (often) is neither a duration nor a number of steps; write 5m or "200 steps"',
        ),
        ("checkpoint: {keep: 1}", "checkpoint.keep (1) must be at least 2"),
        ("sync: 10m", "sync (10m) must be a mapping of names to values"),
        ("sync: {every: 0s}", "sync.every (0s) must be more than 0"),
        ("restarts: {limit: -1}", "restarts.limit (-1) must be at least 0"),
        ("restarts: {window: 1 hour}", "restarts.window (1 hour) is not a duration; write 90s, 5m, 1h30m or 2d"),
        ("scheduling: {spot: maybe}", "scheduling.spot (maybe) must be prefer, require, avoid or any"),
        ("suspend: 'yes'", "suspend (yes) must be true or false"),
        ("environment: {requirements: a, conda: b}", "environment.requirements and environment.conda are both given; keep one"),
        ("env: {RANK: 0}", "env.RANK is set by Outlast itself; remove it"),
        ("env: {OUTLAST_JOB: x}", "env.OUTLAST_JOB is set by Outlast itself; remove it"),
        ("env: {PET_NNODES: 2}", "env.PET_NNODES is set by Outlast itself; remove it"),
        ("env: {MY-NAME: x}", "env.MY-NAME is not a name for an environment variable; use letters, digits and _"),
        (r'env: {A: "x\0y"}', "env.A has a NUL, which no variable can hold; remove it"),
        (r'env: {A: "\ud800"}', "env.A has a lone surrogate (U+D800), which no variable can hold; remove it"),
        (
            f"env: {{AB: {'x' * 131069}}}",
            "env.AB has 131073 bytes; Linux allows 131072 for a variable with its name; "
            "write it to a file, and name that file here",
        ),
        ("env: [A=x]", "env (a list) must be a mapping of names to values"),
        ("cleanPodPolicy: Some", "cleanPodPolicy (Some) must be All, Running or None"),
        ("activeDeadlineSeconds: 1h", "activeDeadlineSeconds (1h) must be a whole number"),
        ("volumes: [~]", "volumes[0] (nothing) must be a mapping of names to values"),
        ("module: train.py!", "module (train.py!) must be a Python module, e.g. outlast.recipes.cifar10"),
        (
            "script: /home/me/train.py",
            "script (/home/me/train.py) is an absolute path; write it relative to code, e.g. train.py",
        ),
        ("script: ../train.py", "script (../train.py) must be a file in code, e.g. train.py"),
        ("script: ''", 'script ("") must be a file in code, e.g. train.py'),
        (
            "processesPerWorker: 8\nresources: {gpu: 4}",
            "processesPerWorker (8) is above resources.gpu (4); each process needs a GPU of its own",
        ),
        (
            "checkpoint: {goBack: true}\nworkers: {replicas: 2}",
            "checkpoint.goBack needs 3 workers to tell whose bits are wrong, and workers.max is 2; raise it, or remove goBack",
        ),
        (
            "checkpoint: {goBack: true, memory: 'off'}\nworkers: {replicas: 3}",
            "checkpoint.goBack compares snapshots, and checkpoint.memory is off; remove one of them",
        ),
        (
            "startupDeadlineSeconds: 20\nactiveDeadlineSeconds: 10",
            "startupDeadlineSeconds (20) is above activeDeadlineSeconds (10); lower it or raise the other",
        ),
        (
            "output: s3:/bucket/runs",
            "output (s3:/bucket/runs) is no URL of a store; write s3://bucket/runs, or ./s3:/bucket/runs for a path",
        ),
    ],
)
def test_a_wrong_value_is_refused_with_what_is_expected(field: str, sentence: str) -> None:
    run = "" if field.startswith(("module", "script")) else "  module: recipes.smoke\n"
    assert problems(a_job(field, run=run)) == [(FIRST, sentence)]


def test_a_job_runs_a_script_or_a_module() -> None:
    assert problems(a_job("script: train.py")) == [(6, "script and module are both given; keep one")]
    assert problems(a_job("args: []", run="")) == [(4, "there is nothing to run; give script (a file in code) or module")]


def test_processes_of_neuron_share_its_devices_which_have_several_cores() -> None:
    assert spec.parse(a_job("processesPerWorker: 32\nresources: {gpu: 16, accelerator: neuron}")).spec.resources.gpu == 16


@pytest.mark.parametrize("name", ["CIFAR", "1st", "a_b", "-a", "a-", "a" * 53])
def test_a_name_must_be_good_for_kubernetes_too(name: str) -> None:
    expected = "must be lower-case letters, digits and dashes, from a letter on, at most 51 characters"
    assert problems(a_job().replace("name: a", f"name: {name}")) == [(3, f"metadata.name ({name}) {expected}")]


def test_what_is_missing_is_named() -> None:
    assert problems("spec: {module: a}") == [
        (1, "apiVersion is missing; add it"),
        (1, "kind is missing; add it"),
        (1, "metadata is missing; add it"),
    ]
    assert problems(a_job().replace("name: a", "name:")) == [(3, "metadata.name is missing; add it")]


def test_another_kind_of_document_is_refused() -> None:
    assert problems(a_job().replace("outlast.dev/v1alpha1", "v1").replace("ElasticJob", "Pod")) == [
        (1, "apiVersion (v1) must be outlast.dev/v1alpha1"),
        (2, "kind (Pod) must be ElasticJob"),
    ]
    assert problems(a_job().replace("outlast.dev/v1alpha1", "elastic.pytorch.org/v1alpha1") + "  replicaSpecs: {}\n") == [
        (
            1,
            "apiVersion (elastic.pytorch.org/...) must be outlast.dev/v1alpha1; outlast init SCRIPT writes a job file, outlast "
            "convert FILE translates Kubeflow's, and with the operator kubectl apply -f FILE runs torchelastic's as it is",
        )
    ]


# Unknown fields


@pytest.mark.parametrize(
    ("field", "sentence"),
    [
        ("wrokers: {replicas: 2}", "wrokers is unknown; did you mean workers?"),
        ("workers: {replica: 2}", "workers.replica is unknown; did you mean workers.replicas?"),
        ("processes_per_worker: 2", "processes_per_worker is unknown; did you mean processesPerWorker?"),
        ("data: [{form: a}]", "data[0].form is unknown; did you mean data[0].from?"),
        ("pip: [numpy]", "pip is unknown; write environment: {requirements: requirements.txt}, with the packages in that file"),
        (
            "python: '3.12'",
            "python is unknown; write environment: {conda: environment.yml}, with the version of Python in that file",
        ),
        ("requirements: r.txt", "requirements is unknown; did you mean spec.environment.requirements?"),
        ("replicas: 2", "replicas is unknown; did you mean spec.workers.replicas or spec.checkpoint.replicas?"),
        ("every: 5m", "every is unknown; did you mean spec.checkpoint.every or spec.sync.every?"),
        ("metadata: {name: x}", "metadata is unknown; write it beside spec, not below it"),
        ("xyzzy: 2", "xyzzy is unknown; remove it"),
        (
            "checkpoint: {xyzzy: 2}",
            "checkpoint.xyzzy is unknown; known here are every, keep, best, by, mode, memory, replicas, goBack",
        ),
    ],
)
def test_an_unknown_field_is_refused_with_what_was_meant(field: str, sentence: str) -> None:
    assert problem(field) == sentence


def test_a_field_at_the_wrong_indent_is_told_where_it_belongs() -> None:
    assert problems(a_job() + "workers: {replicas: 2}\n") == [(6, "workers is unknown; did you mean spec.workers?")]


def test_a_misspelt_field_does_not_hide_what_is_wrong_in_it() -> None:
    assert problems(a_job("wrokers:\n  replicas: -1")) == [
        (5, "wrokers is unknown; did you mean workers?"),
        (6, "workers.replicas (-1) must be at least 0"),
    ]


# Several mistakes, and lines


def test_every_mistake_is_reported_with_its_line() -> None:
    text = """\
apiVersion: outlast.dev/v1alpha1
kind: ElasticJob
metadata:
  name: CIFAR
spec:
  checkpoint:
    every: 5 min
    keep: 1
  workers:
    replicas: 2
    min: 9
    max: 4
  frobnicate: true
  args:
    - --epochs
    - [2]
  env:
    OK: fine
    RANK: 1
"""
    assert problems(text) == [
        (4, "metadata.name (CIFAR) must be lower-case letters, digits and dashes, from a letter on, at most 51 characters"),
        (5, "there is nothing to run; give script (a file in code) or module"),
        (7, 'checkpoint.every (5 min) is neither a duration nor a number of steps; write 5m or "200 steps"'),
        (8, "checkpoint.keep (1) must be at least 2"),
        (11, "workers.min (9) is above workers.max (4); swap them or raise max"),
        (13, "frobnicate is unknown; remove it"),
        (16, "args[1] (a list) must be text"),
        (19, "env.RANK is set by Outlast itself; remove it"),
    ]


def test_a_key_that_is_given_twice_is_a_mistake() -> None:
    assert problems(a_job("workers: {replicas: 2}\nsuspend: true\nworkers: {replicas: 3}")) == [
        (7, "workers is given twice, first on line 5; keep one")
    ]


# Texts that hold no job


@pytest.mark.parametrize(
    ("text", "line", "sentence"),
    [
        ("", None, "the file is empty; a job file starts with `apiVersion: outlast.dev/v1alpha1`"),
        ("# nothing yet\n", None, "the file is empty; a job file starts with `apiVersion: outlast.dev/v1alpha1`"),
        ("[1, 2]", 1, "the document (a list) must be a mapping of names to values"),
        ("hello", 1, "the document (hello) must be a mapping of names to values"),
        ("a: 1\n---\nb: 2\n", 3, "a second document starts here; write one per file"),
        ("a: b: c", 1, "this is not YAML: mapping values are not allowed here (column 5)"),
        ("a:\n\tb: c", 2, "this is not YAML: a tab cannot indent; use spaces (column 1)"),
        ("a: \0", None, "this is not YAML: unacceptable character #x0000: special characters are not allowed"),
        ("a: &a [*a]", None, "the document is nested too deeply, or an alias in it refers to itself"),
        ("a: " + "[" * 2000, None, "the document is nested too deeply, or an alias in it refers to itself"),
        ("a: [x", 1, "this is not YAML: expected ',' or ']', but got '<stream end>' while parsing a flow sequence (column 6)"),
    ],
)  # fmt: skip
def test_a_text_without_a_job_is_refused_in_one_sentence(text: str, line: int | None, sentence: str) -> None:
    assert problems(text) == [(line, sentence)]


def test_a_key_must_be_text() -> None:
    assert (5, "a key must be text, not a list or a mapping") in problems(a_job("? [a, b]\n: c"))


def test_a_tag_that_would_run_code_is_refused() -> None:
    ((line, sentence),) = problems("a: !!python/name:os.system x")
    assert (line, sentence[:56]) == (1, "this is not YAML: could not determine a constructor for ")


@given(st.text())
def test_no_text_makes_a_traceback(text: str) -> None:
    with pytest.raises(InvalidJob):
        spec.parse(text)


NAMES = st.sampled_from(sorted({name for model in spec.schema()["$defs"].values() for name in model["properties"]}))
ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.dates(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES | st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


@given(st.dictionaries(NAMES, ANYTHING, max_size=4), st.dictionaries(NAMES, ANYTHING, max_size=2))
def test_no_document_makes_a_traceback(fields: dict[str, Any], metadata: dict[str, Any]) -> None:
    document = {"apiVersion": contract.API_VERSION, "kind": contract.KIND, "metadata": metadata, "spec": fields}
    text = yaml.safe_dump(document)
    found: tuple[tuple[int | None, str], ...] = ()
    try:
        spec.parse(text)
    except InvalidJob as error:
        found = error.problems
    assert all(line is not None and 1 <= line <= text.count("\n") for line, _ in found)


# Written back

TEXTS = st.dictionaries(st.from_regex(r"[A-Z]{1,4}", fullmatch=True), st.text(max_size=8), max_size=3)
SECONDS = st.timedeltas(min_value=timedelta(microseconds=1))
PATHS = st.from_regex(r"/[a-z]{1,3}", fullmatch=True)


@st.composite
def jobs(draw: st.DrawFn) -> spec.Job:
    """Right jobs of many kinds."""
    sizes = sorted(draw(st.sets(st.integers(1, 50), min_size=1, max_size=4)))
    sources = draw(st.lists(PATHS, max_size=3, unique=True))
    fields = {
        draw(st.sampled_from(["module", "script"])): "train",
        "args": draw(st.lists(st.text(max_size=8), max_size=4)),
        "data": [{"from": f"s3://bucket{path}", "to": path} for path in sources],
        "workers": draw(
            st.just({"replicas": sizes[0], "sizes": sizes}) | st.just({"replicas": sizes[-1], "min": sizes[0], "max": sizes[-1]})
        ),
        "processesPerWorker": draw(st.just("auto") | st.integers(1, 16)),
        "resources": {"cpu": draw(st.integers(1, 10**6)) / 1000, "memory": draw(st.integers(2**20, 2**50))},
        "checkpoint": {"every": draw(st.builds(Every, SECONDS) | st.builds(Every, steps=st.integers(1, 10**9)))},
        "restarts": {"limit": draw(st.integers(0, 100)), "window": draw(SECONDS)},
        "env": draw(TEXTS),
        "nodeSelector": draw(TEXTS),
        "suspend": draw(st.booleans()),
        "template": draw(st.dictionaries(st.text(max_size=5), ANYTHING_JSON, max_size=3)),
    }
    document = {"apiVersion": contract.API_VERSION, "kind": contract.KIND, "metadata": {"name": "a", "labels": draw(TEXTS)}}
    return spec.Job.model_validate({**document, "spec": fields})


ANYTHING_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


@given(jobs())
@settings(suppress_health_check=[HealthCheck.too_slow])
def test_a_job_survives_being_written_and_read(job: spec.Job) -> None:
    assert spec.parse(spec.dump(job)) == job


def test_what_is_as_by_default_is_not_written() -> None:
    job = spec.parse(a_job("workers: {replicas: 2}\ncheckpoint: {every: 5m, keep: 4}"))
    assert yaml.safe_load(spec.dump(job))["spec"] == {
        "module": "recipes.smoke",
        "workers": {"replicas": 2, "min": 2, "max": 2},
        "checkpoint": {"keep": 4},
    }


# Files


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A directory with a script and what it needs."""
    for name in ("train.py", "requirements.txt", "src/train.py", "data/images.bin"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    return tmp_path


def a_file(directory: Path, fields: str, run: str = "  script: train.py\n") -> Path:
    path = directory / "job.yaml"
    path.write_text(a_job(fields, run=run))
    return path


def test_paths_are_relative_to_the_job_file(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fields = "code: src\ndata: [{from: data}, {from: s3://bucket/a, to: /a}]\noutput: runs"
    a_file(project, fields + "\nenvironment: {requirements: requirements.txt}")
    monkeypatch.chdir(project.parent)
    found = spec.load(Path(project.name) / "job.yaml").spec
    assert found.code == str(project / "src")
    assert [data.from_ for data in found.data] == [str(project / "data"), "s3://bucket/a"]
    assert found.output == str(project / "runs")
    assert found.environment.requirements == str(project / "requirements.txt")


def test_absolute_paths_and_file_urls_stay_what_they_are(project: Path) -> None:
    found = spec.load(a_file(project, f"code: {project}/src\ndata: [{{from: 'file://{project}/data'}}]")).spec
    assert found.code == str(project / "src")
    assert found.data[0].from_ == str(project / "data")


def test_an_archive_keeps_its_checksum_and_may_hold_the_requirements(project: Path) -> None:
    checksum = f"#sha256={'0' * 64}"
    fields = f"code: code.tgz{checksum}\nenvironment: {{requirements: in-the-code.txt}}"
    found = spec.load(a_file(project, fields)).spec
    assert found.code == f"{project}/code.tgz{checksum}"
    assert spec.pinned(found.code) == (f"{project}/code.tgz", "0" * 64)
    assert found.environment.requirements == "in-the-code.txt"
    assert spec.load(a_file(project, fields.replace("in-the-code", "requirements"))).spec.environment.requirements == str(
        project / "requirements.txt"
    ), "one beside the job file comes first"
    assert spec.load(a_file(project, f"code: s3://bucket/code.tgz{checksum}")).spec.code == f"s3://bucket/code.tgz{checksum}"


def test_the_code_of_a_script_is_the_job_files_directory_and_a_module_needs_none(project: Path) -> None:
    assert spec.load(a_file(project, "")).spec.code == str(project)
    assert spec.load(a_file(project, "", run="  module: recipes.smoke\n")).spec.code is None


@pytest.mark.parametrize(
    ("fields", "run", "line", "sentence"),
    [
        ("", "  script: trian.py\n", 5, "script (trian.py) is not in {0}; correct it, or set code: to its directory"),
        (
            "code: data/images.bin",
            "  module: a\n",
            5,
            "code ({0}/data/images.bin) is neither a directory nor an archive (.tar.gz, .tgz, .tar, .zip); give one of them",
        ),
        ("code: source", "  script: train.py\n", 5, "code ({0}/source) does not exist; correct the path"),
        ("environment:\n  conda: c.yml", "  module: a\n", 6, "environment.conda ({0}/c.yml) does not exist; correct the path"),
    ],
)
def test_code_that_is_not_there_is_a_mistake_with_its_line(project: Path, fields: str, run: str, line: int, sentence: str):
    with pytest.raises(InvalidJob) as caught:
        spec.load(a_file(project, fields, run), code=True)
    assert caught.value.problems == ((line, sentence.format(project)),)


def test_a_job_is_read_when_its_code_has_gone(project: Path) -> None:
    path = a_file(project, "")
    (project / "train.py").unlink()
    assert spec.load(path).spec.script == "train.py"


def test_data_is_looked_for_only_when_asked(project: Path) -> None:
    path = a_file(project, "data: [{from: data}, {from: nowhere, to: /other}]")
    spec.load(path, code=True)
    with pytest.raises(InvalidJob) as caught:
        spec.load(path, data=True)
    assert caught.value.problems == ((5, f"data[1].from ({project}/nowhere) does not exist; get the data, or correct the path"),)


def test_a_file_that_is_not_there_is_told_with_a_near_one(project: Path) -> None:
    a_file(project, "")
    with pytest.raises(NotFound) as caught:
        spec.load(project / "jobs.yaml")
    assert str(caught.value) == f"{project}/jobs.yaml: there is no such file; did you mean {project}/job.yaml?"
    (project / "jobs.yaml").symlink_to("gone.yaml")
    with pytest.raises(NotFound, match=r"/jobs.yaml is a link to gone.yaml, which does not exist; correct the link$"):
        spec.load(project / "jobs.yaml")


def test_a_directory_is_no_job_file(project: Path) -> None:
    with pytest.raises(OutlastError, match=r"is a directory; give the path of a job file, e\.g\. .*/job\.yaml$"):
        spec.load(project)


def test_a_file_that_is_not_text_is_no_job_file(project: Path) -> None:
    (project / "job.yaml").write_bytes(b"\xff\x00\xfe")
    with pytest.raises(InvalidJob, match=r"job\.yaml: this is not UTF-8 text; save it as UTF-8$"):
        spec.load(project / "job.yaml")


def test_a_file_saved_by_a_windows_editor_is_read(project: Path) -> None:
    (project / "job.yaml").write_bytes(b"\xef\xbb\xbf" + a_job().replace("\n", "\r\n").encode())
    assert spec.load(project / "job.yaml").metadata.name == "a"


# outlast validate


def validated(*files: Path) -> int:
    """The exit code of `outlast validate`."""
    with pytest.raises(typer.Exit) as ended:
        validate(list(files))
    return ended.value.exit_code


def test_validate_says_ok_and_how_many_workers(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert validated(a_file(project, "workers: {replicas: 2, min: 1, max: 4}")) == 0
    assert validated(a_file(project, "workers: {replicas: 2, sizes: [1, 2, 4]}")) == 0
    assert validated(a_file(project, "")) == 0
    said = [line for line in capsys.readouterr().out.splitlines() if not line.startswith("  snapshots ")]
    assert said == ["a: ok (2 workers, 1–4)", "a: ok (2 workers of 1, 2, 4)", "a: ok (1 worker)"]


def test_validate_says_what_snapshots_take_of_a_worker(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fields = f"resources: {{memory: 14Gi}}\ncheckpoint: {{memory: 2Gi}}\noutput: {project}\n"
    committed = project / "a" / "checkpoints" / "step-00000007"
    committed.mkdir(parents=True)
    said = {"run": "r", "step": 7, "generation": 1, "world_size": 1, "time": 0, "files": {"x": {"size": 2**29, "crc32": 0}}}
    (committed / "COMMIT").write_text(json.dumps(said))
    assert validated(a_file(project, fields)) == 0
    assert capsys.readouterr().out.splitlines()[2] == (
        "  snapshots in a pod: 2.0 GiB, checkpoint.memory; a state of 1.0 GiB fits; that of the newest checkpoint, 512 MiB, does"
    )


def test_more_replicas_than_other_workers_are_said() -> None:
    job = spec.parse(a_job("workers: {replicas: 2}\ncheckpoint: {replicas: 3}"))
    said = "checkpoint.replicas (3) is reduced to 1: there is no more than 1 other worker to hold one"
    assert list(unused_fields.anywhere(job)) == [said]
    assert list(unused_fields.anywhere(spec.parse(a_job("checkpoint: {memory: 1Gi}")))) == []


def test_validate_reports_every_mistake_of_every_file(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = a_file(project, "suspend: 5\nxyzzy: 1")
    assert validated(path, project / "elsewhere") == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.splitlines() == [
        f"{path}:5: suspend (5) must be true or false",
        f"{path}:6: xyzzy is unknown; remove it",
        f"{project}/elsewhere: there is no such file; give the path of a job file",
    ]


def test_the_schema_describes_every_field_and_refuses_unknown_ones() -> None:
    described = spec.schema()
    for model in (described, *described["$defs"].values()):
        assert model["additionalProperties"] is False
        assert model["description"]
        for name, field in model["properties"].items():
            assert field.get("description"), name
    assert described["$defs"]["Checkpoint"]["properties"]["every"]["default"] == "5m"
    assert described["$defs"]["Sync"]["properties"]["every"]["default"] == "10m"
