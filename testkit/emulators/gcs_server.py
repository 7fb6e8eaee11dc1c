# SPDX-License-Identifier: Apache-2.0
"""Google Cloud Storage in memory, strict: ``python -m testkit.emulators.gcs_server --port 0 --bucket NAME``.

Of the JSON interface listings, metadata and deletes; of the XML interface reads, puts and multipart
uploads.  What it does not know it refuses with 501 instead of guessing.  Checksums that come with the
data are verified, objects appear whole and only when they are complete.  Control: see
:mod:`testkit.emulators.store_control`, and of its own::

    token?valid=TEXT            the only bearer token that is taken; 401 for all others, until clear
    role?delete=0&first=rights  nobody may delete, and so not overwrite: 403.  A create-if-absent of a
                                name that is taken gets 412, with ``first=rights`` 403 as well: which
                                of them the real one looks at first is written nowhere
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
    serve(options, StoreControl(gcs.respond, gcs.corrupt, PRECONDITIONS, gcs.order))


if __name__ == "__main__":
    main()
