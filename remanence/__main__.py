"""``python -m remanence``: runs the command line, for launchers such as torchrun that start a module."""

from remanence.cli import main

if __name__ == "__main__":
    main()
