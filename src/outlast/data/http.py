"""One HTTP request for a file or a part of it.

    with request(Address.parse(url), first=0, version=None, timeout_s=60) as response:
        response.total, response.version, response.first, response.read(1 << 18)

urllib follows redirects, and uses the environment's proxies (`HTTPS_PROXY`, `NO_PROXY`) and the system's certificates. After
`Unavailable`, a retry may help; after OutlastError, it cannot.
"""

from __future__ import annotations

import base64
import contextlib
import dataclasses
import http.client
import re
import ssl
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from typing import Any

from outlast import __version__
from outlast.base.errors import OutlastError
from outlast.job import url_logins

_AGAIN = (408, 425, 429, 500, 502, 503, 504)
_REMEDY = {
    401: "the server wants a login; write machine HOST login USER password PASSWORD into ~/.netrc, or into OUTLAST_NETRC",
    403: "the server does not allow it; check the URL, or use a browser and outlast data get --from FILE",
    404: "there is no such file; correct the URL",
    410: "the file has been removed; look for a new URL",
    416: "the server does not send this part; run the same command again",
}


class Unavailable(Exception):
    """Raised if the server is unreachable, or its response is unusable. A retry may help."""

    def __init__(self, reason: str, *, after_s: float = 0.0, answered: bool = True) -> None:
        super().__init__(reason)
        self.after_s = after_s
        """Seconds to wait before a retry, as the server requested; 0 if it requested nothing."""
        self.answered = answered


@dataclasses.dataclass(frozen=True)
class Address:
    """The URL of a file."""

    url: str
    """The URL without a login or fragment."""
    login: str = ""
    """Authorization header from the URL's login; may be empty. Redirect targets do not receive it."""

    @classmethod
    def parse(cls, url: str) -> Address:
        """Parse an http or https URL. Raises OutlastError."""
        try:
            parts = urllib.parse.urlsplit(url)
            host, port = parts.hostname, parts.port
        except ValueError as error:
            raise OutlastError(f"{url_logins.hidden(url)} is not a URL; write https://HOST/PATH") from error
        if parts.scheme not in ("http", "https") or not host:
            raise OutlastError(f"{url_logins.hidden(url)} is not the URL of a file; write https://HOST/PATH")
        login = ""
        if parts.username is not None:
            login = _basic(urllib.parse.unquote(parts.username), urllib.parse.unquote(parts.password or ""))
        place = f"[{host}]" if ":" in host else host
        place += f":{port}" if port else ""
        path = urllib.parse.quote(parts.path, safe="/%:@!$&'()*+,;=~-._")
        query = urllib.parse.quote(parts.query, safe="/%:@!$&'()*+,;=~-._?")
        return cls(urllib.parse.urlunsplit((parts.scheme, place, path or "/", query, "")), login)

    @property
    def shown(self) -> str:
        """The URL for messages, without the query, which may contain a signature."""
        return self.url.partition("?")[0]

    @property
    def identity(self) -> str:
        """The URL that identifies the file, without a signed query because signatures differ each time."""
        return url_logins.hidden(self.url)

    @property
    def name(self) -> str:
        """The file's name; empty if the URL has none."""
        name = urllib.parse.unquote(urllib.parse.urlsplit(self.url).path.rpartition("/")[2])
        return re.sub(r"[/\0]", "_", name) if name not in ("", ".", "..") else ""


@dataclasses.dataclass(frozen=True)
class Version:
    """A file's version, from the headers of a response."""

    etag: str = ""
    modified: str = ""

    @property
    def strong(self) -> bool:
        """True if equal versions mean equal bytes (RFC 9110, section 8.8.3)."""
        return bool(self.etag) and not self.etag.startswith("W/")

    @property
    def given(self) -> bool:
        """True if the server reports versions."""
        return bool(self.etag or self.modified)

    @property
    def condition(self) -> str:
        """Value for the `If-Range` header: a strong tag or a date; may be empty."""
        return self.etag if self.strong else "" if self.etag else self.modified


@dataclasses.dataclass
class Response:
    """A response with the whole file or a part of it."""

    part: bool
    """True if the body is the requested part, False if it is the whole file."""
    first: int
    """Offset of the part's first byte; 0 for the whole file."""
    total: int | None
    """Size of the whole file in bytes; None if the server does not report it."""
    bounded: bool
    """True if the end of the body can be distinguished from a broken connection."""
    version: Version
    encoding: str
    """Content encoding of the body, such as `gzip`. Normally empty, because no encoding is requested."""
    _body: Any

    def read(self, limit: int) -> bytes:
        """Read up to `limit` bytes. Returns b"" at the end of the body or of the connection. Raises Unavailable."""
        with _mapped_errors():
            return bytes(self._body.read1(limit))


@contextlib.contextmanager
def request(address: Address, *, first: int = 0, version: Version | None = None, timeout_s: float) -> Iterator[Response]:
    """Request the bytes of a file from offset `first` if the file still has this version, otherwise the whole file. Raises
    Unavailable, OutOfRange and OutlastError."""
    outgoing = urllib.request.Request(
        address.url, headers={"User-Agent": f"outlast/{__version__}", "Accept-Encoding": "identity"}
    )
    login_of_host = None if address.login else url_logins.of(urllib.parse.urlsplit(address.url).hostname or "")
    if login := _basic(*login_of_host) if login_of_host else address.login:
        outgoing.add_unredirected_header("Authorization", login)
    if first:
        outgoing.add_header("Range", f"bytes={first}-")
        if version and version.condition:
            outgoing.add_header("If-Range", version.condition)
    with _mapped_errors(address):
        body = urllib.request.urlopen(outgoing, timeout=timeout_s)
    with contextlib.closing(body):
        yield _response(body, address, part=first > 0)


def _basic(user: str, password: str) -> str:
    return f"Basic {base64.b64encode(f'{user}:{password}'.encode()).decode()}"


def check(url: str, *, timeout_s: float) -> None:
    """Raise OutlastError if a server refuses to send the file; ignore an unreachable server."""
    with contextlib.suppress(Unavailable, OutOfRange), request(Address.parse(url), timeout_s=timeout_s):
        pass


def _response(body: Any, address: Address, *, part: bool) -> Response:
    headers = body.headers
    encoding = headers.get("Content-Encoding", "").strip().lower().replace("identity", "")
    version = Version(headers.get("ETag", "").strip(), headers.get("Last-Modified", "").strip())
    chunked = headers.get("Transfer-Encoding", "").lower() == "chunked"
    if body.status == 206:
        match = re.fullmatch(r"bytes (\d+)-(\d+)/(\d+|\*)", headers.get("Content-Range", "").strip())
        if not match or not part:
            remedy = "download it by hand (outlast data get --from FILE)"
            what = "a part without saying which" if part else "a part of the file where all of it was asked for"
            raise OutlastError(f"{address.shown}: the server sends {what}; {remedy}")
        total = None if match[3] == "*" else int(match[3])
        return Response(True, int(match[1]), total, True, version, encoding, body)
    if body.status != 200:
        raise OutlastError(f"{address.shown}: the server answers {body.status}, which is no file; correct the URL")
    length = headers.get("Content-Length", "").strip()
    total = int(length) if length.isdecimal() and not chunked else None
    return Response(False, 0, total, total is not None or chunked, version, encoding, body)


@contextlib.contextmanager
def _mapped_errors(address: Address | None = None) -> Iterator[None]:
    try:
        yield
    except urllib.error.HTTPError as error:
        error.close()
        raise _refusal(error, address) from error
    except urllib.error.URLError as error:
        if isinstance(error.reason, ssl.SSLCertVerificationError):
            host = urllib.parse.urlsplit(address.url).hostname if address else "the server"
            raise OutlastError(
                f"the certificate of {host} is not valid: {error.reason.verify_message}; "
                "let SSL_CERT_FILE name your certificates, or download the file by hand (outlast data get --from FILE)"
            ) from error
        raise Unavailable(f"{getattr(error.reason, 'strerror', None) or error.reason}", answered=False) from error
    except http.client.IncompleteRead as error:
        raise Unavailable("the connection ended too early") from error
    except http.client.HTTPException as error:
        raise Unavailable(f"its answer is no HTTP ({type(error).__name__})", answered=False) from error
    except TimeoutError as error:
        raise Unavailable("it sends nothing any more") from error
    except OSError as error:
        raise Unavailable(error.strerror or str(error), answered=False) from error


def _refusal(error: urllib.error.HTTPError, address: Address | None) -> Exception:
    if error.code == 416 and (match := re.fullmatch(r"bytes \*/(\d+)", (error.headers.get("Content-Range") or "").strip())):
        return OutOfRange(int(match[1]))
    if error.code in _AGAIN:
        after = (error.headers.get("Retry-After") or "").strip()
        after_s = float(after) if after.isdecimal() else 0.0
        return Unavailable(f"it answers {error.code} {error.reason}".rstrip(), after_s=after_s)
    where = address.shown if address else "the server"
    reason = str(error.reason).partition("\n")[0].rstrip(".")  # for endless redirects, urllib adds more lines
    remedy = _REMEDY.get(error.code, "correct the URL, or download the file by hand (outlast data get --from FILE)")
    return OutlastError(f"{where}: {error.code} {reason}".rstrip() + f"; {remedy}")


class OutOfRange(Exception):
    """Raised if the requested part is beyond the end of a file of `total` bytes."""

    def __init__(self, total: int) -> None:
        super().__init__(total)
        self.total = total
