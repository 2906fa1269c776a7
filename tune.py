"""Find the fastest kernels for this GPU, and write the table that models import. `python tune.py --help` tells more."""

import sys

if __name__ == "__main__":
    try:
        from generator.command_line import program
    except KeyboardInterrupt:  # before there is anything to interrupt
        sys.exit(130)
    program()
