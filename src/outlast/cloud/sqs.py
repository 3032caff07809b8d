"""Messages to a queue of Amazon SQS, for whoever records what happens to machines.

queue = sqs.Queue.parse("https://sqs.us-west-2.amazonaws.com/123456789012/interruptions")
queue.send('{"node": "ip-10-0-0-1"}', subject="ip-10-0-0-1")
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from urllib.parse import urlsplit

from outlast.cloud import aws
from outlast.errors import OutlastError

_HOST = re.compile(r"^(?:sqs\.)?(?P<region>[a-z]{2}(?:-[a-z]+)+-\d+)\.(?:queue\.)?amazonaws\.com(?:\.cn)?$")


@dataclass(frozen=True)
class Queue:
    """A queue, by its URL."""

    url: str
    region: str
    """Of the URL, else that of the environment or the profile."""

    @classmethod
    def parse(cls, url: str) -> Queue:
        """The queue at a URL. Raises OutlastError for what is none, and when no region is known."""
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or parts.path.count("/") < 2:
            raise OutlastError(
                f"{url} is not the URL of an SQS queue; give it whole: https://sqs.REGION.amazonaws.com/ACCOUNT/NAME"
            )
        found = _HOST.match(parts.hostname or "")
        return cls(url, found["region"] if found else aws.region())

    def send(self, text: str, *, subject: str) -> None:
        """Send one message. In a FIFO queue the messages about one `subject` keep their order, and the same text counts once.

        Raises OutlastError: without credentials, without sqs:SendMessage, when the queue does not exist or AWS does not answer.
        """
        ordered = {}
        if self.url.endswith(".fifo"):
            ordered = {"MessageGroupId": subject, "MessageDeduplicationId": hashlib.sha256(text.encode()).hexdigest()}
        with aws.in_our_words(f"queue {self.url}"):
            aws.client("sqs", self.region).send_message(QueueUrl=self.url, MessageBody=text, **ordered)
