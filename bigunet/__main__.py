"""`python -m bigunet`, and `torchrun -m bigunet`: the command line."""

from bigunet.cli import main

__all__: list[str] = []

if __name__ == "__main__":
    main()
