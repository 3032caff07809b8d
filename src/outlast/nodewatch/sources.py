"""The metadata services of AWS, Google and Azure, as a machine sees them. Thin: `notices` understands what they say.

    source = sources.of("aws")
    source.read(now)           the notices that hold now; raises MetadataAway
    source.acknowledge(notice) tells the cloud that it need not wait any longer, where it asks for that

A request is answered in milliseconds or not at all, so the timeout is short, and nothing is repeated here: the caller asks again
soon. Proxies of the environment are not used: the address is the machine's own.
"""

from __future__ import annotations

import http.client
import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal, Protocol
from urllib.parse import urlsplit

from outlast.errors import OutlastError
from outlast.nodewatch import notices
from outlast.nodewatch.notices import Notice

Cloud = Literal["aws", "gcp", "azure"]
ADDRESS = "http://169.254.169.254"
"""Of the metadata service of all three clouds, from the machine itself."""
TIMEOUT_S = 1.0
"""Of one request."""
_MOST = 256 * 2**10
"""Bytes of an answer; real ones have a few hundred."""
_TOKEN_S = 6 * 3600
"""Lifetime of a token, the longest that AWS gives."""
_RENEW_S = 300.0
"""A token is renewed so long before its end."""
_AZURE_EVENTS = "/metadata/scheduledevents?api-version=2020-07-01"
_AZURE_NAME = "/metadata/instance/compute/name?api-version=2021-02-01&format=text"
_AZURE_FIRST_S = 10.0
"""Timeout of a request for events: Azure switches them on at the first one, which takes longer."""


class MetadataAway(OutlastError):
    """A metadata service cannot be asked, or does not say what it should; a retry may help."""

    exit_code = 1


class Source(Protocol):
    """Where notices come from."""

    name: str
    """In sentences: `AWS's metadata service`."""

    def read(self, now: float) -> list[Notice]:
        """The notices that hold now. Raises MetadataAway."""

    def acknowledge(self, notice: Notice) -> None:
        """Allow the cloud to go on before the deadline, if it asks for that. Raises MetadataAway."""


@dataclass(frozen=True)
class Answer:
    """An answer of a metadata service."""

    status: int
    text: str


@dataclass(frozen=True)
class Metadata:
    """A metadata service. `ask` raises MetadataAway when there is no answer."""

    address: str
    name: str
    timeout_s: float

    def ask(self, path: str, headers: Mapping[str, str], *, method: str = "GET", body: str | None = None) -> Answer:
        """The answer to one request, whatever its status."""
        url = urlsplit(self.address)
        make = http.client.HTTPSConnection if url.scheme == "https" else http.client.HTTPConnection
        connection = make(url.hostname or "", url.port, timeout=self.timeout_s)
        try:
            connection.request(method, path, body, dict(headers))
            answer = connection.getresponse()
            return Answer(answer.status, answer.read(_MOST).decode(errors="replace"))
        except (OSError, http.client.HTTPException, ValueError) as error:
            why = "it does not answer in time" if isinstance(error, TimeoutError) else str(error) or type(error).__name__
            raise MetadataAway(f"{self.name} at {self.address} cannot be reached: {why}; {_REMEDY}") from error
        finally:
            connection.close()

    def wrong(self, path: str, answer: Answer) -> MetadataAway:
        """The error of an answer that is none."""
        said = " ".join(answer.text.split())[:120]
        return MetadataAway(f"{self.name} answers {path} with HTTP {answer.status} ({said or 'nothing'}); {_REMEDY}")

    def unread(self, path: str, error: ValueError) -> MetadataAway:
        """The error of a document that cannot be read."""
        return MetadataAway(f"{self.name} answers {path} with a document that is not understood: {error}; {_REMEDY}")


_REMEDY = "see that the machine's metadata is switched on, that the pod has the host's network, and that --cloud is right"


@dataclass
class Aws:
    """AWS's, with the tokens of IMDSv2: https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/instance-metadata-v2-how-it-works.html"""

    address: str = ADDRESS
    rebalance: bool = True
    """Whether a rebalance recommendation is a notice."""
    timeout_s: float = TIMEOUT_S
    clock: Callable[[], float] = time.monotonic
    name: str = "AWS's metadata service"
    _token: str = field(default="", repr=False)
    _until: float = 0.0

    def read(self, now: float) -> list[Notice]:
        """An interruption is all that matters once there is one; else recommendation and scheduled events."""
        spot = self._get("/latest/meta-data/spot/instance-action")
        if spot is not None:
            return [notices.aws_spot(spot, now)]
        found = []
        advice = self._get("/latest/meta-data/events/recommendations/rebalance") if self.rebalance else None
        if advice is not None:
            found.append(notices.aws_rebalance(advice, now))
        path = "/latest/meta-data/events/maintenance/scheduled"
        try:
            return found + notices.aws_scheduled(self._get(path) or "", now)
        except ValueError as error:
            raise Metadata(self.address, self.name, self.timeout_s).unread(path, error) from error

    def acknowledge(self, notice: Notice) -> None:
        """AWS asks for none."""

    def _get(self, path: str) -> str | None:
        """What is at a path; None when nothing is."""
        service = Metadata(self.address, self.name, self.timeout_s)
        answer = service.ask(path, self._authorized(service))
        if answer.status == 401:  # the token has been revoked, or is from before the machine was stopped
            self._token = ""
            answer = service.ask(path, self._authorized(service))
        if answer.status == 404:
            return None
        if answer.status != 200:
            raise service.wrong(path, answer)
        return answer.text

    def _authorized(self, service: Metadata) -> dict[str, str]:
        if not self._token or self.clock() > self._until:
            path = "/latest/api/token"
            answer = service.ask(path, {"X-aws-ec2-metadata-token-ttl-seconds": str(_TOKEN_S)}, method="PUT")
            if answer.status != 200:
                raise service.wrong(path, answer)
            self._token, self._until = answer.text, self.clock() + _TOKEN_S - _RENEW_S
        return {"X-aws-ec2-metadata-token": self._token}


@dataclass
class Gcp:
    """Google's: https://cloud.google.com/compute/docs/metadata/querying-metadata"""

    address: str = ADDRESS
    timeout_s: float = TIMEOUT_S
    name: str = "Google's metadata service"

    def read(self, now: float) -> list[Notice]:
        """Preemption, and maintenance that ends the machine."""
        preempted = notices.gcp_preempted(self._get("preempted"), now)
        return preempted or notices.gcp_maintenance(self._get("maintenance-event"), now)

    def acknowledge(self, notice: Notice) -> None:
        """Google asks for none."""

    def _get(self, key: str) -> str:
        service, path = Metadata(self.address, self.name, self.timeout_s), f"/computeMetadata/v1/instance/{key}"
        answer = service.ask(path, {"Metadata-Flavor": "Google"})
        if answer.status == 404:
            return ""
        if answer.status != 200:
            raise service.wrong(path, answer)
        return answer.text


@dataclass
class Azure:
    """Azure's Scheduled Events."""

    address: str = ADDRESS
    timeout_s: float = TIMEOUT_S
    name: str = "Azure's metadata service"
    _machine: str = ""
    _begun: bool = False
    """Whether events have been answered once."""

    def read(self, now: float) -> list[Notice]:
        """The events that are about this machine."""
        if not self._machine:
            self._machine = self._ask(_AZURE_NAME).strip()
        text = self._ask(_AZURE_EVENTS)
        try:
            return notices.azure_events(text, now, self._machine)
        except ValueError as error:
            raise Metadata(self.address, self.name, self.timeout_s).unread(_AZURE_EVENTS, error) from error

    def acknowledge(self, notice: Notice) -> None:
        """Azure goes on as soon as an event is acknowledged; for all of its machines, so only where it has one."""
        if notice.alone:
            self._ask(_AZURE_EVENTS, json.dumps({"StartRequests": [{"EventId": notice.id}]}))

    def _ask(self, path: str, body: str | None = None) -> str:
        first = path == _AZURE_EVENTS and not self._begun
        service = Metadata(self.address, self.name, max(_AZURE_FIRST_S, self.timeout_s) if first else self.timeout_s)
        answer = service.ask(path, {"Metadata": "true"}, method="GET" if body is None else "POST", body=body)
        if answer.status != 200:
            raise service.wrong(path, answer)
        self._begun = self._begun or first
        return answer.text


@dataclass
class Address:
    """An address of one's own: 200 is a notice, 404 is none. One that answers 401 is asked for a token as AWS's service is."""

    url: str
    timeout_s: float = TIMEOUT_S
    name: str = "the address of notices"
    _token: str = field(default="", repr=False)

    def read(self, now: float) -> list[Notice]:
        """Its notice, if there is one."""
        url = urlsplit(self.url)
        service = Metadata(f"{url.scheme}://{url.netloc}", self.name, self.timeout_s)
        path = (url.path or "/") + (f"?{url.query}" if url.query else "")
        answer = service.ask(path, self._authorized())
        if answer.status == 401:
            token = service.ask("/latest/api/token", {"X-aws-ec2-metadata-token-ttl-seconds": str(_TOKEN_S)}, method="PUT")
            self._token = token.text if token.status == 200 else ""
            answer = service.ask(path, self._authorized())
        if answer.status == 404:
            return []
        if answer.status != 200:
            raise service.wrong(path, answer)
        return [notices.from_address(answer.text, now)]

    def acknowledge(self, notice: Notice) -> None:
        """It asks for none."""

    def _authorized(self) -> dict[str, str]:
        return {"X-aws-ec2-metadata-token": self._token} if self._token else {}


def of(cloud: Cloud, *, address: str = ADDRESS, rebalance: bool = True, timeout_s: float = TIMEOUT_S) -> Source:
    """The metadata service of a cloud."""
    match cloud:
        case "aws":
            return Aws(address, rebalance, timeout_s)
        case "gcp":
            return Gcp(address, timeout_s)
        case "azure":
            return Azure(address, timeout_s)
