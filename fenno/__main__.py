"""`fenno`, and `python -m fenno`."""

from __future__ import annotations

import signal


def main() -> None:
    """The entry point. Until the command line is loaded nothing runs yet, and Ctrl-C just ends it."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    from fenno import cli

    cli.main()


if __name__ == "__main__":
    main()
