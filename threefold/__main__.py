"""Entry point of `python -m threefold`, which launchers use."""

from threefold.cli import main

if __name__ == "__main__":
    main()
