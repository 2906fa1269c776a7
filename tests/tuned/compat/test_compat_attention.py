"""derive makes a forward whose norms go with the rotation only where no norm can be lost or computed twice."""

from __future__ import annotations

import itertools
import linecache
import sys
import types
from typing import Any

import pytest

from tuned.compat.attention import Derived, derive

HEAD = """
def apply_rotary_pos_emb(q, k, cos, sin, unsqueeze_dim=1):
    return q + ["rotated"], k + ["rotated"]

def shift(t):
    return t

class Attention:
    def __init__(self):
        self.use, self.skip, self.inner = True, False, None
        self.depth = 0

    def q_norm(self, x):
        return Value(x + ["q_norm"])

    def k_norm(self, x):
        return Value(x + ["k_norm"])

    def v_norm(self, x):
        return x

"""
PLAIN = """
        q = self.q_norm(q.view(2)).transpose(1, 2)
        k = self.k_norm(k)
        k = k.view(k.shape).transpose(1, 2)
        v = self.v_norm(k.shape)
        q, k = apply_rotary_pos_emb(q, k, 0, 0)
        return q, k
"""
FITS = {
    "plain": PLAIN,
    "documented": '\n        """What it does."""' + PLAIN,
    "rotated under an if": """
        q = self.q_norm(q)
        k = self.k_norm(k)
        if self.skip is False and not self.inner:
            q, k = apply_rotary_pos_emb(q, k, 0, 0)
        return q, k
""",
    "rotated in an else, of an argument that may be None": """
        q, k, v = q, k, 1
        q = self.q_norm(q)
        k = self.k_norm(k)
        if mask is not None:
            v = 2
        else:
            q, k = apply_rotary_pos_emb(q, k, 0, 0)
        return q, k
""",
    "normalised under an if": """
        if self.use:
            q = self.q_norm(q)
            k = self.k_norm(k)
        q = q.transpose(1, 2)
        q, k = apply_rotary_pos_emb(q, k, 0, sin=0)
        return q, k
""",
    "under ifs of each": """
        if self.use:
            q = self.q_norm(q)
        if not self.skip:
            k = self.k_norm(k)
        if self.depth == 0:
            if self.inner is None:
                q, k = apply_rotary_pos_emb(q, k, 0, 0)
        return q, k
""",
}
REFUSED = {
    "no norm": (PLAIN.replace("self.q_norm(q.view(2))", "shift(q)"), "what it rotates as q is no reshaped result"),
    "a norm of another module": (PLAIN.replace("self.q_norm(", "v.q_norm("), "v.q_norm is none of its modules"),
    "after the rotation": (
        "\n        q, k = apply_rotary_pos_emb(q, k, 0, 0)\n        q = self.q_norm(q)\n        k = self.k_norm(k)\n        return q, k\n",
        "what it rotates as q is no reshaped result",
    ),
    "twice": (PLAIN.replace("self.v_norm(k.shape)", "self.q_norm(v)"), "its q_norm is used more than once"),
    "its weight": (PLAIN.replace("self.v_norm(k.shape)", "self.k_norm.weight"), "its k_norm is used more than once"),
    "one for both": (
        PLAIN.replace("k = self.k_norm(k)", "k = self.q_norm(k)"),
        "its q_norm is used more than once",
    ),
    "seen before": (PLAIN.replace("self.v_norm(k.shape)", "self.v_norm(k)"), "k is seen between its norm"),
    "scaled": (
        PLAIN.replace("k = k.view(k.shape)", "k = (2 * k).view(k.shape)"),
        "what it rotates as k is no reshaped",
    ),
    "scaled in place": (PLAIN.replace("        v = self", "        k *= 2\n        v = self"), "k is seen between"),
    "its dtype": (PLAIN.replace("self.v_norm(k.shape)", "k.dtype"), "k is seen between its norm"),
    "written": (PLAIN.replace("        v = self", "        v.zero_()\n        v = self"), "writes in place"),
    "written by item": (PLAIN.replace("        v = self", "        v[0] = 1\n        v = self"), "writes in place"),
    "other axes": (PLAIN.replace(".view(2)).transpose(1, 2)", ".view(2)).transpose(0, 1)"), "other axes than 1 and 2"),
    "by another name": (PLAIN.replace("        v = self", "        k = v = k\n        v = self"), "k is seen between"),
    "in a loop": (
        PLAIN.replace("        k = self.k_norm(k)", "        for _ in v:\n            k = self.k_norm(k)"),
        "k is seen",
    ),
    "in a function": (PLAIN.replace("self.v_norm(k.shape)", "lambda: k"), "k is seen between"),
    "returns before": (
        PLAIN.replace("        v = self", "        if v is None:\n            return q\n        v = self"),
        "it may return before it rotates",
    ),
    "normalised in both ways": (
        PLAIN.replace(
            "        k = self.k_norm(k)",
            "        if self.use:\n            k = self.k_norm(k)\n        else:\n            k = self.v_norm(k)",
        ),
        "depends on both ways of an if",
    ),
    "a condition that calls": (
        FITS["rotated under an if"].replace("self.skip is False", "shift(1)"),
        "reads more than attributes",
    ),
    "a condition of a local name": (
        "\n        use = shift(1)" + FITS["rotated under an if"].replace("self.skip is", "use is"),
        "reads more than attributes",
    ),
    "a condition on what an argument is worth": (
        FITS["rotated under an if"].replace("self.skip is False", "mask"),
        "reads more than attributes",
    ),
    "attributes change": (
        PLAIN.replace("        v = self", "        self.use = 1\n        v = self"),
        "sets attributes",
    ),
    "rotated twice": (PLAIN + "        return apply_rotary_pos_emb(q, k, 0, 0)\n", "exactly once"),
    "handed on": (PLAIN + "        return apply_rotary_pos_emb\n", "exactly once"),
    "in an expression": (
        PLAIN.replace("q, k = apply_rotary_pos_emb(q, k, 0, 0)", "q = [*apply_rotary_pos_emb(q, k, 0, 0)]"),
        "not of the form",
    ),
    "angles of the query": (PLAIN.replace("(q, k, 0, 0)", "(q, k, shift(q), 0)"), "its angles depend on the query"),
    "starred": (PLAIN.replace("(q, k, 0, 0)", "(q, k, *v)"), "not of the form"),
    "used afterwards": (
        PLAIN.replace("q, k = apply_rotary_pos_emb(", "a, b = apply_rotary_pos_emb("),
        "what was normalised is used again",
    ),
    "in a try": (
        PLAIN.replace("        q, k = apply", "        try:\n            q, k = apply").replace(
            "        return q, k", "        finally:\n            pass\n        return q, k"
        ),
        "not of the form",
    ),
    "private": (PLAIN.replace("self.v_norm(", "self.__v("), "private names"),
    "a closure": (PLAIN.replace("return q, k", "return __class__, q, k"), "a closure"),
    "our name": (PLAIN.replace("return q, k", "return _tuned_ready, q, k"), "means something else"),
}
numbers = itertools.count()


class Value(list):  # type: ignore[type-arg]
    """Stands for a tensor and records what happened to it."""

    shape, dtype = (), "float"

    def view(self, *_: Any) -> Value:
        return self

    transpose = view


@pytest.fixture
def file_of(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Makes a module from a text, in a file that Python can read again."""

    def make(body: str, decorated: str = "") -> Any:
        name = f"modeling_made_up_{next(numbers)}"
        text = f"{HEAD}{decorated}    def forward(self, q, k, v=None, mask: undefined = None):{body}"
        text = "from __future__ import annotations\nimport functools\n" + text
        file = f"<{name}>"
        monkeypatch.setitem(linecache.cache, file, (len(text), None, text.splitlines(keepends=True), file))
        module = types.ModuleType(name)
        vars(module)["Value"] = Value
        exec(compile(text, file, "exec"), vars(module))
        return module

    return make


def derived_of(file: Any, log: list[Any], norms: Any) -> Any:
    derived = derive(file.Attention.forward, "apply_rotary_pos_emb")
    assert isinstance(derived, Derived), derived
    assert (derived.q_norm, derived.k_norm) == ("q_norm", "k_norm")

    def ready(_module: Any, rotation: Any) -> Any:
        log.append("asked")
        assert rotation is file.apply_rotary_pos_emb
        return norms

    def fused(given: Any, _module: Any, rotation: Any, q: Any, k: Any, cos: Any, sin: Any) -> Any:
        log.append("fused")
        assert given is norms
        return rotation(Value([*q, "q_norm"]), Value([*k, "k_norm"]), cos, sin)

    return derived.make(ready, fused)


@pytest.mark.parametrize("case", FITS)
@pytest.mark.parametrize("skip", [False, True])
@pytest.mark.parametrize("use", [False, True])
@pytest.mark.parametrize("norms", [None, "norms"])
@pytest.mark.parametrize("mask", [None, 1])
def test_each_norm_is_taken_as_often_as_the_original_takes_it(
    case: str, skip: bool, use: bool, norms: Any, mask: Any, file_of: Any
) -> None:
    file, log = file_of(FITS[case]), []
    attention = file.Attention()
    attention.skip, attention.use = skip, use
    wanted = attention.forward(Value("q"), Value("k"), mask=mask)
    ours = derived_of(file, log, norms)
    assert ours(attention, Value("q"), Value("k"), mask=mask) == wanted
    whole = all(f"{one}_norm" in t and "rotated" in t for one, t in zip("qk", wanted, strict=True))
    assert log == (["asked", "fused"] if norms and whole else ["asked"] if whole else [])


def test_the_function_has_the_originals_names_defaults_and_lines(file_of: Any) -> None:
    file = file_of(FITS["documented"])
    original, ours = file.Attention.forward, derived_of(file, [], None)
    assert (ours.__qualname__, ours.__doc__, ours.__module__) == (
        "Attention.forward",
        "What it does.",
        original.__module__,
    )
    assert (ours.__defaults__, ours.__annotations__) == (original.__defaults__, original.__annotations__)
    assert ours.__globals__ is vars(file)
    assert (ours.__code__.co_filename, ours.__code__.co_firstlineno) == (
        original.__code__.co_filename, original.__code__.co_firstlineno,
    )  # fmt: skip
    assert "factory" not in vars(file)


@pytest.mark.parametrize("case", FITS)
def test_it_is_said_whether_heads_are_turned_before_the_rotation(case: str, file_of: Any) -> None:
    derived = derive(file_of(FITS[case]).Attention.forward, "apply_rotary_pos_emb")
    assert isinstance(derived, Derived)
    assert derived.turned is (case in ("plain", "documented"))
    for body in (PLAIN.replace("0, 0)", "0, 0, 2)"), PLAIN.replace("(k.shape).tr", "(k.shape).transpose(1, 2).tr")):
        derived = derive(file_of(body).Attention.forward, "apply_rotary_pos_emb")
        assert isinstance(derived, Derived)
        assert not derived.turned


@pytest.mark.parametrize("case", REFUSED)
def test_what_might_lose_a_norm_is_refused(case: str, file_of: Any) -> None:
    body, why = REFUSED[case]
    found = derive(file_of(body).Attention.forward, "apply_rotary_pos_emb")
    assert isinstance(found, str)
    assert why in found


@pytest.mark.parametrize("decorated", ["    @functools.cache\n", "    @functools.wraps(shift)\n", "    @shift\n"])
def test_a_decorated_forward_is_refused(decorated: str, file_of: Any) -> None:
    found = derive(file_of(PLAIN, decorated).Attention.forward, "apply_rotary_pos_emb")
    assert isinstance(found, str)
    assert "decorated" in found or "source" in found


def test_a_forward_whose_source_was_edited_or_is_gone_is_refused(file_of: Any) -> None:
    forward = file_of(PLAIN).Attention.forward
    name = forward.__code__.co_filename
    size, when, lines, file = linecache.cache[name]
    linecache.cache[name] = (size, when, [line.replace("view(2)", "view(3)") for line in lines], file)
    assert derive(forward, "apply_rotary_pos_emb") == "its forward is not what its source says"
    del linecache.cache[name]
    assert derive(forward, "apply_rotary_pos_emb") == "its forward is not what its source says"


def test_no_part_of_it_needs_transformers() -> None:
    import subprocess  # noqa: PLC0415

    text = "import sys, tuned.compat.transformers; sys.exit('transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", text], check=False).returncode == 0
