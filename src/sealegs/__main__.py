"""Runs the command line as `python -m sealegs`."""

import sys

from sealegs.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
