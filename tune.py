"""Find the fastest kernels for this GPU, and write the table that models import. `python tune.py --help` tells more."""

import sys

if __name__ == "__main__":
    try:
        from generator.command_line import program
    except KeyboardInterrupt:  # during the imports: nothing has begun yet
        sys.exit(130)
    program()
