"""Detects logins and signatures in URLs, removes them from public text, and looks up logins in the environment or ~/.netrc.

A store's own login comes from the environment (see `storage.store.s3`).
"""

from __future__ import annotations

import netrc
import os
import re
import tempfile

from outlast.base.errors import OutlastError
from outlast.job.contract import Env

_LOGIN = re.compile(r"(?<=://)[^/?#\s]*@")
_SIGNATURE = re.compile(
    r"\?([^#\s]*&)?([^=&#\s]*[-_.])?"
    r"(sig|sign|signature|token|secret|passw\w*|credentials?|auth\w*|jwt|(api|access)?key|(aws|google)access(key)?id)([-_.][^=&#\s]*)?="
    r"[^#\s]*",
    re.IGNORECASE,
)
"""A query with a parameter whose name suggests a secret, such as `X-Amz-Signature`, `sig`, `access_token` or `Key-Pair-Id`."""


def hidden(text: str) -> str:
    """Remove logins, and queries that contain a signature, from the URLs in text."""
    return _SIGNATURE.sub("", _LOGIN.sub("", text))


def exposed(url: str, where: str) -> str:
    """Return the problem with a URL that contains a secret; empty for any other URL. `where` is a clause about who can read the
    URL."""
    if _LOGIN.search(url):
        return (
            f"holds a login, and {where}; leave it out here and put it into ~/.netrc, or the content of such a file into "
            "OUTLAST_NETRC, by secrets or in the shell"
        )
    if _SIGNATURE.search(url):
        return f"holds a signature, and {where}; bring the file to a store or a directory first (outlast data get URL --to PLACE)"
    return ""


def of(host: str) -> tuple[str, str] | None:
    """Return the user and password for a host from `OUTLAST_NETRC`, else from ~/.netrc. Raises OutlastError for an unreadable
    file."""
    text, where = os.environ.get(Env.NETRC), Env.NETRC
    try:
        if text:
            with tempfile.NamedTemporaryFile("w") as file:
                file.write(text + "\n")
                file.flush()
                login = netrc.netrc(file.name).authenticators(host)
        else:
            where = "~/.netrc"
            login = netrc.netrc().authenticators(host)
    except FileNotFoundError:
        return None
    except (netrc.NetrcParseError, OSError):  # their message may contain part of a password
        raise OutlastError(
            f"{where} cannot be read; write lines like machine HOST login USER password PASSWORD, and let nobody else read it"
        ) from None
    return (login[0], login[2]) if login else None
