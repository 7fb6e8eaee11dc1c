# SPDX-License-Identifier: Apache-2.0
"""EC2 in memory, by moto: ``python -m testkit.emulators.ec2_server --port 0``."""

from __future__ import annotations

import argparse
import os
from typing import Any

from testkit.emulators.process import announce


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, default=0)
    options = parser.parse_args()
    os.environ.update(AWS_ACCESS_KEY_ID="test", AWS_SECRET_ACCESS_KEY="test")

    from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
    from werkzeug.serving import WSGIRequestHandler, make_server

    class Handler(WSGIRequestHandler):
        def log(self, type: str, message: str, *args: Any) -> None:
            pass

    application = DomainDispatcherApplication(create_backend_app)
    server = make_server(
        "127.0.0.1", options.port, application, threaded=True, request_handler=Handler
    )
    announce(f"http://127.0.0.1:{server.server_port}")
    server.serve_forever()


if __name__ == "__main__":
    main()
