"""How each system is started, after its documentation. The driver plays the cluster: it starts lost workers again.

Every worker is one process and its agent. `tuned` are the least time-outs that work; where a system can notice a hang, all have
10 s for it.
"""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from bench.resilience import trace
from tests.shared import netns

SCRIPTS = Path(__file__).parent / "scripts"
HANG_S = 10.0


@dataclasses.dataclass
class Scene:
    """Where one job runs."""

    directory: Path
    environ: dict[str, str]
    trace: trace.Trace
    hosts: list[netns.Host]
    """Network namespace per worker, and one for processes outside the workers; empty if all use this machine's network."""
    device: str = "cpu"
    millions: float = 2.0
    running: dict[str, subprocess.Popen[bytes]] = dataclasses.field(default_factory=dict)

    def address(self, worker: int) -> str:
        """Return the address of a worker; -1 is outside of them."""
        return self.hosts[worker].address if self.hosts else "127.0.0.1"

    def start(self, worker: int, command: list[str], name: str, more: Mapping[str, str] = {}) -> None:
        """Start a process on a worker, or outside (-1)."""
        within = ["ip", "netns", "exec", self.hosts[worker].name] if self.hosts else []
        own = {"GLOO_SOCKET_IFNAME": "eth0"} if within else {}
        own |= {"CUDA_VISIBLE_DEVICES": str(max(0, worker))} if self.device == "cuda" else {}
        with (self.directory / f"{name}.log").open("ab") as log:
            environ = {**self.environ, **own, **more}
            self.running[name] = subprocess.Popen([*within, *command], env=environ, stdout=log, stderr=log)

    def port(self) -> int:
        """Return a free port."""
        with socket.socket() as probe:
            probe.bind(("", 0))
            return int(probe.getsockname()[1])


@dataclasses.dataclass
class System:
    """One way to train."""

    title: str
    script: str
    timeout_s: float = HANG_S
    """Time-out of collectives, where the script sets it."""
    python: Path = Path(sys.executable)
    package: str = "torch"
    base: str = "ddp.py"
    """Script with which `script` is compared for the lines that are changed."""
    claims: frozenset[str] = frozenset((*trace.KINDS, "samples"))
    """Faults for which the system does something, and whether each sample comes once; the cells of others are a dash."""
    replaces = False
    """Whether the system starts lost workers itself."""

    def missing(self) -> str:
        """Return why the system cannot run on this machine, or ""."""
        if not self.python.exists():
            return f"there is no {self.python}; see --prepare"
        done = subprocess.run([self.python, "-c", f"import {self.package}"], capture_output=True, text=True, check=False)
        return (done.stderr.strip().splitlines() or ["it cannot be imported"])[-1] if done.returncode else ""

    def versions(self) -> str:
        """Return the version of what is compared."""
        found = f"import importlib.metadata as m; print(m.version({self.package.split('.')[0].replace('_', '-')!r}))"
        done = subprocess.run([self.python, "-c", found], capture_output=True, text=True, check=False)
        return f"{self.package.split('.')[0]} {done.stdout.strip()}"

    def start(self, scene: Scene) -> None:
        """Start what is outside of the workers, and the workers."""
        self.begin(scene)
        for worker in range(scene.trace.workers):
            self.launch(scene, worker)

    def begin(self, scene: Scene) -> None:
        """Start what is outside of the workers."""

    def launch(self, scene: Scene, worker: int) -> None:
        """Start a worker, also in place of one that is gone."""
        raise NotImplementedError

    def agent(self, scene: Scene, worker: int) -> int:
        """Return the process id of a worker's agent."""
        return scene.running[f"worker-{worker}"].pid

    def struck(self, scene: Scene, fault: trace.Fault) -> None:
        """Hear of a fault just before it."""

    def parts(self, scene: Scene) -> list[dict[str, Any]]:
        """Return the system's own account of each failure: its kind, and the seconds of each part."""
        return []

    def resize(self, scene: Scene, size: int) -> None:
        """Ask for another number of workers; without a command of its own, by stopping or starting some."""
        for worker in range(scene.trace.workers):
            there = scene.running[f"worker-{worker}"].poll() is None
            if worker >= size and there:
                os.kill(self.agent(scene, worker), signal.SIGTERM)
            elif worker < size and not there:
                self.launch(scene, worker)


@dataclasses.dataclass
class Torchrun(System):
    """One torchrun per worker, with the c10d store in the first."""

    elastic: bool = False
    conf: str = ""
    program: tuple[str, ...] = ("-m", "torch.distributed.run")
    options: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not self.elastic:
            self.claims -= {"resize"}

    def begin(self, scene: Scene) -> None:
        self._port = scene.port()

    def launch(self, scene: Scene, worker: int) -> None:
        size = f"{scene.trace.least}:{scene.trace.workers}" if self.elastic else f"{scene.trace.workers}"
        conf = ",".join(filter(None, (f"is_host={int(worker == 0)}", self.conf)))
        command = [str(self.python), *self.program, f"--nnodes={size}", "--nproc-per-node=1", "--max-restarts=100"]
        command += ["--rdzv-backend=c10d", f"--rdzv-endpoint={scene.address(0)}:{self._port}", "--rdzv-id=resilience"]
        command += [f"--rdzv-conf={conf}", f"--local-addr={scene.address(worker)}", *self.options]
        scene.start(worker, [*command, str(SCRIPTS / self.script)], f"worker-{worker}", OWN_STORE if self.conf else {})


@dataclasses.dataclass
class Torchft(System):
    """A lighthouse, and a replica group of one rank per worker, each under a torchrun that restarts it."""

    lighthouse: tuple[str, ...] = ()
    claims: frozenset[str] = frozenset(trace.KINDS)

    def begin(self, scene: Scene) -> None:
        self._port = scene.port()
        program = str(self.python.with_name("torchft_lighthouse"))
        options = [f"--min_replicas={scene.trace.least}", *self.lighthouse, f"--bind=[::]:{self._port}"]
        scene.start(-1, [program, *options], "lighthouse")

    def launch(self, scene: Scene, worker: int) -> None:
        more = {"TORCHFT_LIGHTHOUSE": f"http://{scene.address(-1)}:{self._port}", "REPLICA_GROUP_ID": str(worker)}
        more |= {"NUM_REPLICA_GROUPS": str(scene.trace.workers), "MIN_REPLICAS": str(scene.trace.least)}
        command = [str(self.python), "-m", "torch.distributed.run", "--nnodes=1", "--nproc-per-node=1", "--max-restarts=100"]
        command += [f"--master-addr={scene.address(worker)}", f"--master-port={scene.port()}", str(SCRIPTS / self.script)]
        # Its manager is reached by the name of its host, which on nodes with a network of their own must be the node's.
        scene.start(worker, named(scene, worker, command) if scene.hosts else command, f"worker-{worker}", more)


@dataclasses.dataclass
class Dlrover(System):
    """A local master, and per worker a node with a /dev/shm, sockets and host name of its own."""

    def begin(self, scene: Scene) -> None:
        self._port, self._job, self._nodes = scene.port(), f"resilience{scene.port()}", 0
        options = [f"--port={self._port}", f"--node_num={scene.trace.workers}", f"--job_name={self._job}", "--platform=local"]
        scene.start(-1, [str(self.python), "-m", "dlrover.python.master.main", *options], "master")

    def launch(self, scene: Scene, worker: int) -> None:
        sockets = scene.directory / f"{self._job}-{self._nodes}"
        sockets.mkdir(parents=True)
        more = {"DLROVER_MASTER_ADDR": f"{scene.address(-1)}:{self._port}", "NODE_TYPE": "worker", "NODE_ID": str(self._nodes)}
        more |= {"NODE_RANK": str(worker), "NODE_NUM": str(scene.trace.workers), "ELASTIC_JOB_NAME": self._job}
        more |= {"POD_IP": scene.address(worker)}
        self._nodes += 1  # a pod that the master starts in place of another has a new id and the old rank
        size = f"{scene.trace.least}:{scene.trace.workers}"
        command = [str(self.python.with_name("dlrover-run")), f"--nnodes={size}", "--nproc_per_node=1", "--max_restarts=100"]
        own = ("mkdir -p /tmp/ckpt_sock", "mount -t tmpfs own /dev/shm", f"mount --bind {sockets} /tmp/ckpt_sock")
        scene.start(worker, named(scene, worker, [*command, str(SCRIPTS / self.script)], own), f"worker-{worker}", more)


@dataclasses.dataclass
class Ray(System):
    """A head without CPUs that runs Ray Train's driver, and a node of one CPU per worker."""

    resize_s: float | None = None

    def begin(self, scene: Scene) -> None:
        port = scene.port()
        self._address = f"{scene.address(-1)}:{port}"
        ray = [str(self.python.with_name("ray")), "start", "--block", "--disable-usage-stats"]
        self._ray = [*ray, "--object-store-memory=100000000"]
        head = ["--head", f"--port={port}", "--num-cpus=0", "--include-dashboard=false"]
        head += [f"--node-ip-address={scene.address(-1)}"]
        scene.start(-1, [*self._ray, *head, f"--temp-dir={scene.directory / 'ray'}"], "head")

    def start(self, scene: Scene) -> None:
        super().start(scene)
        more = {"RAY_ADDRESS": self._address} | ({} if self.resize_s is None else {"RESIZE_S": str(self.resize_s)})
        scene.start(-1, self._once_there([str(self.python), str(SCRIPTS / self.script)]), "driver", more)

    def launch(self, scene: Scene, worker: int) -> None:
        more = ["--num-cpus=1", f"--node-ip-address={scene.address(worker)}", f"--address={self._address}"]
        scene.start(worker, self._once_there([*self._ray, *more]), f"worker-{worker}")

    def _once_there(self, run: list[str]) -> list[str]:
        """Return a command that runs `run` once the head answers; nodes and drivers end if it does not."""
        health = f"{self.python.with_name('ray')} health-check --address {self._address}"
        return ["sh", "-c", f'until {health} 2>/dev/null; do sleep 0.5; done; exec "$@"', "sh", *run]


@dataclasses.dataclass
class Outlast(System):
    """`outlast run`; with a network per worker, agents as in pods, with worker 0 as the coordinator."""

    replaces = True

    def missing(self) -> str:
        return ""

    def versions(self) -> str:
        import outlast

        done = subprocess.run(
            ["git", "rev-parse", "--short=10", "HEAD"], cwd=SCRIPTS, capture_output=True, text=True, check=False
        )
        return f"outlast {outlast.__version__} {done.stdout.strip()}".strip()

    def start(self, scene: Scene) -> None:
        job = {
            "apiVersion": "outlast.dev/v1alpha1",
            "kind": "ElasticJob",
            "metadata": {"name": "resilience"},
            "spec": {
                "script": self.script,
                "output": str(scene.directory / "out"),
                "workers": {"replicas": scene.trace.workers, "min": scene.trace.least, "max": scene.trace.workers},
                "processesPerWorker": 1,
                "resources": {"gpu": 1} if scene.device == "cuda" else {"cpu": 1},
                "checkpoint": {"every": f"{trace.SAVED_EVERY * trace.STEP_S:g}s"},
                "hang": {"limit": f"{HANG_S:g}s"},
            },
        }
        self._file = scene.directory / "job" / "job.yaml"
        self._file.parent.mkdir(exist_ok=True)
        for name in (self.script, "body.py"):
            (self._file.parent / name).write_bytes((SCRIPTS / name).read_bytes())
        self._file.write_text(json.dumps(job))
        if scene.hosts:
            self._port = scene.port()
            for worker in range(scene.trace.workers):
                self.launch(scene, worker)
        else:
            scene.environ["OUTLAST_STATE_DIR"] = str(scene.directory / "state")
            self._cli(scene, "run", str(self._file), "--detach")

    def _cli(self, scene: Scene, *args: str) -> str:
        command = [str(self.python.with_name("outlast")), *args]
        done = subprocess.run(command, env=scene.environ, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"{' '.join(command)} exited with {done.returncode}:\n{done.stdout}{done.stderr[-2000:]}")
        return done.stdout

    def agent(self, scene: Scene, worker: int) -> int:
        if scene.hosts:
            return super().agent(scene, worker)
        status = json.loads(self._cli(scene, "status", "resilience", "-o", "json"))
        for each in status["workers"]:
            if each["index"] == worker and each["pid"]:
                return int(each["pid"])
        raise RuntimeError(f"there is no worker {worker}")

    def _ledger(self, scene: Scene) -> Path:
        from outlast.job import contract

        return scene.directory / "out" / "resilience" / contract.LEDGER

    def struck(self, scene: Scene, fault: trace.Fault) -> None:
        """Record the fault in the ledger, so that the report has its time."""
        from outlast.job import ledger

        book = ledger.Ledger(self._ledger(scene), "chaos")
        book.write("chaos", action=fault.kind, worker=fault.worker)
        book.close()

    def parts(self, scene: Scene) -> list[dict[str, Any]]:
        from outlast.job import ledger
        from outlast.job.report import goodput, incidents

        names = ("detection", "reforming", "restoring", "again")
        found = goodput.buckets(ledger.read(self._ledger(scene)), time.time()).incidents
        costs = [(each.kind, each.lost) for each in found if each.kind in incidents.FAILURES and each.lost]
        return [{"kind": kind, **{f"{name}_s": getattr(lost, f"{name}_us") / 1e6 for name in names}} for kind, lost in costs]

    def resize(self, scene: Scene, size: int) -> None:
        self._cli(scene, "scale", "resilience", str(size))

    def launch(self, scene: Scene, worker: int) -> None:
        """Start an agent as in a pod."""
        from outlast.job import contract

        env, output, state = contract.Env, scene.directory / "out" / "resilience", scene.directory / f"state-{worker}"
        state.mkdir(exist_ok=True)
        variables = {
            env.JOB: "resilience",
            env.RUN: "resilience-1a2b3c4d",
            env.WORKER: str(worker),
            env.JOB_FILE: str(self._file),
            env.CODE: str(self._file.parent),
            env.OUTPUT: str(output),
            env.CACHE: str(scene.directory / "cache"),
            env.STATE: str(state),
            env.LEDGER: str(output / contract.LEDGER),
            env.NOTICE: str(state / contract.NOTICE),
            env.CHECKPOINT_EVERY: f"{trace.SAVED_EVERY * trace.STEP_S:g}s",
            env.MEMORY: "auto",
            env.REPLICAS: "1",
            env.ADDRESS: scene.address(worker),
            env.RENDEZVOUS_KEY: "resilience",
            env.RENDEZVOUS: f"c10d://{scene.address(0)}:{self._port}",
        }
        scene.start(worker, [str(self.python), "-m", "outlast", "agent"], f"worker-{worker}", variables)


def named(scene: Scene, worker: int, run: list[str], own: Iterable[str] = ()) -> list[str]:
    """Return a command that runs `run` on a host with a name, where all workers' names are known, after the commands `own`."""
    hosts = scene.directory / "hosts"
    names = [f"{scene.address(each)} node-{each}\n" for each in range(scene.trace.workers)]
    hosts.write_text("".join(["127.0.0.1 localhost\n", *names]))
    steps = [*own, f"mount --bind {hosts} /etc/hosts", f"hostname node-{worker}", 'exec "$@"']
    return ["unshare", "-m", "-u", "sh", "-c", " && ".join(steps), "sh", *run]


OWN_STORE = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
"""A new store after each restart: else ranks may find addresses of processes that are gone in the old one (pytorch #135712)."""
LEAST = "last_call_timeout=1,keep_alive_interval=1,keep_alive_max_attempt=2"
"""The shortest waits that torchrun's rendezvous takes."""
UNSET_S = 1800.0
"""Time-out of collectives where a script sets none."""


def known(peers: Path | None) -> dict[str, System]:
    """Return all systems by name. `peers`: directory of the environments that `--prepare` has made."""

    def python(name: str) -> Path:
        return (peers or Path("PEERS")).resolve() / name / "bin" / "python"

    file, beats = (
        "torchrun_file.py",
        ("--ft-param-initial_rank_heartbeat_timeout=30", f"--ft-param-rank_heartbeat_timeout={HANG_S:g}"),
    )
    nvrx = {
        "python": python("nvrx"),
        "package": "nvidia_resiliency_ext",
        "program": ("-m", "nvidia_resiliency_ext.fault_tolerance.launcher"),
    }
    torchft = {"python": python("torchft"), "package": "torchft"}
    least = ("--join_timeout_ms=3000", "--heartbeat_timeout_ms=2000")
    ray = {"python": python("ray"), "package": "ray.train"}
    return {
        "outlast": Outlast("Outlast, own loop", "outlast_loop.py"),
        "outlast-trainer": Outlast("Outlast, Trainer", "outlast_trainer.py", base="hf_trainer.py"),
        "torchrun": Torchrun("torchrun, fixed size", file, UNSET_S),
        "torchrun-tuned": Torchrun("torchrun, fixed size, tuned", file, conf=LEAST),
        "elastic": Torchrun("torchrun, elastic", file, UNSET_S, elastic=True),
        "elastic-tuned": Torchrun("torchrun, elastic, tuned", file, elastic=True, conf=LEAST),
        "dcp": Torchrun("torchrun, fixed size, tuned, DCP", "torchrun_dcp.py", conf=LEAST),
        "hf": Torchrun(
            "Trainer alone, torchrun tuned", "hf_trainer.py", package="transformers", base="hf_trainer.py", conf=LEAST
        ),
        "torchft": Torchft("torchft", "torchft_groups.py", 60.0, **torchft),
        "torchft-tuned": Torchft("torchft, tuned", "torchft_groups.py", **torchft, lighthouse=least),
        "dlrover": Dlrover("DLRover", "dlrover_flash.py", python=python("dlrover"), package="dlrover"),
        "nvrx": Torchrun("NVRx ft_launcher", "nvrx.py", UNSET_S, **nvrx),
        "nvrx-tuned": Torchrun("NVRx ft_launcher, tuned", "nvrx.py", UNSET_S, **nvrx, conf=LEAST, options=beats),
        "ray": Ray("Ray Train", "ray_train.py", UNSET_S, **ray),
        "ray-tuned": Ray("Ray Train, tuned", "ray_train.py", **ray, resize_s=5.0),
    }
