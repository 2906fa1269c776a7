"""RoPE inside TritonBench's operator ``rope``: python -m benchmarks.tritonbench CHECKOUT [--bwd] [--out FILE].

CHECKOUT is a clone of https://github.com/pytorch-labs/tritonbench, whose operator is written against transformers 4.46.
Our call is one more candidate there, with Liger-Kernel's arguments, beside the model's code, its compiled form and
Liger-Kernel. Inputs, clock and judgement are TritonBench's; its table is printed, and its figures are written.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks import qk_norm, session
from benchmarks.arguments import output
from benchmarks.kernelbench import commit_of
from tuned.compat.liger import liger_rotary_pos_emb
from tuned.lookup.record import device_slug

NAME = "tuned"
# "accuracy": whether a result is close to that of the model's code, which rounds each product to the dtype; others
# round once.
ASKED = ("--op", "rope", "--precision", "bf16", "--metrics", "latency,speedup,accuracy")


def candidate(operator: Any, hidden_size: int, seq_length: int) -> Callable[[], Any]:
    """Our call with the operator's inputs; it ignores their position_ids, as Liger-Kernel does."""
    given = operator.prepare_input(hidden_size, seq_length)
    return lambda: liger_rotary_pos_emb(*given)


def figures(output: Any) -> list[dict[str, Any]]:
    """TritonBench's result as rows: milliseconds, speed-up over the model's code, and whether the result is close to its."""
    return [
        {
            "hidden": x[0],
            "tokens": x[1],
            "name": name,
            "ms": float(m.latency.p50),
            "speedup": m.speedup,
            "close": m.accuracy,
        }
        for x, measured in output.result
        for name, m in measured.items()
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line: 0, or 1 where nothing can be measured."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.tritonbench", description=(__doc__ or "").partition(":")[0]
    )
    parser.add_argument("checkout", type=Path, help="a clone of github.com/pytorch-labs/tritonbench")
    parser.add_argument("--bwd", action="store_true", help="the gradient, not the forward")
    parser.add_argument(
        "--out", type=output, help="by default benchmarks/results/tritonbench/<device>-<direction>.json"
    )
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        print("TritonBench measures on a GPU, and PyTorch sees none here")
        return 1
    sys.path.insert(0, str(options.checkout))
    try:
        rope = importlib.import_module("tritonbench.operators.rope.operator")
        register = importlib.import_module("tritonbench.utils.triton_op").register_benchmark
        asked = importlib.import_module("tritonbench.utils.parser").get_parser()
    except ImportError as error:
        print(f"{options.checkout} does not import ({error}): give a clone of github.com/pytorch-labs/tritonbench")
        return 1
    finally:
        sys.path.remove(str(options.checkout))
    setattr(rope.Operator, NAME, register("rope", NAME)(candidate))
    given, rest = asked.parse_known_args([*ASKED, *(["--bwd"] if options.bwd else [])])
    operator = rope.Operator(tb_args=given, extra_args=rest)
    operator.run(given.warmup, given.iter)
    print(operator.output)
    rows, direction = figures(operator.output), "backward" if options.bwd else "forward"
    out = (
        options.out or session.RESULTS / "tritonbench" / f"{device_slug(torch.cuda.get_device_name())}-{direction}.json"
    )
    content = {"commit": commit_of(options.checkout), "direction": direction, "rows": rows}
    qk_norm.write(
        "tritonbench", out, content, {"transformers": "transformers", "liger_kernel": "liger-kernel"}, dry=False
    )
    return int(not any(row["name"] == NAME for row in rows))


if __name__ == "__main__":
    sys.exit(main())
