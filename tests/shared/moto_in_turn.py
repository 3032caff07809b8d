"""`moto_server` with atomic conditional writes, as in S3: moto's own check and write are two steps.

python tests/shared/moto_in_turn.py -H 127.0.0.1 -p 0
"""

from __future__ import annotations

import io
import sys
import threading
from typing import Any

from moto.moto_server.werkzeug_app import DomainDispatcherApplication
from moto.server import main

TURN = threading.Lock()
answer = DomainDispatcherApplication.__call__


def in_turn(self: DomainDispatcherApplication, environ: dict[str, Any], start_response: Any) -> Any:
    if "HTTP_IF_MATCH" not in environ and "HTTP_IF_NONE_MATCH" not in environ:
        return answer(self, environ, start_response)
    if length := environ.get("CONTENT_LENGTH"):  # who sends slowly keeps nobody waiting
        environ["wsgi.input"] = io.BytesIO(environ["wsgi.input"].read(int(length)))
    with TURN:
        return answer(self, environ, start_response)


DomainDispatcherApplication.__call__ = in_turn  # type: ignore[method-assign]

if __name__ == "__main__":
    main(sys.argv[1:])
