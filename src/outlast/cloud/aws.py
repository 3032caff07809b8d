"""AWS: clients, and errors in our words.

    with aws.in_our_words("cluster training in us-west-2"):
        eks = aws.client("eks", "us-west-2")
        eks.describe_cluster(name="training")

The only module beside `store.s3` that knows botocore. Credentials are found where the AWS command line finds them;
AWS_ENDPOINT_URL leads to another server. botocore retries throttling, 5xx and broken connections, so an error is final.
"""

from __future__ import annotations

import contextlib
import difflib
import functools
import os
import re
from collections.abc import Iterator, Mapping
from importlib import import_module
from typing import Any

from outlast.errors import OutlastError

_DENIED = re.compile(r"AccessDenied|UnauthorizedOperation|AuthorizationError|NotAuthorized|Forbidden")
_UNKNOWN = re.compile(
    r"AuthFailure|UnrecognizedClient|InvalidClientTokenId|InvalidAccessKeyId|SignatureDoesNotMatch|ExpiredToken"
)
_SLOW = re.compile(r"Throttl|RequestLimitExceeded|TooManyRequests|SlowDown")
_QUOTA = re.compile(r"Limit|Quota|InsufficientVolumeCapacity")
_TAKEN = re.compile(r"AlreadyExist|Duplicate|ResourceInUse|NameConflict|MountTargetConflict")
_ABSENT = re.compile(r"NotFound|NoSuch|DoesNotExist|NonExistent")
_ACTION = re.compile(r"not authorized to perform: ([A-Za-z0-9-]+:[A-Za-z0-9]+)")
_PREFIXES = {"monitoring": "cloudwatch"}
"""Prefix of a permission, where it is not the name that a service signs with."""
_LOGIN = "run `aws configure` or `aws sso login`, or set AWS_PROFILE"


def region(given: str | None = None) -> str:
    """The region: the given one, or that of the environment or the profile. Raises OutlastError if there is none."""
    with in_our_words("AWS"):
        found = given or os.environ.get("AWS_REGION") or _session().get_config_variable("region")
    if not found:
        raise OutlastError("no region of AWS is set; say --region us-west-2, set AWS_REGION, or run `aws configure`")
    return str(found)


def has_credentials() -> bool:
    """Whether there are credentials where the AWS command line finds them; they may be expired or wrong."""
    with in_our_words("AWS"):
        return _session().get_credentials() is not None


def client(service: str, region: str) -> Any:
    """A client of a service: `eks`, `efs`, `fsx`, `ec2`, `sqs`. Call it, and use it, within `in_our_words`.

    It takes half a second to make, and is made once, as long as the environment stays the same. Threads may share it.
    """
    return _client(service, region, tuple(sorted((name, value) for name, value in os.environ.items() if name.startswith("AWS_"))))


@functools.lru_cache(maxsize=32)
def _client(service: str, region: str, _: tuple[tuple[str, str], ...]) -> Any:
    made = _session().create_client(service, region_name=region)
    signed = made.meta.service_model.signing_name

    def note(parsed: dict[str, Any], **_: Any) -> None:
        parsed.setdefault("ResponseMetadata", {}).update(Prefix=_PREFIXES.get(signed, signed), Region=region)

    made.meta.events.register("after-call", note)  # an exception does not know its service, and permissions are named by it
    return made


def code(error: BaseException) -> str:
    """The error code in an exception of botocore's: `FileSystemNotFound`; empty when AWS did not answer or it is another's."""
    return str(_response(error).get("Error", {}).get("Code", ""))


def absent(error: BaseException) -> bool:
    """Whether AWS answered that what was asked for does not exist."""
    return bool(_ABSENT.search(code(error)))


@contextlib.contextmanager
def in_our_words(what: str) -> Iterator[None]:
    """Raise OutlastError, with a remedy, for what goes wrong with AWS; `what` names the subject and begins the sentence."""
    try:
        yield
    except Exception as error:
        if isinstance(error, OutlastError) or not type(error).__module__.startswith("botocore."):
            raise
        raise OutlastError(f"{what}: {_sentence(error)}") from error


def _session() -> Any:
    try:
        made = import_module("botocore.session").Session()
        made.register_component("data_loader", _loader())
    except ImportError as error:
        raise OutlastError("AWS needs botocore; pip install 'outlast[store]'") from error
    return made


@functools.cache
def _loader() -> Any:
    """The descriptions of all services, each read once: that of EC2 takes a third of a second."""
    return import_module("botocore.loaders").create_loader()


def _response(error: BaseException) -> Mapping[str, Any]:
    found = getattr(error, "response", None)
    return found if isinstance(found, Mapping) else {}


def _sentence(error: Exception) -> str:
    """What went wrong, and the remedy."""
    errors = import_module("botocore.exceptions")
    said = _last(str(error))
    if isinstance(error, errors.ClientError):
        return _refusal(error)
    if isinstance(error, errors.NoRegionError):
        return "no region of AWS is set; say --region us-west-2, set AWS_REGION, or run `aws configure`"
    if isinstance(error, errors.ParamValidationError):
        return f"AWS does not take this value: {said}; correct it"
    if isinstance(error, errors.InvalidRegionError):
        return f"{said}; correct the region"
    if isinstance(error, errors.WaiterError):
        return f"it is not as expected after a long wait ({said}); look at it in the console, and run this again"
    if isinstance(error, errors.ConnectionError | errors.HTTPClientError):
        return f"AWS cannot be reached: {said}; {_other_region(said)}correct the region or try again"
    return f"no credentials for AWS ({said}); {_LOGIN}"


def _refusal(error: Any) -> str:
    """What AWS refused, and why."""
    answer, name = _response(error), code(error)
    noted = answer.get("ResponseMetadata", {})
    said = _last(str(answer.get("Error", {}).get("Message", ""))) or "it gives no reason"
    where = f" in {noted['Region']}" if "Region" in noted else ""
    if _DENIED.search(name):
        needed = _ACTION.search(said)
        action = needed[1] if needed else ":".join(filter(None, (noted.get("Prefix"), error.operation_name)))
        return (
            f"the credentials do not permit it ({said}); it needs {action}: have it granted, or let somebody run this who has it"
        )
    if _UNKNOWN.search(name):
        return f"AWS does not accept the credentials{where} ({said}); {_LOGIN}, and see that the account has enabled the region"
    if _SLOW.search(name):
        return f"AWS asks to slow down ({said}); try again in a minute"
    if _QUOTA.search(name):
        return f"a quota of the account is reached{where} ({name}: {said}); delete what is not needed, or have the quota raised"
    if _TAKEN.search(name):
        return f"the name is taken{where} ({said}); choose another, or delete what has it"
    if _ABSENT.search(name):
        return f"it does not exist{where} ({said}); correct the name or the region"
    return f"{name}: {said}; correct the name, the region or the credentials"


def _other_region(said: str) -> str:
    """The region that was meant, when an address has one that does not exist."""
    found = re.search(r"//[a-z0-9.-]+\.([a-z]{2}(?:-[a-z]+)+-\d+)\.", said)
    session = _session()
    known = [each for name in ("aws", "aws-cn", "aws-us-gov") for each in session.get_available_regions("ec2", name)]
    if not found or found[1] in known:
        return ""
    meant = difflib.get_close_matches(found[1], known, 1)
    return f"there is no region {found[1]}{f', did you mean {meant[0]}?' if meant else ''}; "


def _last(text: str) -> str:
    """The last line of what botocore or AWS says, without its full stop."""
    return (text.strip().splitlines() or [""])[-1].strip().rstrip(".")
