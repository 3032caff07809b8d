"""Amazon's registry of images: the password of the moment, and repositories that are made when they are first pushed to.

The only module beside `s3` that knows botocore. https://docs.aws.amazon.com/AmazonECR/latest/userguide/registry_auth.html
"""

from __future__ import annotations

import base64
import contextlib
from collections.abc import Iterator
from importlib import import_module
from typing import Any

from outlast.cloud.images import Repository
from outlast.errors import OutlastError

_NEEDED = {
    "GetAuthorizationToken": "ecr:GetAuthorizationToken",
    "DescribeRepositories": "ecr:DescribeRepositories",
    "CreateRepository": "ecr:CreateRepository (or let somebody else create it)",
}


def enter(repository: Repository) -> tuple[str, str, bool]:
    """User and password for the registry of a repository, and whether the repository had to be made.

    Raises OutlastError: without credentials, without the permission, when the registry does not answer.
    """
    with _in_our_words(repository):
        client = _client(repository.region)
        made = _make(client, repository)
        (found,) = client.get_authorization_token(registryIds=[repository.account])["authorizationData"]
        user, _, password = base64.b64decode(found["authorizationToken"]).decode().partition(":")
        return user, password, made


def _make(client: Any, repository: Repository) -> bool:
    asked = {"registryId": repository.account}
    try:
        client.describe_repositories(**asked, repositoryNames=[repository.name])
        return False
    except client.exceptions.RepositoryNotFoundException:
        pass
    with contextlib.suppress(client.exceptions.RepositoryAlreadyExistsException):  # another push was faster
        client.create_repository(**asked, repositoryName=repository.name)
        return True
    return False


def _client(region: str) -> Any:
    try:
        session = import_module("botocore.session").Session()
    except ImportError as error:
        raise OutlastError("Amazon's registry needs botocore; pip install 'outlast[store]'") from error
    return session.create_client("ecr", region_name=region)


@contextlib.contextmanager
def _in_our_words(repository: Repository) -> Iterator[None]:
    name = f"{repository.registry}/{repository.name}"
    try:
        yield
    except Exception as error:
        if not type(error).__module__.startswith("botocore."):
            raise
        errors = import_module("botocore.exceptions")
        if isinstance(error, errors.NoCredentialsError | errors.PartialCredentialsError | errors.ProfileNotFound):
            remedy = "run `aws configure` or `aws sso login`, or set AWS_PROFILE"
            raise OutlastError(f"{name}: no credentials for AWS ({error}); {remedy}") from error
        if isinstance(error, errors.ClientError):
            code, said = error.response["Error"]["Code"], str(error.response["Error"].get("Message", "")).rstrip(".")
            if code in ("AccessDeniedException", "AccessDenied", "UnauthorizedOperation"):
                needed = _NEEDED.get(error.operation_name, error.operation_name)
                raise OutlastError(f"{name}: the credentials do not permit it ({said}); it needs {needed}") from error
            raise OutlastError(f"{name}: {code}: {said}; correct the name, the region or the credentials") from error
        if isinstance(error, errors.ParamValidationError):
            said = str(error).splitlines()[-1]
            raise OutlastError(f"{name} cannot be the name of a repository: {said}; correct it") from error
        raise OutlastError(f"{name}: the registry cannot be reached: {error}; correct the region or try again") from error
