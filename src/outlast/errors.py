"""Errors that users can correct.

An `OutlastError` is a mistake of the user or a fault of the machine: the command line prints its message without a traceback and
exits with `exit_code`. Any other exception is a bug and keeps its traceback. A message holds the value, the expectation and the
remedy.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence


class OutlastError(Exception):
    """A mistake that its reader can correct."""

    exit_code = 2


class InvalidJob(OutlastError):
    """The job file is wrong.

    `problems` are (line or None, sentence) pairs in file order; the message joins them, one a line.
    """

    def __init__(self, problems: Sequence[tuple[int | None, str]], *, source: str = "job") -> None:
        self.problems = tuple(problems)
        self.source = source
        lines = [f"{source}:{line}: {text}" if line else f"{source}: {text}" for line, text in self.problems]
        super().__init__("\n".join(lines))


class NotFound(OutlastError):
    """Something that was named does not exist."""


class AlreadyRunning(OutlastError):
    """The job is being run by another process."""


class NoRoom(OutlastError):
    """A disk of this world cannot take what it must. Counts as a failure: another try or another world may do."""


class Superseded(OutlastError):
    """This process belongs to a generation that has been replaced."""


class ClusterError(OutlastError):
    """A cluster did not do what it was asked to."""

    exit_code = 1


class NoCluster(ClusterError):
    """Which cluster is meant is not known: there is no kubeconfig, or no such context in it."""

    exit_code = 2


class Absent(ClusterError, NotFound):
    """The cluster has no such document, or no such namespace."""

    exit_code = 2


class Taken(ClusterError):
    """The document that was to be created exists already."""

    exit_code = 2


class Conflict(ClusterError):
    """The document that was to be changed is no longer what it was."""


class Forbidden(ClusterError):
    """The user has not the right to do this."""


class Unauthorized(ClusterError):
    """The cluster does not accept the login."""


class Refused(ClusterError):
    """The cluster does not accept what it was given."""


class NotServed(ClusterError):
    """The cluster does not know this kind of document."""


class Unanswered(ClusterError):
    """The cluster cannot be reached, or is not well; trying again later can help."""


class EtcdError(OutlastError):
    """An etcd did not do what it was asked to."""

    exit_code = 1


class EtcdAway(EtcdError):
    """No endpoint of the etcd can be reached, or none is well; trying again later can help."""


class EtcdRefused(EtcdError):
    """What answers is no etcd that speaks v3, does not accept the login or the certificate, or has no room."""

    exit_code = 2


class StoreError(OutlastError):
    """A store did not do what it was asked to. `retry`: whether trying again later can help."""

    def __init__(self, message: str, *, retry: bool = False) -> None:
        super().__init__(message)
        self.retry = retry


class Missing(StoreError):
    """There is no such object."""


class NoBucket(StoreError):
    """There is no such bucket or container. No kind of Missing: who writes there later would fail as well."""


class Exists(StoreError):
    """The object that was to be created exists already."""


class Changed(StoreError):
    """The object that was to be replaced, or the file that is being uploaded, is no longer what it was."""


class Denied(StoreError):
    """The credentials are wrong, or do not permit this."""


class Stopped(StoreError):
    """We were asked to stop in the middle of it."""


class Unreachable(StoreError):
    """The store cannot be reached, or is not well; training goes on and we try again later."""

    exit_code = 1

    def __init__(self, message: str) -> None:
        super().__init__(message, retry=True)


def causes(error: BaseException) -> Iterator[BaseException]:
    """An exception and what it came from, each once: after `raise error from error` it is its own cause."""
    seen: list[BaseException] = []
    cause: BaseException | None = error
    while cause is not None and cause not in seen:
        seen.append(cause)
        yield cause
        cause = cause.__cause__ or cause.__context__
