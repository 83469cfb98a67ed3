"""`python -m asel` is the `asel` command."""

from asel.cli import main

if __name__ == "__main__":
    main()
