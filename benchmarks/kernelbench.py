"""KernelBench's GRUs by KernelBench's own harness: python -m benchmarks.kernelbench CHECKOUT [--problem 39] [--out FILE].

CHECKOUT is a clone of https://github.com/ScalingIntelligence/KernelBench. Problems 39 to 42 of level 3 are its stacks
of GRUs, in one direction and in both. The candidate is the problem's text with ``nn.GRU`` replaced by ``tuned.nn.GRU``.
The harness makes both models with the same weights, compares them on its inputs by its tolerance, and times both, call
by call, each with a cold cache. Its results are printed and written; the exit code is 1 where it calls a candidate
wrong, or fails.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import importlib.util
import re
import subprocess
import sys
import types
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks import qk_norm, session
from benchmarks.arguments import output

LEVEL, PROBLEMS = 3, (39, 40, 41, 42)
DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
TRIALS, TIMED = 5, 100  # inputs that results are compared on; calls that are timed
# Modules that the harness imports to ask language models for candidates: measuring a candidate does not need them.
CLIENTS = {"openai": ("OpenAI",), "litellm": ("completion",), "dotenv": ("load_dotenv",)}
_GRU = re.compile(r"(?<![\w.])nn\.GRU\(")


class CheckoutError(Exception):
    """A folder is not a usable clone; the message says what is missing."""


def problem_text(checkout: Path, number: int) -> tuple[str, str]:
    """The name and the text of a problem.

    Raises:
        CheckoutError: the problem is not there.
    """
    folder = checkout / "KernelBench" / f"level{LEVEL}"
    found = sorted(folder.glob(f"{number}_*.py"))
    if not found:
        raise CheckoutError(
            f"there is no {folder}/{number}_*.py: give a clone of github.com/ScalingIntelligence/KernelBench"
        )
    return found[0].stem, found[0].read_text(encoding="utf-8")


def candidate(text: str) -> str:
    """A problem's text as a candidate: its model, with our GRU.

    Raises:
        CheckoutError: the text has no GRU, or more than one.
    """
    swapped, count = _GRU.subn("tuned.nn.GRU(", text)
    if count != 1:
        raise CheckoutError(f"a problem has one nn.GRU(...), this one {count}: it is another than was known")
    return "import tuned.nn\n" + re.sub(r"\bModel\b", "ModelNew", swapped)


@contextlib.contextmanager
def harness(checkout: Path) -> Iterator[Any]:
    """KernelBench's module ``eval``; inside the block, stand-ins replace language model clients that are not installed."""
    source = str(checkout / "src")
    absent = {name: names for name, names in CLIENTS.items() if importlib.util.find_spec(name) is None}
    sys.path.insert(0, source)
    try:
        for name, names in absent.items():
            sys.modules[name] = types.ModuleType(name)
            for one in names:
                setattr(sys.modules[name], one, lambda *_, **__: None)
        yield importlib.import_module("kernelbench.eval")
    finally:
        sys.path.remove(source)
        for name in absent:
            sys.modules.pop(name, None)


def measured(judge: Any, name: str, text: str, dtype: str, device: torch.device | None) -> dict[str, Any]:
    """The harness's result for one problem in one precision; times in milliseconds."""
    row: dict[str, Any] = {"problem": name, "dtype": dtype}
    try:
        found = judge.eval_kernel_against_ref(
            text, candidate(text), num_correct_trials=TRIALS, num_perf_trials=TIMED, measure_performance=True,
            backend="triton", precision=DTYPES[dtype], device=device,
        )  # fmt: skip
    except Exception as error:  # noqa: BLE001 (foreign code, and one row must not cost the others)
        return row | {"failed": session.reason(error)}
    row["correct"] = bool(found.compiled and found.correctness)
    if row["correct"]:
        row |= {"theirs_ms": found.ref_runtime, "ours_ms": found.runtime}
    else:
        row["said"] = {key: str(value) for key, value in found.metadata.items()}
    return row


def line(row: dict[str, Any]) -> str:
    """A row as a line."""
    begin = f"{row['problem']}, {row['dtype']}: "
    if "failed" in row:
        return begin + str(row["failed"])
    if not row["correct"]:
        return f"{begin}the harness calls it wrong: {row['said']}"
    ratio = row["theirs_ms"] / row["ours_ms"]
    return (
        f"{begin}correct; PyTorch {row['theirs_ms']:.3g} ms, tuned {row['ours_ms']:.3g} ms, {ratio:.2f} times as fast"
    )


def commit_of(checkout: Path) -> str | None:
    """The commit of a clone, or None for a plain folder."""
    asked = ("git", "-C", str(checkout), "rev-parse", "HEAD")
    done = subprocess.run(asked, capture_output=True, text=True, check=False)  # noqa: S603 - our own words
    return done.stdout.strip() or None


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line: 0, or 1 where a candidate is wrong or nothing can be measured."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.kernelbench", description=(__doc__ or "").partition(":")[0]
    )
    parser.add_argument("checkout", type=Path, help="a clone of github.com/ScalingIntelligence/KernelBench")
    parser.add_argument("--problem", type=int, action="append", choices=PROBLEMS, help="only this one; several times")
    parser.add_argument("--dtype", action="append", choices=DTYPES, help="only this one; several times")
    parser.add_argument(
        "--out", type=output, help="by default, of all rows, benchmarks/results/kernelbench/<device>.json"
    )
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        print("KernelBench measures on a GPU, and PyTorch sees none here")
        return 1
    rows, failed = [], dict[str, str]()
    try:
        texts = [problem_text(options.checkout, number) for number in options.problem or PROBLEMS]
        with harness(options.checkout) as judge:
            for name, text in texts:
                for dtype in options.dtype or DTYPES:
                    row = measured(judge, name, text, dtype, torch.device("cuda", 0))
                    print(line(row), flush=True)
                    if "failed" in row:
                        failed[f"{name}, {dtype}"] = row["failed"]
                    else:
                        rows.append(row)
    except (CheckoutError, ImportError) as error:
        print(error)
        return 1
    content = {"commit": commit_of(options.checkout), "trials": TIMED, "rows": rows, "failed": failed}
    if options.out is None and (options.problem or options.dtype):
        print("these are a part of the rows, so this device's file stays as it is: --out FILE writes them")
    else:
        qk_norm.write("kernelbench", options.out, content, {}, dry=False)
    return int(bool(failed) or not rows or not all(row["correct"] for row in rows))


if __name__ == "__main__":
    sys.exit(main())
