"""Entry point of `fourfold` and `python -m fourfold`."""

import signal
import sys

from fourfold.exit_codes import ended_by


def main() -> None:
    """Run the command line. Ctrl-C ends it without a traceback, even during imports."""
    try:
        from fourfold.cli import app

        app.main()
    except KeyboardInterrupt:
        sys.exit(ended_by(signal.SIGINT))


if __name__ == "__main__":  # Worker processes import this module. They must not run the command line.
    main()
