"""Find the fastest kernels for this GPU, and write the table that models import. `python tune.py --help` tells more."""

from generator.command_line import program

if __name__ == "__main__":
    program()
