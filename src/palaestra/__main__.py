"""`python -m palaestra`: the same as the `palaestra` command."""

from palaestra.cli.main import main

if __name__ == "__main__":
    main()
