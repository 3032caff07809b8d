"""An IMDSv2 client for the metadata service of an AWS machine. The watcher polls, so requests are not retried here.

https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/instance-metadata-v2-how-it-works.html
"""

from __future__ import annotations

import http.client
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from outlast.base.errors import OutlastError
from outlast.kubernetes.nodewatch import notices
from outlast.kubernetes.nodewatch.notices import Notice

_REMEDY = "see that the machine's metadata is switched on, and that the pod has the host's network"


class MetadataAway(OutlastError):
    """The metadata service returned no valid response; a retry may help."""


@dataclass
class Metadata:
    """The metadata service as a source of notices."""

    address: str = "http://169.254.169.254"
    rebalance: bool = True
    """Whether a rebalance recommendation counts as a notice."""
    timeout_s: float = 1.0
    _token: str = field(default="", repr=False)

    def read(self, now: float) -> list[Notice]:
        """Return the current notices. If there is an interruption notice, it is the only one. Raises MetadataAway."""
        spot = self._get("/latest/meta-data/spot/instance-action")
        if spot is not None:
            return [notices.spot(spot, now)]
        recommended = self.rebalance and self._get("/latest/meta-data/events/recommendations/rebalance") is not None
        try:
            planned = notices.scheduled(self._get("/latest/meta-data/events/maintenance/scheduled") or "[]", now)
        except ValueError as error:
            raise MetadataAway(f"AWS's metadata service has scheduled events that are not understood: {error}") from error
        return [*([notices.REBALANCE] if recommended else []), *planned]

    def _get(self, path: str) -> str | None:
        status, text = self._request("GET", path, {"X-aws-ec2-metadata-token": self._token})
        if status == 401:  # the token is missing or has expired
            status, self._token = self._request("PUT", "/latest/api/token", {"X-aws-ec2-metadata-token-ttl-seconds": "21600"})
            status, text = (
                self._request("GET", path, {"X-aws-ec2-metadata-token": self._token}) if status == 200 else (status, "")
            )
        if status not in (200, 404):
            raise MetadataAway(f"AWS's metadata service answers {path} with HTTP {status}; {_REMEDY}")
        return text if status == 200 else None

    def _request(self, method: str, path: str, headers: dict[str, str]) -> tuple[int, str]:
        url = urlsplit(self.address)
        connection = http.client.HTTPConnection(url.hostname or "", url.port, timeout=self.timeout_s)
        try:
            connection.request(method, path, headers=headers)
            answer = connection.getresponse()
            return answer.status, answer.read(2**18).decode(errors="replace")
        except (OSError, http.client.HTTPException, ValueError) as error:
            why = "it does not answer in time" if isinstance(error, TimeoutError) else str(error) or type(error).__name__
            raise MetadataAway(f"AWS's metadata service at {self.address} cannot be reached: {why}; {_REMEDY}") from error
        finally:
            connection.close()
