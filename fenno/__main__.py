"""`fenno`, and `python -m fenno`."""

from __future__ import annotations

import signal
import sys

WINDOWS = "fenno: neither fenno nor vLLM runs on Windows itself\n  use a Linux host; on Windows, WSL 2 with the Windows driver"


def main() -> None:
    """The entry point. Until the command line is loaded nothing runs yet, and Ctrl-C just ends it."""
    if sys.platform == "win32":  # the command line's own modules cannot be loaded there
        sys.exit(WINDOWS)
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    from fenno import cli

    cli.main()


if __name__ == "__main__":
    main()
