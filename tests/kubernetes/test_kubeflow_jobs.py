"""Documents of Kubeflow as job files: what each field becomes, what is said of it, and what is refused."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from machines import PROGRAMS, Machine
from outlast.base.errors import InvalidJob
from outlast.job import spec
from outlast.kubernetes import kubeflow
from outlast.kubernetes.kubeflow import container_command
from outlast.kubernetes.kubeflow.container_command import Program, Unknown
from outlast.kubernetes.kubeflow.translation import IMAGE

Outlast = Callable[..., tuple[int, str, str]]
TORCHRUN = {"image": "train:1", "command": ["torchrun", "/app/train.py", "--lr=3e-3"]}
RUNS = {"image": "train:1", "module": "outlast.command", "args": ["/app/train.py", "--lr=3e-3"]}
ELASTIC = (
    "is workers.replicas, and workers.min is 1: training goes on while a lost worker is replaced; "
    "--set workers.min={} waits for it"
)
SIZES = (
    "is workers.replicas, and so workers.min and workers.max: a lost worker is replaced, and training waits for it; "
    "--set workers.min=1 trains on without it"
)


def train_job(trainer: dict[str, Any] = TORCHRUN, runtime: str = "torch-distributed", **fields: Any) -> dict[str, Any]:
    body = {"runtimeRef": {"name": runtime}, "trainer": trainer, **fields}
    return {"apiVersion": "trainer.kubeflow.org/v1alpha1", "kind": "TrainJob", "metadata": {"name": "train"}, "spec": body}


def pytorch_job(container: dict[str, Any] = TORCHRUN, workers: int = 1, pod: Any = (), **fields: Any) -> dict[str, Any]:
    template = {"spec": {"containers": [{"name": "pytorch", **container}], **dict(pod)}}
    replicas = {"Worker": {"replicas": workers, "template": template}}
    body = {"pytorchReplicaSpecs": replicas, **fields}
    return {"apiVersion": "kubeflow.org/v1", "kind": "PyTorchJob", "metadata": {"name": "train"}, "spec": body}


def converted(document: dict[str, Any], directory: Path = Path("/absent")) -> tuple[dict[str, Any], list[str]]:
    job, said = kubeflow.convert(yaml.safe_dump(document), source="a.yaml", directory=directory)
    assert yaml.safe_load(spec.dump(spec.of(job)))["metadata"]["name"] == "train"
    return job, list(said)


GPUS = {"requests": {"cpu": "2", "memory": "4Gi"}, "limits": {"cpu": 4, "memory": "8Gi", "nvidia.com/gpu": "2"}}
AS_GPUS = {"cpu": "2", "cpuLimit": 4, "memory": "8Gi", "gpu": 2, "accelerator": "nvidia"}
TAKEN = "is taken for torch-distributed of Kubeflow Trainer 2.3, one node"
PLACED = {"nodeSelector": {"pool": "gpu"}, "tolerations": [{"key": "gpu", "operator": "Exists"}]}
MOUNTS = {"volumeMounts": [{"name": "data", "mountPath": "/data"}]}
POD = {"serviceAccountName": "trainer", "volumes": [{"name": "data", "persistentVolumeClaim": {"claimName": "data"}}]}
POD_PATCH = {**PLACED, **POD, "containers": [{"name": "node", **MOUNTS}]}
PATCHED = {**PLACED, "template": {"spec": {**POD, "containers": [{"name": "trainer", **MOUNTS}]}}}
OF_JOBSET = {
    "metadata": {"labels": {"team": "ml"}},
    "spec": {
        "replicatedJobs": [
            {"name": name, "template": {"spec": {"template": {"spec": patch}}}}
            for name, patch in (("node", POD_PATCH), ("launcher", {}))
        ]
    },
}
TOKEN = {"name": "TOKEN", "valueFrom": {"secretKeyRef": {"name": "s", "key": "k"}}}
PULLED = {"imagePullPolicy": "Always", "resources": {"limits": {"rdma/hca": 1}}}
SUSPENDED = {"suspend": True, "activeDeadlineSeconds": 60, "managedBy": "kueue.x-k8s.io/multikueue"}
STORED = {"storageUri": "s3://bucket/set", "secretRef": {"name": "s3"}, "env": [{"name": "A"}]}
PET = [{"name": name, "value": value} for name, value in (("PET_NNODES", "1:2"), ("MASTER_ADDR", "here"), ("LR", "3e-3"))]
TABLE: list[tuple[str, dict[str, Any], dict[str, Any], list[str]]] = [
    ("a script of the image", train_job(), {**RUNS, "workers": {"replicas": 1}, "processesPerWorker": 1}, []),
    (
        "the defaults of the runtime, and nodes",
        train_job({"command": ["torchrun", "/app/train.py"], "numNodes": 3}),
        {"image": IMAGE, "workers": {"replicas": 3, "min": 1}},
        [
            f"runtimeRef.name (torch-distributed) {TAKEN}, image {IMAGE}: --set image=NAME takes another",
            f"trainer.numNodes (3) {ELASTIC.format(3)}",
        ],
    ),
    ("another runtime", train_job(runtime="team-torch"), RUNS, [f"runtimeRef.name (team-torch) {TAKEN}"]),
    (
        "GPUs, with a process each",
        train_job({**TORCHRUN, "resourcesPerNode": GPUS, "numProcPerNode": "auto"}),
        {"resources": AS_GPUS, "processesPerWorker": None},
        ["trainer: memory (8Gi) is requested and the limit: a job file has one number"],
    ),
    (
        "cores, with a process each, as Kubeflow counts them",
        train_job({**TORCHRUN, "resourcesPerNode": {"limits": {"cpu": "3500m"}}}),
        {"resources": {"cpuLimit": "3500m"}, "processesPerWorker": 3},
        [],
    ),
    (
        "sizes of torchrun itself, which are a range",
        train_job({**TORCHRUN, "command": ["torchrun", "--nnodes", "2:4", "--nproc_per_node=8", "/app/t.py"], "numNodes": 3}),
        {"workers": {"replicas": 3, "min": 2, "max": 4}, "processesPerWorker": 8},
        [],
    ),
    (
        "variables",
        train_job({**TORCHRUN, "numNodes": 2, "env": [*PET, TOKEN]}),
        {
            "env": {"LR": "3e-3"},
            "workers": {"replicas": 2, "min": 1, "max": 2},
            "template": {"spec": {"containers": [{"name": "trainer", "env": [TOKEN]}]}},
        },
        ["trainer: env MASTER_ADDR is dropped: Outlast sets what training processes need"],
    ),
    (
        "what initializers bring",
        train_job(initializer={"dataset": STORED}),
        {"data": [{"from": "s3://bucket/set", "to": "/workspace/dataset"}], "secrets": [{"name": "s3"}]},
        ["initializer.dataset.env is dropped: variables for the store belong into trainer.env"],
    ),
    (
        "patches of the runtime",
        train_job(runtimePatches=[{"manager": "example.io/team", "trainingRuntimeSpec": {"template": OF_JOBSET}}]),
        {**PATCHED, "metadata.labels": {"team": "ml"}},
        ["runtimePatches[0] (launcher) is dropped: an ElasticJob has pods that train, and no others"],
    ),
    (
        "the same patch of an earlier version",
        train_job(podTemplateOverrides=[{"targetJobs": [{"name": "node"}], "spec": POD_PATCH}], labels={"team": "ml"}),
        {**PATCHED, "metadata.labels": {"team": "ml"}},
        [],
    ),
    ("limits, and another manager", train_job(**SUSPENDED), SUSPENDED, []),
    (
        "workers of a PyTorchJob, which count torchrun's options as needless",
        pytorch_job({**TORCHRUN, "command": ["torchrun", "--rdzv_backend=c10d", "/app/t.py"]}, workers=2, nprocPerNode="2"),
        {"image": "train:1", "workers": {"replicas": 2}, "processesPerWorker": 2},
        [
            "pytorchReplicaSpecs.Worker.template.command: --rdzv-backend is dropped: workers find one another without it",
            f"pytorchReplicaSpecs.Worker.replicas (2) {SIZES}",
        ],
    ),
    (
        "an elastic policy",
        pytorch_job(
            workers=2,
            elasticPolicy={"minReplicas": 1, "maxReplicas": 4, "maxRestarts": 100, "rdzvBackend": "etcd", "metrics": [{}]},
        ),
        {"workers": {"replicas": 2, "min": 1, "max": 4}, "restarts": {"limit": 100}},
        [
            "elasticPolicy.metrics is dropped: kubectl autoscale elasticjob makes such an autoscaler",
            "elasticPolicy.rdzvBackend is dropped: workers find one another without it",
            "nprocPerNode (auto) is one process of each worker, which has no GPUs",
        ],
    ),
    (
        "a run policy, whose number of retries counts",
        pytorch_job(
            elasticPolicy={"maxRestarts": 100},
            nprocPerNode="1",
            runPolicy={
                "cleanPodPolicy": "None",
                "ttlSecondsAfterFinished": 0,
                "backoffLimit": 3,
                "schedulingPolicy": {"queue": "research", "priorityClass": "high", "minAvailable": 2},
            },
        ),
        {
            "cleanPodPolicy": "None",
            "ttlSecondsAfterFinished": 0,
            "restarts": {"limit": 3},
            "scheduling": {"queue": "research", "priorityClassName": "high"},
        },
        ["runPolicy.schedulingPolicy.minAvailable is dropped: a gang is workers.min, and waits as long as it must"],
    ),
    (
        "a pod's own fields",
        pytorch_job(
            {**TORCHRUN, **PULLED, "livenessProbe": {"exec": {}}},
            pod={"terminationGracePeriodSeconds": 20, "restartPolicy": "Never", "imagePullSecrets": [{"name": "r"}]},
            nprocPerNode="1",
        ),
        {
            "interruption": {"grace": "20s"},
            "template": {"spec": {"imagePullSecrets": [{"name": "r"}], "containers": [{"name": "trainer", **PULLED}]}},
        },
        ["pytorchReplicaSpecs.Worker.template: livenessProbe is dropped: Outlast's agent has its own"],
    ),
]


@pytest.mark.parametrize(("document", "fields", "sentences"), [row[1:] for row in TABLE], ids=[row[0] for row in TABLE])
def test_each_field_becomes_one_of_a_job_file_or_is_said(
    document: dict[str, Any], fields: dict[str, Any], sentences: list[str]
) -> None:
    job, said = converted(document)
    found = {name: job["metadata"]["labels"] if name == "metadata.labels" else job["spec"].get(name) for name in fields}
    assert found == fields
    assert said == sentences


def test_master_and_worker_are_workers_of_one_kind() -> None:
    document = pytorch_job({"image": "a", "command": ["python3", "-u", "/opt/mnist.py"]}, workers=2, nprocPerNode="4")
    replicas = document["spec"]["pytorchReplicaSpecs"]
    replicas["Master"] = {"restartPolicy": "Always", "template": {"spec": {"containers": [{"name": "pytorch", "image": "b"}]}}}
    replicas["Worker"]["restartPolicy"] = "Never"
    job, said = converted(document)
    assert job["spec"]["workers"] == {"replicas": 3}
    assert (job["spec"]["image"], job["spec"]["processesPerWorker"], job["spec"]["restarts"]) == ("a", 1, {"limit": 0})
    assert said == [
        "pytorchReplicaSpecs.Master.template is dropped: all workers are alike, and have the template of Worker",
        "nprocPerNode (4) has no effect: without torchrun, each worker has one process",
        f"pytorchReplicaSpecs.Worker.replicas (3) {SIZES}",
    ]


def test_what_servers_and_queues_write_is_not_copied() -> None:
    document = train_job(suspend=True)
    document["metadata"] |= {"uid": "1", "namespace": "team", "labels": {"kueue.x-k8s.io/queue-name": "q", "a": "b"}}
    document["metadata"]["annotations"] = {"kubectl.kubernetes.io/last-applied-configuration": "{}"}
    document["status"] = {"conditions": []}
    job, _ = converted(document)
    assert job["metadata"] == {"name": "train", "namespace": "team", "labels": {"a": "b"}}
    assert job["spec"]["scheduling"] == {"queue": "q"}
    assert "suspend" not in job["spec"]


def test_files_beside_the_document_are_the_code(tmp_path: Path) -> None:
    (tmp_path / "train.py").touch()
    (tmp_path / "package").mkdir()
    for command, runs, sentence in (
        (["torchrun", "./train.py"], {"script": "train.py", "code": "."}, "is beside this file, whose directory is the code"),
        (["torchrun", "-m", "package.train"], {"module": "package.train", "code": "."}, ""),
        (["torchrun", "-m", "other.train"], {"module": "other.train", "code": None}, ""),
        (
            ["torchrun", "demo.py"],
            {"script": "demo.py", "code": "/workspace"},
            "is not beside this file: it is looked for in /workspace of the image",
        ),
    ):
        job, said = converted(train_job({"image": "a", "command": command}), tmp_path)
        assert {name: job["spec"].get(name) for name in runs} == runs
        assert said == ([f"trainer.command: {runs['script']} {sentence}"] if sentence else [])


FUNCTION = (
    '\nread -r -d \'\' SCRIPT << EOM\n\ndef train():\n    print(f\'{1}\')\ntrain()\n\nEOM\nprintf "%s" "$SCRIPT" > "a.py"\n'
)


PACKAGES = "put the packages into a file, add --set environment.requirements=FILE, and remove this line"


@pytest.mark.parametrize(
    ("words", "program"),
    [
        (["torchrun", "t.py", "--x"], Program(script="t.py", args=("--x",), options={})),
        (["/usr/bin/python3.11", "-u", "t.py", "-m"], Program(script="t.py", args=("-m",))),
        (
            ["python", "-m", "torch.distributed.run", "--standalone", "--nnodes", "2", "-m", "a.b", "c"],
            Program(module="a.b", args=("c",), options={"standalone": "", "nnodes": "2", "m": ""}),
        ),
        (["torchrun", "--no-python", "python3", "-c", "import torch"], Program(code="import torch", options={"no-python": ""})),
        (["python", "-m", "a.b"], Program(module="a.b")),
        (
            ["bash", "-ec", "# comment\nset -x\ncd /app && export A=1\nLR=2 exec torchrun t.py \\\n  --lr $LR '${A}/x y' ''"],
            Program(
                script="t.py", args=("--lr", "$(LR)", "$(A)/x y", ""), options={}, directory="/app", env={"A": "1", "LR": "2"}
            ),
        ),
        (["sh", "-c", "python t.py"], Program(script="t.py")),
        (["bash", "-c", f'{FUNCTION}torchrun "a.py"'], Program(code="def train():\n    print(f'{1}')\ntrain()\n", options={})),
    ],
)
def test_commands_are_read(words: list[str], program: Program) -> None:
    assert container_command.read(words) == program


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ([], "is missing, and what the image starts is not known here; write the command"),
        (["--epochs=1"], "is missing, and what the image starts is not known here; write the command"),
        (["mpirun", "-n", "2", "python", "t.py"], "is not understood; start the training with torchrun or python"),
        (["torchrun", "--nnodes"], "has no script behind torchrun's options; name it"),
        (["bash", "-c", "pip install a b && torchrun t.py"], f"runs `pip install a b` before the training; {PACKAGES}"),
        (["bash", "-c", "make\npython t.py"], "runs `make` before the training; let the image have what it makes"),
        (["bash", "-c", "python t.py | tee log"], "uses | of the shell; start the training with torchrun or python alone"),
        (["bash", "-c", 'python t.py "$(date)"'], "has '$(date)', which a worker cannot replace; write the value"),
        (["bash", "-c", "python t.py $RANK"], "has '$RANK', which a worker cannot replace; write the value"),
        (["bash", "-c", "python 't.py"], "is no shell script: No closing quotation"),
    ],
)
def test_a_command_that_cannot_be_translated_is_one_sentence(words: list[str], sentence: str) -> None:
    with pytest.raises(Unknown) as error:
        container_command.read(words)
    assert str(error.value) == sentence


UNNAMED = {"targetJobs": [{"name": "node"}], "spec": {"volumes": [{}]}}
JAX = "a.yaml:2: JAXJob (kubeflow.org/v1) cannot be converted; TrainJob (trainer.kubeflow.org/v1alpha1) and PyTorchJob ("


@pytest.mark.parametrize(
    ("document", "sentence"),
    [
        (train_job({**TORCHRUN, "numNode": 2}), "a.yaml:14: trainer.numNode is unknown; did you mean numNodes?"),
        (train_job({**TORCHRUN, "numNodes": "2"}), "a.yaml:14: trainer.numNodes (2) must be a whole number"),
        (train_job({**TORCHRUN, "command": "torchrun t.py"}), "a.yaml:9: trainer.command (torchrun t.py) must be a list"),
        (train_job(runtime="deepspeed-distributed"), "is a runtime of MPI; Outlast trains what torchrun or python starts"),
        (train_job({"image": "a"}), "a.yaml: trainer.command is missing, and what the image starts is not known here"),
        (train_job({"image": "a", "command": ["tune", "run"]}), "a.yaml: trainer.command (tune run) is not understood"),
        (train_job(initializer={"model": {"storageUri": "hf://a/b"}}), "initializer.model.storageUri (hf://a/b) is in no store"),
        (train_job(suspend="yes"), "a.yaml: suspend (yes) must be true or false"),
        ({**train_job(), "metadata": {}}, "a.yaml: metadata.name is missing; add it"),
        (train_job(podTemplateOverrides=[UNNAMED]), "podTemplateOverrides[0].spec.volumes[0] has no name; give it"),
        (pytorch_job(elasticPolicy={"minReplica": 1}), "elasticPolicy.minReplica is unknown; did you mean minReplicas?"),
        (pytorch_job({**TORCHRUN, "name": "main"}), "Worker.template.spec.containers has none for the training"),
        ({**pytorch_job(), "spec": {}}, "a.yaml: pytorchReplicaSpecs is missing; give Worker, with the pods that train"),
        ({**train_job(), "kind": "JAXJob", "apiVersion": "kubeflow.org/v1"}, JAX),
    ],
)
def test_a_mistake_or_what_cannot_be_honoured_is_one_sentence(document: dict[str, Any], sentence: str) -> None:
    with pytest.raises(InvalidJob) as error:
        converted(document)
    assert sentence in str(error.value)
    assert len(error.value.problems) == 1


def test_convert_prints_a_job_file_and_says_the_rest(outlast: Outlast, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()
    document = train_job({"image": "a", "command": ["torchrun", "train.py"], "args": ["a\nb"], "numNodes": 2})
    Path("a.yaml").write_text(f"{yaml.safe_dump(document)}---\n# kind: LocalQueue\n")
    code, out, err = outlast("convert", "a.yaml")
    job = spec.parse(out)
    assert (code, job.spec.script, job.spec.code, job.spec.workers.allowed()) == (0, "train.py", str(tmp_path), (1, 2))
    assert "|-\n    a\n    b\n" in out
    assert [line.partition(" (")[0] for line in err.splitlines()] == [
        "outlast | train: trainer.command: train.py is beside this file, whose directory is the code",
        "outlast | train: trainer.numNodes",
    ]
    Path("job.yaml").write_text(out)
    assert outlast("convert", "job.yaml") == (0, out, "")
    said = "outlast init SCRIPT writes a job file, outlast convert FILE translates Kubeflow's"
    assert said in outlast("validate", "a.yaml")[2]
    code, out, err = outlast("render", "a.yaml", "--set", "workers.min=2", "--as", "elasticjob")
    assert (code, yaml.safe_load(out.split("---")[-1])["spec"]["workers"]) == (0, {"replicas": 2, "min": 2, "max": 2})
    assert f"train: trainer.numNodes (2) {ELASTIC.format(2)}" in err


def test_a_program_of_the_image_runs_as_main(tmp_path: Path) -> None:
    (tmp_path / "beside.py").write_text("ANSWER = 42")
    (tmp_path / "mnist.py").write_text("import sys, beside; print(__name__, sys.argv[1:], beside.ANSWER)")

    def run(*words: object) -> str:
        argv = [sys.executable, "-m", "outlast.command", *map(str, words)]
        done = subprocess.run(argv, check=False, capture_output=True, text=True, cwd="/")
        return done.stdout or done.stderr

    assert run(tmp_path / "mnist.py", "--epochs=1") == "__main__ ['--epochs=1'] 42\n"
    assert run("-c", "import sys; f = lambda: __name__; print(f(), sys.argv)", "a") == "__main__ ['-c', 'a']\n"
    assert run("/absent.py") == "outlast | /absent.py is not in this image; give the path of a script, or -c and code\n"


@pytest.mark.slow
@pytest.mark.jobs
def test_a_train_job_trains_here(machine: Machine, outlast: Outlast) -> None:
    command = ["torchrun", "--nproc-per-node=1", str(PROGRAMS / "exact.py"), "--steps=20"]
    path = machine.directory / "trainjob.yaml"
    path.write_text(yaml.safe_dump(train_job({"image": "a", "command": command, "numNodes": 2})))
    code, _, err = outlast("run", path, backend=machine.backend)
    assert code == 0, err
    assert machine.final("train")["step"] == 20
    assert machine.backend.status("train").step == 20
