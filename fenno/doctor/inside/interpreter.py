"""Where an interpreter would import from, and whether C can be compiled for it. Run as a script under it, prints one JSON line."""

from __future__ import annotations

import json
import os
import sys
import sysconfig

if __name__ == "__main__":
    # The first entry is this script's folder, where a server would have its own.
    path = [entry for entry in sys.path[1:] if os.path.isdir(entry)]  # noqa: PTH112
    header = os.path.join(sysconfig.get_paths()["include"], "Python.h")  # noqa: PTH118
    print(
        json.dumps(
            {
                "python": ".".join(map(str, sys.version_info[:3])),
                "path": path,
                "headers": os.path.isfile(header),  # noqa: PTH113
            }
        )
    )
