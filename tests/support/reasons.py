"""The reasons that are recorded for broken kernels."""

from __future__ import annotations

# deed -> the reason that is recorded, and whether the worker is lost
REASONS = {
    "illegal access": (r"illegal memory access", True),
    "killed": (r"the process died \(killed by SIGKILL\)", True),
    "endless loop": (r"no answer in 30 s: it hung, and was killed", True),
    "endless loop that prints": (r"no answer in 30 s: .*printed last: .*again and again$", True),
    "out of memory": (r"OutOfMemoryError: CUDA out of memory. Tried to allocate 128", False),
    "out of memory for good": (r"OutOfMemoryError: .*128.00 GiB.; then .*OutOfMemoryError: .*4.00 MiB", True),
    "wrong result": (r"WrongResultError: the worst error is .* times what rounding allows", False),
    "not a number": (r"WrongResultError: the worst error is inf times", False),
    "past the end": (r"WrongResultError: it wrote past an end of its output", False),
    "before the start": (r"WrongResultError: it wrote past an end of its output", False),
    "far outside": (r"wrote outside its output, over its reference", True),
    "changed input": (r"WrongResultError: it changed its input x0", False),
    "exits": (r"the process died \(exit code 1\).*SystemExit: 7", True),
    "interrupts": (r"the process died \(exit code 1\).*KeyboardInterrupt", True),
    "garbage in the pipe": (r"it answered nonsense, and was killed: .* came instead of a message", True),
    "half a message": (r"half an answer came, and it was killed", True),
    "a message of another shape": (r"it answered nonsense to measure, and was killed: .*median_us", True),
    "a message of another class": (r"it answered nonsense, and was killed: .*an answer holds no torch", True),
    "no time": (r"it answered nonsense to measure, and was killed: .*nan", True),
    "raises": (r"^ValueError: this variant cannot be launched$", False),
    "changed input while timed": (r"DamagedError: a variant wrote outside its output, over its input x0", True),
    "wrong result while timed": (r"WrongResultError: after it was timed, the worst error is .* times", False),
}
