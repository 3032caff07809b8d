"""Errors that users can correct.

An `OutlastError` is a user's mistake or a machine fault: the command line prints its message without a traceback and exits with
`exit_code`. Any other exception is a bug. Messages name the wrong value, what is expected and the remedy.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence


class OutlastError(Exception):
    """An error that the user can correct."""

    exit_code = 2

    def _render_traceback_(self) -> list[str]:
        """Return what IPython shows instead of a traceback."""
        return [f"{type(self).__name__}: {self}"]


class InvalidJob(OutlastError):
    """The job file is wrong. `problems` are pairs (line number or None, sentence), in order of the lines."""

    def __init__(self, problems: Sequence[tuple[int | None, str]], *, source: str = "job") -> None:
        self.problems = tuple(problems)
        self.source = source
        lines = [f"{source}:{line}: {text}" if line else f"{source}: {text}" for line, text in self.problems]
        super().__init__("\n".join(lines))


class NotFound(OutlastError):
    """Something that the user named does not exist."""


class AlreadyRunning(OutlastError):
    """The job is running already, or another process holds its lock."""


class NoRoom(OutlastError):
    """A disk in this world is full. This counts as a failure, because a retry or another world may succeed."""


class NotRestored(OutlastError):
    """The newest state cannot be read now. This counts as a failure, because a retry may succeed."""


class NotSaved(OutlastError):
    """The last step was not saved. This counts as a failure, because restarted processes resume from memory and try again."""


class WrongBits(OutlastError):
    """This rank's bits differ from those of most ranks. This counts as a failure, and another worker replaces this one."""


class Superseded(OutlastError):
    """This process belongs to a generation that has been replaced, and must stop."""


class ClusterError(OutlastError):
    """A cluster did not do what was requested."""

    exit_code = 1


class NoCluster(ClusterError):
    """The kubeconfig does not exist, or lacks the requested context."""

    exit_code = 2


class Absent(ClusterError, NotFound):
    """The object, or its namespace, does not exist in the cluster."""

    exit_code = 2


class Taken(ClusterError):
    """The object to create exists already."""

    exit_code = 2


class Conflict(ClusterError):
    """The object has changed since it was read."""


class Forbidden(ClusterError):
    """The user lacks a permission."""


class Unauthorized(ClusterError):
    """The cluster does not accept the login."""


class Refused(ClusterError):
    """The cluster rejects the object because of its schema, a quota, a policy or a webhook."""


class NotServed(ClusterError):
    """The cluster does not serve this kind of object, because its API is not installed."""


class Unanswered(ClusterError):
    """The cluster is unreachable or unhealthy; a retry can help."""


class EtcdError(OutlastError):
    """etcd did not do what was requested."""

    exit_code = 1


class EtcdAway(EtcdError):
    """No etcd endpoint is reachable and healthy; a retry can help."""


class EtcdRefused(EtcdError):
    """The server does not speak etcd v3, rejects the login or the certificate, or is full."""

    exit_code = 2


class StoreError(OutlastError):
    """A store did not do what was requested. `retry` is True if a retry can help."""

    def __init__(self, message: str, *, retry: bool = False) -> None:
        super().__init__(message)
        self.retry = retry


class Missing(StoreError):
    """The object does not exist in the store."""


class NoBucket(StoreError):
    """The bucket or container does not exist. This is not a subclass of Missing, because writes fail as well."""


class Exists(StoreError):
    """The object to create exists already."""


class Changed(StoreError):
    """The object to replace, or the file being uploaded, has changed."""


class Denied(StoreError):
    """The credentials are wrong, or lack a permission."""


class Stopped(StoreError):
    """The operation was interrupted by a request to stop."""


class Unreachable(StoreError):
    """The store is unreachable or unhealthy. Training continues, and the operation is retried."""

    exit_code = 1

    def __init__(self, message: str) -> None:
        super().__init__(message, retry=True)


@contextlib.contextmanager
def importing(purpose: str, extra: str) -> Iterator[None]:
    """Wrap imports of libraries that the extra `extra` installs. Raises OutlastError if one is missing."""
    try:
        yield
    except ModuleNotFoundError as error:
        library = (error.name or "").partition(".")[0]
        raise OutlastError(f"{purpose} needs the library {library}; run: pip install 'outlast[{extra}]'") from error


def causes(error: BaseException) -> Iterator[BaseException]:
    """Yield an exception and its causes, each once, even if an exception is its own cause."""
    seen: list[BaseException] = []
    cause: BaseException | None = error
    while cause is not None and cause not in seen:
        seen.append(cause)
        yield cause
        cause = cause.__cause__ or cause.__context__
