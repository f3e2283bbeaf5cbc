"""``python -m fourfold`` is the command ``fourfold``."""

from fourfold.cli.app import main

if __name__ == "__main__":  # workers import this module
    main()
