# SPDX-License-Identifier: Apache-2.0
"""A strict Google Cloud Storage in memory: ``python -m testkit.emulators.gcs_server --port 0 --bucket NAME``.

It serves listings, metadata and deletes of the JSON interface, and reads and puts of the XML interface.  It
refuses all other requests with 501.  It verifies checksums.  An object is visible only when it is complete.
Control: see :mod:`testkit.emulators.store_control`, and::

    token?valid=TEXT            accept only this bearer token; 401 for others, until clear
    role?delete=0&first=rights  refuse deletes, and so overwrites, with 403.  A create-if-absent of an
                                existing name gets 412, or 403 with ``first=rights``: Google does not
                                document the order of the two checks
    role?delete_below=A,B       allow deletes of these prefixes only, as an IAM condition does
    role?retention=0&settings=0 refuse storage.objects.setRetention, storage.buckets.get
    bucket?name=NAME&retention=1&versioning=1
                                create an empty bucket, with per-object retention, with versioning
    clock?ahead_s=3600          advance the store's clock, for retentions
"""

from __future__ import annotations

import argparse

from testkit.emulators.gcs_model import PRECONDITIONS, Gcs
from testkit.emulators.store_control import StoreControl
from testkit.emulators.store_server import add_arguments, serve


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    add_arguments(parser)
    options = parser.parse_args()
    gcs = Gcs(options.bucket)
    serve(options, StoreControl(gcs.respond, PRECONDITIONS, gcs.order))


if __name__ == "__main__":
    main()
