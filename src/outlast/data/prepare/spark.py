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
import re
import sys
import threading
import time
import traceback
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
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
_ATTEMPTS = "spark.task.maxFailures"
_POLL_S = 0.1
_END_S = 10.0
"""Timeout in seconds for a cancelled job to end."""
_NO_EXECUTOR_S = 60.0
"""Seconds without an executor before a warning. Arbitrary: executors start within seconds."""
_U = TypeVar("_U", bound=work_units.Work)


@dataclass(frozen=True)
class Settings:
    """A session's settings, as returned by `settings`."""

    master: str = "local[*]"
    """URL of the Spark master; empty under spark-submit, which has set the master."""
    partitions: int | None = None
    """Number of tasks per stage; None means one per unit, at most PARTITIONS."""
    conf: Mapping[str, str] = field(default_factory=dict)


def settings(master: str | None, partitions: int | None, conf: Sequence[str]) -> Settings:
    """Return the settings from the options `--master`, `--partitions` and `--conf`. Raises OutlastError for invalid options."""
    given = {}
    for each in conf:
        key, equals, value = each.partition("=")
        if not equals or not key.startswith("spark.") or key == "spark.master":
            raise OutlastError(
                f"--conf {each} is not KEY=VALUE of Spark; write --conf spark.executor.memory=4g, and --master for the master"
            )
        given[key] = value
    if not re.fullmatch(r"[1-9]\d*", attempts := given.get(_ATTEMPTS, "1")):
        raise OutlastError(f"--conf {_ATTEMPTS}={attempts} is not a number of attempts; give 1 or more")
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
    master = f"local[{local[1] or 1},{settings.conf.get(_ATTEMPTS, FAILURES)}]" if local else settings.master
    threads = {"RAYON_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    defaults = {"spark.app.name": "outlast data prepare", "spark.ui.enabled": "false", "spark.ui.showConsoleProgress": "false"}
    of_executors = {f"spark.executorEnv.{name}": value for name, value in threads.items()}
    return {**({} if submitted() else defaults), **of_executors, **settings.conf, **({"spark.master": master} if master else {})}


def gave_up(message: str) -> OutlastError:
    """Return the error to show for an error message from Spark."""
    reasons = re.findall(r"^(?:: *)?([\w.]+(?:Error|Exception): .+)$", message, re.MULTILINE)
    line = (reasons or [message.strip().partition("\n")[0]])[-1].strip().rstrip(".") or "it does not say why"
    memory = "if processes were killed: more memory, --conf spark.executor.memoryOverhead=2g"
    return OutlastError(f"Spark gave up: {line}; correct that ({memory}) and run the same command, which goes on")


# ---- in the driver


class Engine:
    """An engine that uses Spark, created by `opened`. Spark starts when the first units run."""

    def __init__(self, settings: Settings, context: Any = None, say: Say = lambda line: None) -> None:
        self._settings = settings
        self._say = say
        self.context = context

    def done(
        self, task: work_units.Task[_U], units: Sequence[_U], check: Callable[[], None], finished: Callable[[int], None]
    ) -> Mapping[int, work_units.Note]:
        self.start(check)
        context = self.context
        parts = min(self._settings.partitions or PARTITIONS, len(units))
        groups = [units[i::parts] for i in range(parts)]
        progress = context.accumulator((0, ()), _Progress())
        attempts = int(context.getConf().get(_ATTEMPTS, str(FAILURES)))
        run = functools.partial(_run, task=task, progress=progress, attempts=attempts)
        group = uuid.uuid4().hex

        def collected() -> Any:
            context.setJobGroup(group, f"{task.stage} of {task.private.parent}", interruptOnCancel=True)
            return context.parallelize(groups, parts).mapPartitions(run).collect()

        job, reported, watch = _in_thread(collected), 0, _ExecutorWatch(context, self._say)
        ended = False
        try:
            while not ended:
                ended = _ended(job)
                check()
                watch.check()
                count, errors = progress.value
                if errors:
                    raise errors[0]
                finished(count - reported)
                reported = count
        except BaseException:
            with contextlib.suppress(Exception):  # Java may have ended
                context.cancelJobGroup(group)
            wait([job], _END_S)
            raise
        notes = dict(_result(job))
        finished(sum(unit.bytes for unit in units) - reported)
        return notes

    def start(self, check: Callable[[], None] = lambda: None) -> None:
        """Start Spark unless it is running. Calls `check` while Spark starts."""
        if self.context is None:
            call = _in_thread(lambda: _context(self._settings))  # in the main thread pyspark would handle Ctrl-C
            while not _ended(call):
                check()
            self.context = _result(call)


def _context(settings: Settings) -> Any:
    library = pyspark()
    os.environ["JAVA_HOME"] = str(spark_java.home())
    os.environ["PYSPARK_PYTHON"] = settings.conf.get("spark.pyspark.python", sys.executable)
    context = library.SparkContext(conf=library.SparkConf().setAll(list(configuration(settings).items())))
    context.setLogLevel("ERROR")
    return context


def _result(call: Future[Any]) -> Any:
    try:
        return call.result()
    except OutlastError:
        raise
    except Exception as error:
        raise gave_up(str(error)) from None


def pyspark() -> Any:
    """Import and return pyspark. Raises OutlastError if it is not installed."""
    with importing("--engine spark", "spark"):
        import pyspark
    return pyspark


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
                    "its machines do not reach this one; waiting for them"
                )


@contextlib.contextmanager
def opened(settings: Settings, say: Say = lambda line: None) -> Iterator[Engine]:
    """Yield an engine that uses Spark and reports missing executors to `say`. Raises OutlastError if Spark cannot run."""
    pyspark()
    spark_java.home()
    engine = Engine(settings, say=say)
    try:
        yield engine
    finally:
        with contextlib.suppress(Exception):  # Java may have ended, or not have started
            engine.context.stop()


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
) -> Iterator[tuple[int, work_units.Note]]:
    """Run a task's units, and yield their numbers and notes. Errors that may be due to this machine are raised, so that Spark
    retries, unless this is the last attempt. Other errors end the task, and are added to `progress`."""
    from pyspark import TaskContext

    for unit in (unit for group in groups for unit in group):
        try:
            yield unit.number, task(unit)
        except Exception as error:
            if of_machine(error) and TaskContext.get().attemptNumber() + 1 < attempts:
                raise
            sendable = isinstance(error, OutlastError | OSError)  # others may not be pickled
            progress.add((0, (error if sendable else RuntimeError("".join(traceback.format_exception(error))),)))
            return
        progress.add((unit.bytes, ()))


def of_machine(error: Exception) -> bool:
    """Return whether an error may be due to this machine: a user's mistake is a BadSource, or was not caused by an OSError."""
    mistake = isinstance(error, OutlastError) and not isinstance(error.__cause__, OSError)
    return not mistake and not isinstance(error, source_files.BadSource)
