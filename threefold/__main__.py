"""`python -m threefold`, as launchers start it."""

from threefold.cli import main

if __name__ == "__main__":
    main()
