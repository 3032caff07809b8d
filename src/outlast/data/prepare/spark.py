"""Spark as the engine of `outlast data prepare`: its executors run the units of a `work_units.Place`.

The driver and the executors access the source and the target at the same paths. Under spark-submit this process is the driver:
Java is already running, and spark-submit has set the master and the configuration.

https://spark.apache.org/docs/latest/configuration.html, https://spark.apache.org/docs/latest/submitting-applications.html.
"""

from __future__ import annotations

import contextlib
import functools
import math
import os
import pickle
import re
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from outlast.base.errors import OutlastError, importing
from outlast.data import spark_java
from outlast.data.dataset_directory import Say
from outlast.data.prepare import source_files, work_units

PARTITIONS = 4096
"""Default maximum number of tasks per stage. One task per unit balances the load best, but more tasks would overload Spark's
driver."""
FAILURES = 4
"""Maximum number of attempts per task; Spark's default."""
_RESERVED = {"spark.master": "--master", "spark.submit.deployMode": "--master"}
"""Configuration keys that --conf may not set, and the option to use instead."""
_POLL_S = 0.1
_END_S = 10.0
"""Timeout in seconds for a cancelled job to end."""
_ANSWER_S = 5.0
_NO_EXECUTOR_S = 60.0
"""Seconds without an executor before a warning. Arbitrary: executors start within seconds."""
_PENDING = " (kubectl get pods -l spark-role=executor shows those that wait; a quota or Pod Security lets none be made)"
_U = TypeVar("_U", bound=work_units.Work)


@dataclass(frozen=True)
class Settings:
    """A session's settings, as returned by `settings`."""

    master: str = "local[*]"
    """URL of the Spark master; empty under spark-submit, which has set the master."""
    partitions: int | None = None
    """Number of tasks per stage; None means one per unit, at most PARTITIONS."""
    conf: Mapping[str, str] = field(default_factory=dict)

    @property
    def failures(self) -> int:
        """Maximum number of attempts per task."""
        return int(self.conf.get("spark.task.maxFailures", FAILURES))


def settings(master: str | None, partitions: int | None, conf: Sequence[str]) -> Settings:
    """Return the settings from the options `--master`, `--partitions` and `--conf`. Raises OutlastError for invalid options."""
    given = {}
    for each in conf:
        key, equals, value = each.partition("=")
        if not equals or not re.fullmatch(r"spark\.\S+", key):
            raise OutlastError(f"--conf {each} is not Spark's KEY=VALUE; write --conf spark.executor.memory=4g")
        if key in _RESERVED:
            raise OutlastError(f"--conf {each} is for Outlast to decide; leave it out, and use {_RESERVED[key]}")
        given[key] = value
    failures = given.get("spark.task.maxFailures", "1")
    if not failures.isdecimal() or int(failures) < 1:
        raise OutlastError(f"--conf spark.task.maxFailures={failures} is no number of attempts; give 1 or more")
    if submitted() and (master or given):
        raise OutlastError(
            f"{'--master' if master else '--conf'} is for spark-submit, which runs this; give it before the program"
        )
    return Settings("" if submitted() else master or "local[*]", partitions, given)


def submitted() -> bool:
    """Return whether spark-submit started this process."""
    return "PYSPARK_GATEWAY_PORT" in os.environ


def configuration(settings: Settings) -> dict[str, str]:
    """Return the Spark configuration for a session. Libraries are limited to one thread because a unit runs on one core."""
    local = re.fullmatch(r"local(?:\[([^,\]]+)\])?", settings.master)  # local Spark retries only if given a number of attempts
    master = f"local[{local[1] or 1},{settings.failures}]" if local else settings.master
    threads = {"RAYON_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    defaults = {"spark.app.name": "outlast data prepare", "spark.ui.enabled": "false", "spark.ui.showConsoleProgress": "false"}
    of_executors = {f"spark.executorEnv.{name}": value for name, value in threads.items()}
    return {**({} if submitted() else defaults), **of_executors, **settings.conf, **({"spark.master": master} if master else {})}


# ---- prerequisites


def pyspark() -> Any:
    """Import and return pyspark. Raises OutlastError if it is not installed."""
    with importing("--engine spark", "spark"):
        import pyspark
    return pyspark


def check_home(version: str, home: str | None) -> None:
    """Raise OutlastError if `home`, the SPARK_HOME, has no Spark, or a version of Spark that differs from pyspark's."""
    jars = [path.name for path in Path(home, "jars").glob("spark-core_*.jar")] if home else []
    match = re.match(r"spark-core_[\d.]+-((\d+\.\d+).*)\.jar", jars[0]) if jars else None
    if home and (not match or match[2] != ".".join(version.split(".")[:2])):
        content = f"which has Spark {match[1]}" if match else "where there is no Spark"
        raise OutlastError(
            f"SPARK_HOME is {home}, {content}, and pyspark is {version}; unset SPARK_HOME, or install that pyspark"
        )


def _check_answers(master: str) -> None:
    """Raise OutlastError if none of the standalone masters accepts connections; Spark itself would wait a minute."""
    problem: OSError | None = None
    for address in master.removeprefix("spark://").split(",") if master.startswith("spark://") else ():
        host, _, port = address.partition(":")
        try:
            socket.create_connection((host, int(port)), _ANSWER_S).close()
            return
        except (OSError, OverflowError) as error:
            problem = error if isinstance(error, OSError) else OSError(str(error))
    if problem:
        raise OutlastError(
            f"--master {master} does not answer ({problem.strerror or problem}); start Spark's master there, or correct the "
            "address"
        )


def _check_reached(settings: Settings) -> None:
    """Raise OutlastError if executors on Kubernetes cannot connect to this driver."""
    outside = settings.master.startswith("k8s://") and "KUBERNETES_SERVICE_HOST" not in os.environ
    if outside and "spark.driver.host" not in settings.conf:
        raise OutlastError(
            f"--master {settings.master} starts executors that must reach this process, which is in no pod of it; run it in "
            "one, or by spark-submit, as examples/spark does, or say how they reach it: --conf spark.driver.host=ADDRESS"
        )


def explained(message: str, log: str) -> OutlastError:
    """Return the error to show for an error message from Spark. `log` is the file with Spark's output."""
    if module := re.search(r"No module named '(\w+)", message):
        return OutlastError(
            f"Spark's executors lack the Python package {module[1]}; install Outlast there as it is here, or name "
            "its Python with --conf spark.pyspark.python=PATH"
        )
    killed = r"ExecutorLostFailure|exited unexpectedly|MemoryError|Master removed our application|Answer from Java side is empty"
    if re.search(rf"{killed}|Error while (sending|receiving)|Connection (refused|reset)", message):
        return OutlastError(
            "Spark's processes were killed, probably for lack of memory; run the same command, which goes on, with fewer cores "
            f"or more memory for each (--conf spark.executor.memoryOverhead=2g); Spark's own words are in {log}"
        )
    return OutlastError(f"Spark gave up: {_reason(message)}; correct that and run the same command again; see {log}")


def _reason(message: str) -> str:
    first = re.search(r"^: *(.+)$", message, re.MULTILINE)
    line = first[1] if first else message.strip().partition("\n")[0] or "it does not say why"
    line = re.sub(r"^.*most recent failure: Lost task.*? executor \S+\): ", "", line)
    if "Traceback (most recent call last)" in line:  # from Python in an executor: the reason is its last line
        last = re.search(r"^\S.*", message.partition(line)[2], re.MULTILINE)
        line = last[0] if last else line
    return re.sub(r'^(Exception in thread "\w+" )?([\w.$]+(Exception|Error): )?(Error: )?', "", line).strip().rstrip(".")


# ---- in the driver


class Engine:
    """An engine that uses Spark, created by `opened`. Spark starts when the first units run."""

    def __init__(self, settings: Settings, context: Any = None, say: Say = lambda line: None) -> None:
        self._settings = settings
        self._say = say
        self.context = context
        self._session: _Session | None = None

    def start(self, check: Callable[[], None] = lambda: None) -> None:
        """Start Spark unless it is running. Calls `check` while Spark starts."""
        if self.context is None:
            self._session = self._session or _Session(self._settings)
            self.context = self._session.started(check)

    def done(
        self, task: work_units.Task[_U], units: Sequence[_U], check: Callable[[], None], finished: Callable[[int], None]
    ) -> Mapping[int, work_units.Note]:
        self.start(check)
        context = self.context
        parts = min(self._settings.partitions or PARTITIONS, len(units))
        groups = [units[i::parts] for i in range(parts)]
        progress = context.accumulator((0, ()), _Progress())
        attempts = int(context.getConf().get("spark.task.maxFailures", str(self._settings.failures)))
        run = functools.partial(_run, task=task, progress=progress, attempts=attempts)
        group = uuid.uuid4().hex

        def collected() -> Any:
            context.setJobGroup(group, f"{task.stage} of {task.private.parent}", interruptOnCancel=True)
            return context.parallelize(groups, parts).mapPartitions(run).collect()

        job, reported, watch = _in_thread(collected), 0, _ExecutorWatch(context, self._say)
        try:
            while not _ended(job):
                check()
                watch.check()
                count, errors = progress.value
                if errors:
                    raise errors[0]
                if count > reported:
                    finished(count - reported)
                    reported = count
        except BaseException:
            with contextlib.suppress(Exception):  # Java may have ended
                context.cancelJobGroup(group)
            wait([job], _END_S)
            raise
        notes: dict[int, work_units.Note] = {}
        try:
            results = job.result()
        except Exception as error:
            raise (self._session.explained(error) if self._session else explained(str(error), "its log")) from None
        for some, mistake in results:
            if mistake:
                raise mistake
            notes |= some
        finished(sum(unit.bytes for unit in units) - reported)
        return notes

    def close(self) -> None:
        """End the session, if this engine started it."""
        if self._session:
            self._session.close()


class _ExecutorWatch:
    """Reports when a stage has no executors, because Spark only logs that."""

    def __init__(self, context: Any, say: Say) -> None:
        self._context, self._master, self._say = context, str(context.master), say
        self._next_check = math.inf if re.match(r"local(\[|$)", self._master) else time.monotonic() + _NO_EXECUTOR_S

    def check(self) -> None:
        if time.monotonic() < self._next_check:
            return
        self._next_check += _NO_EXECUTOR_S
        with contextlib.suppress(Exception):  # Java may have ended; then the job fails, too
            if self._context._jsc.sc().getExecutorMemoryStatus().size() < 2:  # the driver counts as an executor
                self._say(
                    f"no executor has come for {_NO_EXECUTOR_S:.0f} s: {self._master} has no free cores or memory for one, or "
                    f"its machines do not reach this one{_PENDING if self._master.startswith('k8s://') else ''}; waiting for them"
                )


@contextlib.contextmanager
def opened(settings: Settings, say: Say = lambda line: None) -> Iterator[Engine]:
    """Yield an engine that uses Spark and reports missing executors to `say`. Raises OutlastError if Spark cannot run."""
    version = pyspark().__version__
    check_home(version, os.environ.get("SPARK_HOME"))
    spark_java.home(version)
    _check_answers(settings.master)
    _check_reached(settings)
    engine = Engine(settings, say=say)
    try:
        yield engine
    finally:
        engine.close()


class _Session:
    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._context: Any = None
        self._gateway: Any = None
        self._log: Path | None = None
        if not submitted():  # under spark-submit, Spark shares this process's output
            fd, name = tempfile.mkstemp(prefix="outlast-spark-", suffix=".log")
            os.close(fd)
            self._log = Path(name)

    def started(self, check: Callable[[], None]) -> Any:
        call = _in_thread(self._start)  # in the main thread pyspark would handle Ctrl-C
        while not _ended(call):
            check()
        try:
            return call.result()
        except OutlastError:
            raise
        except Exception as error:
            raise self.explained(error) from None

    def _start(self) -> Any:
        library = pyspark()
        from pyspark.java_gateway import launch_gateway

        os.environ["JAVA_HOME"] = str(spark_java.home(library.__version__))
        os.environ["PYSPARK_PYTHON"] = self._settings.conf.get("spark.pyspark.python", sys.executable)
        conf = library.SparkConf().setAll(list(configuration(self._settings).items()))
        with contextlib.ExitStack() as stack:
            out = stack.enter_context(self._log.open("ab")) if self._log else sys.stderr.fileno()
            self._gateway = launch_gateway(conf, {"stdout": out, "stderr": out})
        self._context = library.SparkContext(gateway=self._gateway, conf=conf)
        return self._context

    def explained(self, error: Exception) -> OutlastError:
        """Return the error to show. It names the log file, which is kept."""
        log, self._log = self._log, None
        message = str(error)
        if log and self._context is None and "JAVA_GATEWAY_EXITED" in message:
            lines = [line for line in log.read_text(errors="replace").splitlines() if re.search(r"rror|xception|Invalid", line)]
            message = lines[0] if lines else "Java did not start"
        return explained(message, str(log) if log else "this log")

    def close(self) -> None:
        with contextlib.suppress(Exception):  # Java may have ended
            if self._context:
                self._context.stop()
        if self._gateway:
            self._end()
        if self._log:
            self._log.unlink(missing_ok=True)

    def _end(self) -> None:
        library, process = pyspark(), self._gateway.proc
        if submitted():
            return  # spark-submit ends its Java itself
        with contextlib.suppress(Exception):
            self._gateway.shutdown()
        library.SparkContext._gateway = library.SparkContext._jvm = None  # otherwise the next context would use this Java
        if process:
            process.stdin.close()  # Java ends when its input is closed
            try:
                process.wait(_END_S)
            except subprocess.TimeoutExpired:
                process.kill()


def _in_thread(call: Callable[[], Any]) -> Future[Any]:
    """Run a call in a daemon thread, which does not delay this process's exit."""
    future: Future[Any] = Future()

    def run() -> None:
        try:
            future.set_result(call())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future


def _ended(future: Future[Any]) -> bool:
    return bool(wait([future], _POLL_S).done)


# ---- in executors


class _Progress:
    """A Spark accumulator for finished bytes and errors: (int, tuple of exceptions)."""

    def zero(self, value: Any) -> Any:
        return (0, ())

    def addInPlace(self, one: Any, other: Any) -> Any:
        return (one[0] + other[0], one[1] + other[1])


def _run(
    groups: Iterable[Sequence[_U]], *, task: work_units.Task[_U], progress: Any, attempts: int
) -> Iterator[tuple[dict[int, work_units.Note], Exception | None]]:
    """Run a task's units, and yield their notes and the error that ended the task, if any. Errors that may be due to this machine
    are raised, so that Spark retries, unless this is the last attempt."""
    from pyspark import TaskContext

    notes: dict[int, work_units.Note] = {}
    for unit in (unit for group in groups for unit in group):
        try:
            notes[unit.number] = task(unit)
        except Exception as error:
            if _of_machine(error) and TaskContext.get().attemptNumber() + 1 < attempts:
                raise
            sendable = _sendable(error)
            progress.add((0, (sendable,)))
            yield notes, sendable
            return
        progress.add((unit.bytes, ()))
    yield notes, None


def _of_machine(error: Exception) -> bool:
    """Return whether an error may be due to this machine. A BadSource is the user's mistake, and so is any other OutlastError
    that was not caused by an OSError."""
    if isinstance(error, OutlastError):
        return isinstance(error.__cause__, OSError) and not isinstance(error, source_files.BadSource)
    return True


def _sendable(error: Exception) -> Exception:
    """Return an exception that can be pickled. Unexpected exceptions include their traceback."""
    if isinstance(error, MemoryError):
        return OutlastError(
            "an executor had too little memory for a unit of work; run the same command, which goes on, with fewer cores or more "
            "memory for each (--conf spark.executor.memoryOverhead=2g)"
        )
    if not isinstance(error, OutlastError | OSError):
        error.add_note(f"In an executor:\n{''.join(traceback.format_exception(error))}")
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError("".join(traceback.format_exception(error)))
    error.__traceback__ = None
    return error
