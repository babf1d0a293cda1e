"""python -m sparsellm COMMAND ... : the same as the program `sparsellm`."""

from sparsellm.cli import main

if __name__ == "__main__":
    main()
