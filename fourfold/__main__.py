"""Entry point of `fourfold` and `python -m fourfold`."""

import os
import signal
import sys

from fourfold.exit_codes import ended_by


def main() -> None:
    """Run the command line. Ctrl-C ends it without a traceback, even during imports."""
    try:
        # If stdin, stdout, or stderr is closed, open /dev/null in its place. Otherwise the next file that the program
        # opens would become this stream.
        for number in range(3):
            try:
                os.fstat(number)
            except OSError:
                os.open(os.devnull, os.O_RDWR)
        from fourfold.cli import app

        app.main()
    except KeyboardInterrupt:
        sys.exit(ended_by(signal.SIGINT))


# Worker processes import this module too, but must not run the command line.
if __name__ == "__main__":
    main()
