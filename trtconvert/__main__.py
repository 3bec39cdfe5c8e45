"""`python -m trtconvert` is the command line, for launchers of modules such as torchrun."""

from trtconvert.cli import main

if __name__ == "__main__":
    main()
