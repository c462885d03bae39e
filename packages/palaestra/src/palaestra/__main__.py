"""`python -m palaestra`: the same as the `palaestra` command."""

import sys

from palaestra.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
