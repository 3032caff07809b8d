"""Whose account the credentials are of."""

from __future__ import annotations

from outlast.cloud import aws


def account(region: str) -> str:
    """The account that the credentials belong to. Raises OutlastError."""
    with aws.in_our_words("AWS"):
        return str(aws.client("sts", region).get_caller_identity()["Account"])
