"""``python -m remanence``: the command line, where a launcher such as torchrun wants a module."""

from remanence.cli import main

if __name__ == "__main__":
    main()
