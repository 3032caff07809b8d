"""Amazon's registry of images: the password of the moment, and repositories that are made when they are first pushed to.

https://docs.aws.amazon.com/AmazonECR/latest/userguide/registry_auth.html
"""

from __future__ import annotations

import base64
import contextlib
from typing import Any

from outlast.cloud import aws
from outlast.cloud.images import Repository


def enter(repository: Repository) -> tuple[str, str, bool]:
    """User and password for the registry of a repository, and whether the repository had to be made.

    Raises OutlastError: without credentials, without the permission, when the registry does not answer.
    """
    with aws.in_our_words(f"{repository.registry}/{repository.name}"):
        client = aws.client("ecr", repository.region)
        made = _make(client, repository)
        (found,) = client.get_authorization_token(registryIds=[repository.account])["authorizationData"]
        user, _, password = base64.b64decode(found["authorizationToken"]).decode().partition(":")
        return user, password, made


def _make(client: Any, repository: Repository) -> bool:
    """Make the repository unless it exists. Images pushed to it are scanned: one that exists keeps its own settings."""
    asked = {"registryId": repository.account}
    try:
        client.describe_repositories(**asked, repositoryNames=[repository.name])
        return False
    except client.exceptions.RepositoryNotFoundException:
        pass
    with contextlib.suppress(client.exceptions.RepositoryAlreadyExistsException):  # another push was faster
        client.create_repository(
            **asked,
            repositoryName=repository.name,
            imageScanningConfiguration={"scanOnPush": True},
            tags=aws.listed(aws.tags()),
        )
        return True
    return False
