"""``python -m remanence.cli``."""

from remanence.cli import main

if __name__ == "__main__":
    main()
