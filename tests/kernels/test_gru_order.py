"""In compiled code, a step's store comes before the next step's loads, which are repeated until all values are there.

A few recurrences are compiled here; tests/gpu compiles all that a lookup can give on the device that it runs on.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import functools
import re
from typing import Any

import pytest

from tests.support import gru_order
from tests.support.gru_gradient_cases import GRADIENTS
from tests.support.gru_order import Case, wrong
from tuned.families.gru.spec import GruSize, GruSpec
from tuned.families.gru.variant import GruVariant, default_variant
from tuned.families.registry import FAMILIES

pytestmark = pytest.mark.compiler

SIZE = GruSize(16, 8)


def split(exchange: str, prefetch: str = "early") -> GruVariant:
    return GruVariant("persistent", "split", 16, 8, exchange, prefetch)


def bf16(hidden: int = 128, layout: str = "dense", **rest: Any) -> GruSpec:
    return GruSpec("bfloat16", hidden, layout, **rest)


SPIN, POLL, COUNTER = (
    Case(bf16(), SIZE, split("spin"), "sm_90"),
    Case(bf16(100), SIZE, split("poll"), "sm_90"),
    Case(bf16(), SIZE, split("counter"), "sm_90"),
)
STACK = bf16(256, "thd", layers=2)
TILE = GruVariant("persistent", "tile", 32, 32, "probe", "late")
# Cases that test_gru_compile.py has too are compiled once, by the test that comes first.
CASES = [
    SPIN,
    POLL,
    COUNTER,
    Case(bf16(), GruSize(1, 8), split("spin"), "sm_90"),
    Case(bf16(), GruSize(32, 8), TILE, "sm_90"),
    Case(GruSpec("float32", 128, "packed", layers=2), SIZE, split("spin", "late"), "sm_90"),
    Case(GruSpec("float32", 128, precision="ieee"), SIZE, split("probe"), "sm_90"),
    Case(STACK, SIZE, default_variant(STACK), "sm_80"),
    Case(GruSpec("float32", 256), SIZE, dataclasses.replace(split("spin"), block_batch=16), "sm_80"),
    Case(bf16(128, "thd", layers=2), SIZE, split("probe", "late"), "sm_100"),
    Case(bf16(resets=True), SIZE, split("spin"), "sm_90"),
    Case(bf16(128, "packed", directions=2, resets=True), SIZE, split("poll", "late"), "sm_80"),
    Case(bf16(), GruSize(32, 8), TILE, "sm_100"),
]
WAITS = ["spin", "poll", "counter"]
BY_EXCHANGE = dict(zip(WAITS, (SPIN, POLL, COUNTER), strict=True))


@functools.cache
def texts(compiler: concurrent.futures.Executor, case: Case) -> tuple[str, str]:
    return compiler.submit(gru_order.texts, case).result()


@pytest.mark.thinned_on_gpu(every=3)
@pytest.mark.parametrize("case", [*CASES, *GRADIENTS], ids=str)
def test_a_step_is_stored_before_the_next_is_waited_for(compiler: concurrent.futures.Executor, case: Case) -> None:
    rejection = FAMILIES[case.family].rejection
    assert rejection(case.spec, case.size, case.variant, int(case.architecture.removeprefix("sm_"))) is None
    assert wrong(*texts(compiler, case), case.variant.exchange) == []


# What the check finds in code that is wrong ---------------------------------------------------------------------------

# Changes a kernel's text so that each store comes one step later, after the loads of that step.
LATE = (
    (
        "    for i_step in range(t_begin, t_stop):\n",
        (
            "    p_late, m_late, late = out + 0 * (j_hidden + j_batch), mask & (batch < 0), own.to(dtype)\n"
            "    for i_step in range(t_begin, t_stop):\n"
        ),
    ),
    ("        if not EARLY:", "        tl.store(p_late, late, mask=m_late)\n        if not EARLY:"),
    (
        "        tl.store(out + p_out[None, :] + j_hidden, rounded, mask=m_now)\n",
        "        p_late, m_late, late = out + p_out[None, :] + j_hidden, m_now, rounded\n",
    ),
)
WEAK = (("other=0, volatile=True", "other=0"),)


@pytest.mark.parametrize(
    ("exchange", "edits", "said"),
    [
        ("spin", LATE, "PTX: a store is not of what was loaded since the step before"),
        ("poll", WEAK, "PTX: the state is not loaded by relaxed or volatile loads"),
    ],
    ids=["late", "weak"],
)
def test_a_text_that_is_wrong_is_found(
    compiler: concurrent.futures.Executor, exchange: str, edits: gru_order.Edits, said: str
) -> None:
    found = wrong(*compiler.submit(gru_order.texts, BY_EXCHANGE[exchange], edits).result(), exchange)
    assert any(text.startswith(said) for text in found), found


def edited(text: str, pattern: str, to: str) -> str:
    changed, count = re.subn(pattern, to, text, flags=re.MULTILINE)
    assert count, pattern
    return changed


@pytest.mark.parametrize(
    ("exchange", "pattern", "to", "said"),
    [
        ("spin", r"ld\.relaxed\.gpu", "ld", "PTX: the state is not loaded by relaxed"),
        ("spin", r"^@missing bra again;$", "", "PTX: no load of the state is executed again"),
        ("poll", r"ld\.volatile\.global", "ld.global", "PTX: the state is not loaded by relaxed or volatile loads"),
        ("counter", r"\.acquire", ".relaxed", "PTX: no counter is acquired"),
        ("counter", r"\.release", ".relaxed", "PTX: no counter is released"),
        ("counter", r"bar\.sync.*$", "", "PTX: no barrier between the store and"),
    ],
)
def test_ptx_that_is_wrong_is_found(
    compiler: concurrent.futures.Executor, exchange: str, pattern: str, to: str, said: str
) -> None:
    ptx, sass = texts(compiler, BY_EXCHANGE[exchange])
    (first, *_) = wrong(edited(ptx, pattern, to), sass, exchange)
    assert first.startswith(said)


def test_machine_code_that_is_wrong_is_found(compiler: concurrent.futures.Executor) -> None:
    def said(exchange: str, change: Any) -> str:
        ptx, sass = texts(compiler, BY_EXCHANGE[exchange])
        return "; ".join(wrong(ptx, change(sass), exchange))

    plain = r"LDG(\.E\S*)\.STRONG\.(GPU|SYS)"
    for exchange in ("spin", "poll"):
        assert "no loop has both strong loads" in said(exchange, lambda text: edited(text, plain, r"LDG\1"))
    assert "no fence between the store and" in said("counter", lambda text: edited(text, r"^.*MEMBAR.*$", ""))
    assert "no strong load is executed again" in said("spin", _without_the_loop)
    assert "stored after the loads of the next step" in said("spin", _stored_late)
    assert "loaded for the next step before the store of this one" in said("spin", _loaded_early)


def _parts(sass: str) -> tuple[list[str], int, int, int]:
    """Lines of machine code; where the state is loaded, where that loop branches back, and where the state is stored."""
    lines = sass.splitlines()
    load = next(at for at, line in enumerate(lines) if re.search(r"LDG\S*STRONG", line))
    back = next(at for at in range(load, len(lines)) if " BRA " in lines[at])
    store = next(at for at in range(back, len(lines)) if " STG" in lines[at])
    return lines, load, back, store


def _without_the_loop(sass: str) -> str:
    lines, _, back, _ = _parts(sass)
    del lines[back]
    return "\n".join(lines)


def _stored_late(sass: str) -> str:
    lines, _, back, store = _parts(sass)
    lines.insert(back + 1, lines.pop(store))
    return "\n".join(lines)


def _loaded_early(sass: str) -> str:
    """The wait, with its label, right before the store."""
    lines, load, back, store = _parts(sass)
    wait = lines[load - 1 : back + 1]
    return "\n".join([*lines[: load - 1], *lines[back + 1 : store], *wait, *lines[store:]])
