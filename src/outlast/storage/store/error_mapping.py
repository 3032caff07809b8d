"""Maps exceptions of obstore and botocore to StoreErrors, with remedies. Called only by `store`.

Both libraries keep the store's response only as text; tests/storage/test_store_faults.py contains real responses.
"""

from __future__ import annotations

import errno
import os
import re

from outlast.base.errors import Changed, Denied, Exists, Missing, NoBucket, StoreError, Unreachable
from outlast.storage.store import s3
from outlast.storage.store.urls import PLACES

_DONE = {"read": "read", "list": "listed", "write": "written", "delete": "deleted", "copy": "copied", "open": "opened"}

_DENIED = {
    "InvalidAccessKeyId", "SignatureDoesNotMatch", "ExpiredToken", "TokenRefreshRequired", "InvalidToken", "AuthenticationFailed",
    "RequestTimeTooSkewed", "RequestExpired",
}  # fmt: skip
_LOGIN = {
    "s3": "correct the AWS credentials",
    "gs": "set GOOGLE_APPLICATION_CREDENTIALS, or run gcloud auth application-default login",
    "az": "set AZURE_STORAGE_ACCOUNT_KEY, or AZURE_CLIENT_ID and AZURE_CLIENT_SECRET",
}
_REGIONS = {"AuthorizationHeaderMalformed", "PermanentRedirect", "IllegalLocationConstraintException", "TemporaryRedirect"}
_PASSING = {
    "RequestTimeout", "SlowDown", "ConditionalRequestConflict", "OperationAborted", "BadDigest", "XAmzContentSHA256Mismatch",
}  # fmt: skip
_NO_BUCKET = {"NoSuchBucket", "ContainerNotFound"}

_CONNECTION = (
    (r"No CA certificates", "this machine has no CA certificates (install ca-certificates, or set SSL_CERT_FILE)"),
    (r"builder error|BadScheme", "http:// is not allowed here"),
    (r"[Tt]imed ?[Oo]ut|Timeout", "it does not answer in time"),
    (r"dns error|failed to lookup|Name or service|NameResolution", "its host is not known (DNS)"),
    (r"certificate|InvalidContentType|SSL", "there is no secure connection (TLS)"),
    (r"[Rr]efused", "the connection was refused"),
    (r"IncompleteMessage", "the connection was lost before the answer was complete"),
    (
        r"HttpError|HTTP error|HTTPClientError|ConnectionError|ConnectionClosed|ResponseStreaming|IncompleteRead",
        "the connection was lost",
    ),
)


def mistake(error: Exception, verb: str, url: str, *, endpoint: str = "") -> StoreError:
    """Map a library's exception to a StoreError. `verb` is read, list, write, delete, copy or open."""
    status, code, message, text = _response(error)
    kind = type(error).__name__
    scheme, _, rest = url.partition("://")
    bucket = f"{scheme}://{rest.partition('/')[0]}"
    where = f" at {endpoint}" if endpoint else ""
    undone = f"{url} cannot be {_DONE[verb]}"
    quoted = ": ".join(filter(None, (f"HTTP {status}" if status else "", code, message)))
    if isinstance(own := getattr(error, "kwargs", {}).get("error"), StoreError):
        return own  # wrapped by botocore
    if code in _NO_BUCKET or "specified bucket does not exist" in text:
        return NoBucket(
            f"there is no {PLACES[scheme]} {bucket}{where}; create it, or correct its name, the region or the endpoint"
        )
    if status == 501 or kind in ("NotImplementedError", "NotSupportedError"):
        return StoreError(f"{undone}: this store does not know how ({quoted or f'{scheme}://'})")
    if code in _PASSING or status in (408, 429) or status >= 500:
        return Unreachable(f"{undone}: the store{where} is not well ({quoted})")
    if code in _REGIONS or "without LOCATION" in text:
        region = re.search(r"<Region>([\w-]+)", text) or re.search(r"expecting '([\w-]+)'", text)
        return Denied(
            f"{undone}: {bucket} is in {f'the region {region[1]}' if region else 'another region'}; set AWS_REGION to it"
        )
    if "token request" in text or "UnauthenticatedError" in kind or "CredentialError" in kind:
        # obstore tries the machine's metadata server last, so its error is about that server
        first = text.splitlines()[0].removeprefix("Generic ")
        retry = scheme != "s3" and not 0 < status < 500
        return Denied(f"{undone}: there are no usable credentials ({first}); {_LOGIN[scheme]}", retry=retry)
    if code in _DENIED or kind == "PermissionDeniedError" or status in (401, 403):
        remedy = "correct the credentials, their permissions, or this machine's clock"
        return Denied(f"{undone}: access is denied{f' ({quoted})' if quoted else ''}; {remedy}")
    if kind == "FileNotFoundError" or status == 404:
        return Missing(f"{url} does not exist")
    if kind == "AlreadyExistsError":
        return Exists(f"{url} exists already")
    if kind == "PreconditionError" or status == 412:
        return Changed(f"{url} is no longer what it was")
    if status == 409:
        return Unreachable(f"{undone}: somebody else writes it at this moment ({quoted})")
    if status == 416 or "nvalid range" in text or "InvalidRange" in text or "range was invalid" in text:
        return Changed(f"{url} has no such bytes: it was replaced by a shorter one", retry=True)
    if scheme == "file" and (match := re.search(r"code: (\d+)", text)):
        number = int(match[1])
        if number in (errno.EPERM, errno.EACCES, errno.EROFS):
            return Denied(f"{undone}: {os.strerror(number)}")
        return StoreError(f"{undone}: {os.strerror(number)}", retry=number in (errno.EIO, errno.ENOSPC, errno.EDQUOT))
    if words := next((words for pattern, words in _CONNECTION if re.search(pattern, f"{kind} {text}")), ""):
        remedy = "; correct AWS_ENDPOINT_URL if that is not its address" if endpoint else ""
        return Unreachable(f"{undone}: {words}{where}{remedy}")
    if "Account must be specified" in text:
        return Denied(f"{undone}: no account for Azure; set AZURE_STORAGE_ACCOUNT_NAME")
    return StoreError(f"{undone}: {quoted or text.splitlines()[0]}")


def _response(error: Exception) -> tuple[int, str, str, str]:
    """Return the HTTP status (0 without a response), the store's error code and message, and the whole text."""
    if (answer := s3.answer(error)) is not None:
        return *answer, f"{error} {getattr(error, 'kwargs', {}).get('error', '')}"
    text = str(error)
    status = re.search(r"status code: (\d{3})", text)
    code = re.search(r"<Code>(\w+)</Code>", text)
    match = re.search(r"<Message>\s*([^<]*?)\.?\s*</Message>", text)
    message = match[1].splitlines()[0].rstrip(".") if match and match[1] else ""  # Azure appends the request and the time
    return int(status[1]) if status else 0, code[1] if code else "", message, text
