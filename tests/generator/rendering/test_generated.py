"""Templates and rendered kernels: readable, pure, one name for each text, formatted, and committed as rendered."""

from __future__ import annotations

import ast
import collections
import dataclasses
import itertools
import re
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from generator.families.gru.texts import gru_texts
from generator.families.gru.texts import template as sequence_template
from generator.families.gru_cell.texts import GRU_CELL_FORMS, gru_gates_specs
from generator.families.linear_cat.texts import LINEAR_CAT_FORMS
from generator.families.rope.texts import (
    angle_gradient_specs,
    append_specs,
    mla_specs,
    norm_specs,
    rope_specs,
    row_specs,
)
from generator.families.rope.texts import template as rope_template
from generator.places import TEMPLATES
from generator.publishing.files import committed_kernels, generated_files
from generator.rendering.structures import NAME, default_names, render, structures, texts
from generator.rendering.syntax import digest
from tuned.families.choices import choices
from tuned.families.gru.launches import kernel_name as sequence_name
from tuned.families.gru.launches import kernel_names as sequence_kernel_names
from tuned.families.gru.spec import LAYOUTS as SEQUENCE_LAYOUTS
from tuned.families.gru.spec import GruSpec
from tuned.families.gru.variant import GruVariant, rejection
from tuned.families.gru_backward.launches import kernel_name as gradient_name
from tuned.families.gru_cell.launches import kernel_name as gru_cell_name
from tuned.families.gru_cell.spec import GruCellSpec
from tuned.families.gru_cell.variant import GruCellVariant
from tuned.families.linear_cat.launches import kernel_name as linear_cat_name
from tuned.families.linear_cat.spec import LinearCatSpec
from tuned.families.linear_cat.variant import LinearCatVariant
from tuned.families.products import DTYPES, PRECISIONS
from tuned.families.rope.launches import WEIGHTS, kernel_names
from tuned.families.rope.launches import kernel_name as rope_name
from tuned.families.rope.spec import (
    ANGLE_ENTRIES,
    ANGLES,
    DIRECTIONS,
    ITEM_SIZE,
    LAYOUTS,
    POSITIONS,
    ROTATED,
    STYLES,
    RopeSpec,
)
from tuned.families.rope.variant import RopeVariant, has_whole_rows

TEMPLATE_FILES = sorted(TEMPLATES.glob("*.jinja"))
TEMPLATE_IDS = [path.name for path in TEMPLATE_FILES]
# Templates that are only included: functions that several kernels call, and statements that several kernels contain.
FUNCTIONS = {
    *("activations.py.jinja", "segments.py.jinja", "sincos.py.jinja"),
    *("gru_numbers.py.jinja", "gru_product.py.jinja", "gru_rows.py.jinja", "gru_spin.py.jinja"),
    *("gru_step.py.jinja", "gru_tile.py.jinja", "gru_token.py.jinja", "gru_wait.py.jinja"),
    *("rope_append.py.jinja", "rope_neighbours.py.jinja", "rope_norm.py.jinja", "rope_pairs.py.jinja"),
    *("rope_norm_chunks.py.jinja", "rope_positions.py.jinja"),
}
STATEMENTS = {
    *("gru_ahead.py.jinja", "gru_bias.py.jinja", "gru_last.py.jinja", "gru_lengths.py.jinja", "gru_pieces.py.jinja"),
    *("gru_program.py.jinja", "gru_weights.py.jinja"),
    *("gru_receive.py.jinja", "gru_send.py.jinja", "rope_angles.py.jinja", "rope_row.py.jinja", "rope_tile.py.jinja"),
    *("rope_chunks.py.jinja", "rope_norm_tiles.py.jinja", "rope_turned.py.jinja", "warps.py.jinja"),
}
FRAGMENTS = FUNCTIONS | STATEMENTS
TUNED = Path(__file__).parents[3] / "tuned"
BLOCK = re.compile(r"# \{% (if|elif|else|endif|for|endfor|set|macro|include|import|block)\b(.*?)%\}")

# A little above today's number of lines with a Jinja block mark in each template. A structural choice takes two to four
# lines: one more choice needs a decision here, and a check that tl.constexpr would not do.
MAX_BLOCK_LINES = {
    "copy_rows.py.jinja": 0,
    "activations.py.jinja": 0,
    "gru_ahead.py.jinja": 2,
    "gru_backward.py.jinja": 16,  # reset marks are loaded a turn ahead: once before the loop and then in it
    "gru_bias.py.jinja": 0,
    "gru_cell.py.jinja": 8,
    "gru_cell_outer.py.jinja": 3,
    "gru_cell_vector.py.jinja": 2,
    "gru_gates.py.jinja": 13,
    "gru_last.py.jinja": 2,
    "gru_layer.py.jinja": 12,
    "gru_lengths.py.jinja": 4,
    "gru_numbers.py.jinja": 0,
    "gru_pieces.py.jinja": 4,
    "gru_product.py.jinja": 3,
    "gru_program.py.jinja": 6,
    "gru_receive.py.jinja": 4,
    "gru_row.py.jinja": 23,
    "gru_rows.py.jinja": 6,
    "gru_send.py.jinja": 3,
    "gru_spin.py.jinja": 0,
    "gru_stack.py.jinja": 9,
    "gru_staged.py.jinja": 11,
    "gru_step.py.jinja": 8,
    "gru_tile.py.jinja": 0,
    "gru_token.py.jinja": 6,  # resets are text: a constant would make the rows of all kernels without resets stale
    "gru_turns.py.jinja": 11,
    "gru_wait.py.jinja": 2,
    "gru_weights.py.jinja": 0,
    "linear_cat.py.jinja": 10,
    "linear_cat_outer.py.jinja": 2,
    # Parameters that a plain call leaves out, and the constants in their place. Also the loads and stores of calls that put pairs
    # apart, and the parameters of a cache: as constants they would have changed the source of every complete call.
    # Also whole rows, with other parameters and another body; and chunks, which kernels that write a cache do not have.
    "rope.py.jinja": 82,
    "rope_angle_gradient.py.jinja": 14,
    "rope_angles.py.jinja": 16,
    "rope_append.py.jinja": 0,
    "rope_chunks.py.jinja": 2,
    "rope_mla.py.jinja": 11,
    "rope_mla_backward.py.jinja": 8,
    "rope_neighbours.py.jinja": 0,
    "rope_norm.py.jinja": 3,
    "rope_norm_backward.py.jinja": 9,
    "rope_norm_chunks.py.jinja": 0,
    "rope_norm_tiles.py.jinja": 5,
    "rope_norm_weights.py.jinja": 0,
    "rope_pairs.py.jinja": 6,
    "rope_positions.py.jinja": 14,
    "rope_row.py.jinja": 8,
    "rope_table.py.jinja": 1,
    "rope_tile.py.jinja": 12,
    "rope_turned.py.jinja": 16,
    "warps.py.jinja": 0,
    "segments.py.jinja": 0,
    "sincos.py.jinja": 0,
}
MAX_BRANCHES = 3
MAX_SECTIONS = 2  # in a Python block: with more, it cannot be read as Python
SEQUENCE = [
    *("gru_backward.py.jinja", "gru_layer.py.jinja", "gru_row.py.jinja", "gru_stack.py.jinja", "gru_staged.py.jinja"),
    "gru_turns.py.jinja",
    *(name for name in sorted(FRAGMENTS) if name.startswith("gru_")),
]
MAX_MODULES = 158  # of all families; without a limit, structures would grow to thousands


# Templates ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", TEMPLATE_FILES, ids=TEMPLATE_IDS)
def test_a_template_is_python_as_it_stands(path: Path) -> None:
    tree = ast.parse(path.read_text())
    functions = [node.name for node in tree.body if isinstance(node, ast.FunctionDef)]
    if path.name in FRAGMENTS:
        assert bool(functions) == (path.name in FUNCTIONS)
        assert NAME not in functions
    else:
        assert NAME in functions


@pytest.mark.parametrize("path", TEMPLATE_FILES, ids=TEMPLATE_IDS)
def test_a_template_stays_within_its_budget_of_block_marks(path: Path) -> None:
    marks = BLOCK.findall(path.read_text())
    assert len(marks) <= MAX_BLOCK_LINES[path.name]
    assert {word for word, _ in marks} <= {"if", "elif", "else", "endif", "include"}
    assert {argument.strip(' "') for word, argument in marks if word == "include"} <= FRAGMENTS
    depth, branches = 0, 0
    for word, _ in marks:
        if word == "if":
            depth, branches = depth + 1, 1
        elif word == "endif":
            depth -= 1
        elif word != "include":
            branches += 1
        assert depth <= 1, "a block inside a block"
        assert branches <= MAX_BRANCHES
    assert depth == 0


def sections(text: str) -> dict[str, int]:
    """Python block -> how many Jinja ifs and includes are directly in it. A signature counts as a block."""
    blocks = {}
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.For | ast.While | ast.If):
            blocks[f"{type(node).__name__} {node.lineno}"] = range(node.lineno, node.end_lineno + 1)
        if isinstance(node, ast.FunctionDef) and node.args.args:
            first, last = node.args.args[0], node.args.args[-1]
            blocks[f"signature {node.lineno}"] = range(first.lineno, last.lineno + 1)
    counts: dict[str, int] = collections.Counter()
    for number, line in enumerate(text.splitlines(), 1):
        around = [name for name, lines in blocks.items() if number in lines]
        if around and re.match(r" *# \{% (if|include)\b", line):
            counts[min(around, key=lambda name: len(blocks[name]))] += 1
    return counts


@pytest.mark.parametrize("name", SEQUENCE)
def test_no_block_of_the_persistent_gru_is_in_many_pieces(name: str) -> None:
    assert {k: n for k, n in sections((TEMPLATES / name).read_text()).items() if n > MAX_SECTIONS} == {}


def test_sections_are_counted_in_the_innermost_block() -> None:
    text = "def f(\n  a,\n  # M\n  b,\n):\n  # M\n  for x in a:\n    # M\n    # M\n    b = x\n"
    assert sections(text.replace("M", "{% if spec.dense %}")) == {"signature 1": 1, "FunctionDef 1": 1, "For 7": 2}


@pytest.mark.parametrize("path", TEMPLATE_FILES, ids=TEMPLATE_IDS)
def test_a_template_asks_named_questions_of_its_spec_and_variant(path: Path) -> None:
    text = path.read_text()
    for word, condition in BLOCK.findall(text):
        if word in ("if", "elif"):
            assert re.fullmatch(r"\s*(not )?(spec|variant)\.\w+\s*", condition), condition
    for expression in re.findall(r"\{\{(.*?)\}\}", text):
        assert re.fullmatch(r" (spec|variant)\.\w+(\((variant|\d+(, \d+)?)\))? ", expression), expression


# Rendering ----------------------------------------------------------------------------------------------------------

ROPE_SPECS = st.builds(
    lambda heads, pairs, tail, inplace, direction, **rest: RopeSpec(
        heads=heads,
        head_dim=2 * pairs + tail,
        rotary_dim=2 * pairs,
        inplace=inplace and direction == "forward",
        direction=direction,
        **rest,
    ),
    layout=st.sampled_from(LAYOUTS),
    dtype=st.sampled_from(DTYPES),
    heads=st.integers(1, 128),
    pairs=st.integers(1, 256),
    tail=st.sampled_from((0, 0, 1, 64)),
    style=st.sampled_from(STYLES),
    angles=st.sampled_from(ANGLES),
    angle_dtype=st.sampled_from(tuple(ITEM_SIZE)),
    angle_entries=st.sampled_from(ANGLE_ENTRIES),
    inplace=st.booleans(),
    direction=st.sampled_from(DIRECTIONS),
)


def completed(spec: RopeSpec, key_heads: int, copied_heads: int, rotated: str, **rest: Any) -> RopeSpec:
    """The complete call nearest to a plain one with these additions: some combinations do not exist."""
    if rotated == "proportional" and (spec.interleaved or spec.head_dim % 2):
        rotated = "last"
    pairs = spec.rotary_dim // 2
    rest["sections"] = (pairs // 2, pairs - pairs // 2) if rest["positions"] == "axes" else ()
    copied_heads = 0 if key_heads or spec.inplace else min(copied_heads, spec.heads - 1)
    return dataclasses.replace(spec, key_heads=key_heads, copied_heads=copied_heads, rotated=rotated, **rest)


CALL_SPECS = st.builds(
    completed,
    ROPE_SPECS,
    key_heads=st.integers(0, 64),
    copied_heads=st.integers(0, 64),
    rotated=st.sampled_from(ROTATED),
    positions=st.sampled_from(POSITIONS),
    context_parallel=st.booleans(),
    conjugate=st.booleans(),
    scaled=st.booleans(),
    angles_per_batch=st.booleans(),
)
ROPE_VARIANTS = st.builds(
    RopeVariant, **{name: st.sampled_from(values) for name, values in choices(RopeVariant).items()}
)
GRU_SPECS = st.builds(
    lambda dtype, tf32, **rest: GruCellSpec(
        dtype, precision=("ieee", "tf32")[tf32] if dtype == "float32" else "", **rest
    ),
    dtype=st.sampled_from(DTYPES),
    tf32=st.booleans(),
    hidden=st.integers(1, 4096),
    inputs=st.lists(st.integers(1, 4096), min_size=1, max_size=4).map(tuple),
    bias=st.booleans(),
    inplace=st.booleans(),
)
GRU_VARIANTS = st.builds(
    GruCellVariant, **{name: st.sampled_from(values) for name, values in choices(GruCellVariant).items()}
)
SEQUENCE_SPECS = st.builds(
    lambda layers, directions, **rest: GruSpec(layers=layers, directions=1 if layers > 1 else directions, **rest),
    dtype=st.sampled_from(DTYPES),
    hidden=st.integers(1, 4096),
    layout=st.sampled_from(SEQUENCE_LAYOUTS),
    directions=st.sampled_from((1, 2)),
    layers=st.integers(1, 4),
    bias=st.booleans(),
    precision=st.sampled_from(PRECISIONS),
)
SEQUENCE_VARIANTS = st.builds(
    GruVariant, **{name: st.sampled_from(values) for name, values in choices(GruVariant).items()}
)
PROPERTY = settings(max_examples=200, deadline=None, derandomize=True, database=None)


def text_of_rope(spec: RopeSpec, variant: RopeVariant) -> str:
    """The source of the rotating kernel for any spec and variant, rendered from the template that the launches name."""
    return render(rope_template(spec), rope_name(spec, variant), spec, variant).source


def of_latent(spec: RopeSpec, value_dim: int, deinterleaves: bool) -> RopeSpec:
    """The call nearest to a complete one that is of MLA or puts pairs apart: some combinations do not exist."""
    value_dim = 0 if spec.inplace or spec.rotary_dim == spec.head_dim else value_dim
    rotated = "last" if value_dim or spec.rotated == "proportional" else spec.rotated
    return dataclasses.replace(
        spec, value_dim=value_dim, deinterleaves=deinterleaves and not spec.interleaved, rotated=rotated, copied_heads=0,
        key_heads=0 if value_dim else spec.key_heads,
    )  # fmt: skip


LATENT_SPECS = st.builds(of_latent, CALL_SPECS, st.integers(0, 256), st.booleans())


@PROPERTY
@given(spec=st.one_of(ROPE_SPECS, CALL_SPECS, LATENT_SPECS), variant=ROPE_VARIANTS)
def test_any_rope_call_finds_the_text_that_its_name_promises(spec: RopeSpec, variant: RopeVariant) -> None:
    if not has_whole_rows(spec):  # no rule allows whole rows for this spec
        variant = dataclasses.replace(variant, whole_rows=False)
    assert text_of_rope(spec, variant) == structures()[rope_name(spec, variant)].source
    assert set(kernel_names(spec, variant)) <= set(structures())


@PROPERTY
@given(spec=GRU_SPECS, variant=GRU_VARIANTS)
def test_any_gru_cell_call_finds_the_text_that_its_name_promises(spec: GruCellSpec, variant: GruCellVariant) -> None:
    name = gru_cell_name(spec, variant)
    template = GRU_CELL_FORMS.get(variant.form, "gru_gates")
    assert render(template, name, spec, variant).source == structures()[name].source


LINEAR_SPECS = st.builds(
    lambda dtype, tf32, **rest: LinearCatSpec(
        dtype, precision=("ieee", "tf32")[tf32] if dtype == "float32" else "", **rest
    ),
    dtype=st.sampled_from(DTYPES),
    tf32=st.booleans(),
    inputs=st.lists(st.integers(1, 4096), min_size=1, max_size=4).map(tuple),
    outputs=st.integers(1, 50_000),
    bias=st.booleans(),
)
LINEAR_VARIANTS = st.builds(
    LinearCatVariant, **{name: st.sampled_from(values) for name, values in choices(LinearCatVariant).items()}
)


@PROPERTY
@given(spec=LINEAR_SPECS, variant=LINEAR_VARIANTS)
def test_any_linear_call_finds_the_text_that_its_name_promises(spec: LinearCatSpec, variant: LinearCatVariant) -> None:
    name = linear_cat_name(spec, variant)
    assert (
        render(LINEAR_CAT_FORMS["tile" if variant.pads else variant.form], name, spec, variant).source
        == structures()[name].source
    )


@PROPERTY
@given(spec=SEQUENCE_SPECS, variant=SEQUENCE_VARIANTS)
def test_any_gru_call_finds_the_text_that_its_name_promises(spec: GruSpec, variant: GruVariant) -> None:
    if rejection(spec, None, variant) is not None:
        return
    assert set(sequence_kernel_names(spec, variant)) <= set(structures())
    if variant.strategy != "library":
        name = sequence_name(spec, variant)
        assert render(sequence_template(spec, variant), name, spec, variant).source == structures()[name].source


@PROPERTY
@given(spec=SEQUENCE_SPECS, variant=SEQUENCE_VARIANTS)
def test_any_gradient_of_a_gru_finds_the_text_that_its_name_promises(spec: GruSpec, variant: GruVariant) -> None:
    spec = dataclasses.replace(spec, layers=1)
    variant = dataclasses.replace(variant, strategy="persistent", form="split")
    name = gradient_name(spec, variant)
    assert render("gru_backward", name, spec, variant).source == structures()[name].source


@PROPERTY
@given(spec=ROPE_SPECS, variant=ROPE_VARIANTS)
def test_rendering_twice_gives_the_same_bytes(spec: RopeSpec, variant: RopeVariant) -> None:
    first, second = (render("rope", "twice", spec, variant) for _ in range(2))
    assert first == second


def test_names_are_injective_over_the_text_axes() -> None:
    specs = itertools.chain(rope_specs(), norm_specs(), mla_specs(), append_specs(), angle_gradient_specs())
    names = [rope_name(spec, RopeVariant()) for spec in specs]
    names += [rope_name(spec, RopeVariant(whole_rows=True)) for spec in row_specs()]
    names += [gru_cell_name(spec, GruCellVariant("library")) for spec in gru_gates_specs()]
    names += [gru_cell_name(next(gru_gates_specs()), GruCellVariant(form)) for form in GRU_CELL_FORMS]
    names += [linear_cat_name(LinearCatSpec("float16", (1,), 1), LinearCatVariant(form)) for form in LINEAR_CAT_FORMS]
    names += [sequence_name(spec, variant) for spec, variant in gru_texts()]
    gradients = [GruSpec("bfloat16", 512, layout, resets=cut) for layout in SEQUENCE_LAYOUTS for cut in (False, True)]
    names += [gradient_name(spec, GruVariant("persistent")) for spec in gradients]
    names += [WEIGHTS]
    assert len(set(names)) == len(names) == len(structures()) - 2  # the other two: the probe of launchers, and the copy


def bytecode(code: types.CodeType) -> tuple[Any, ...]:
    """The bytecode of a text without line numbers; quicker than a digest of the syntax tree."""
    constants = [bytecode(c) if isinstance(c, types.CodeType) else repr(c) for c in code.co_consts]
    return code.co_code, code.co_names, code.co_varnames, tuple(constants)


def test_no_two_names_have_the_same_text() -> None:
    # optimize=2 drops docstrings.
    texts = [compile(k.source.replace(k.name, "kernel"), "kernel", "exec", optimize=2) for k in structures().values()]
    assert len(set(map(bytecode, texts))) == len(structures())


@pytest.mark.thinned_on_gpu(every=6)
@pytest.mark.parametrize("name", sorted(structures()))
def test_a_rendered_module_says_what_it_is_and_leaves_no_mark_of_its_template(name: str) -> None:
    source = structures()[name].source
    tree = ast.parse(source)
    head = ast.get_docstring(tree)
    assert head.startswith(f"{name}: ")
    assert "@generated from templates/" in head
    assert "python tune.py --render" in head
    assert not re.search(r"\{[{%#]|[%}#]\}|KERNEL", source)
    imports = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    assert imports == {"triton", "triton.language"}
    assert not any(isinstance(node, ast.ImportFrom) for node in ast.walk(tree))


def test_the_digest_sees_code_and_nothing_else() -> None:
    text = '"""Head."""\n\ndef f(x):\n    """Say."""\n    return x + 1  # why\n'
    same = "def f( x ):\n\n    return (x + 1)\n"
    assert digest(text) == digest(same)
    assert digest(text) != digest(text.replace("+", "-"))
    assert digest(text) != digest(text.replace("f(x)", "g(x)"))
    assert digest(text) != digest(text.replace("return x", "return 2 * x"))
    assert digest('def f():\n    """Only this."""\n') == digest("def f():\n    pass\n")


@pytest.mark.thinned_on_gpu(every=6)
@pytest.mark.parametrize("name", {template: name for template, name, *_ in texts()}.values())
def test_a_comment_in_a_kernel_leaves_its_digest_and_a_sign_changes_it(name: str) -> None:
    """For one kernel of each template: the others have the same lines, or fewer or more of them."""
    kernel = structures()[name]
    assert digest(kernel.source + "# a last word\n") == kernel.digest
    changed = re.sub(r" \* ", " / ", kernel.source[::-1], count=1)[::-1]
    assert changed != kernel.source
    assert digest(changed) != kernel.digest


def test_rendered_modules_are_formatted(tmp_path: Path) -> None:
    pytest.importorskip("ruff", reason="ruff formats; without it nothing is known")
    for name, kernel in structures().items():
        (tmp_path / f"{name}.py").write_text(kernel.source)
    ruff = [sys.executable, "-m", "ruff", "format", "--check", "--diff", "--isolated", "--line-length", "120"]
    result = subprocess.run([*ruff, str(tmp_path)], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout[-4000:] + result.stderr[-1000:]


# What is committed --------------------------------------------------------------------------------------------------


def files_in(folder: Path) -> dict[str, str]:
    """Path below tuned -> text, for each Python file of a folder."""
    return {f"{folder.name}/{path.name}": path.read_text() for path in sorted(folder.glob("*.py"))}


def test_generated_files_are_what_the_templates_and_records_give_today() -> None:
    wanted = generated_files()
    found = files_in(TUNED / "kernels") | files_in(TUNED / "tables")
    found = {name: text for name, text in found.items() if name in wanted or name != "tables/__init__.py"}
    assert sorted(found) == sorted(wanted), "stray or missing files: run `python tune.py --render`"
    assert [name for name in wanted if found[name] != wanted[name]] == [], "run `python tune.py --render`"


def test_every_default_kernel_is_committed_and_they_are_few(capsys: pytest.CaptureFixture[str]) -> None:
    kernels = committed_kernels()
    assert default_names() <= set(kernels)
    families: dict[str, int] = collections.Counter(
        next((f for f in ("gru_cell", "gru_gates", "gru", "linear_cat") if name.startswith(f)), "rope")
        for name in kernels
    )
    with capsys.disabled():
        counts = ", ".join(f"{family} {count}" for family, count in sorted(families.items()))
        print(f"\ncommitted kernel modules: {counts}; {len(kernels)} of at most {MAX_MODULES}")  # noqa: T201 - to be seen in every run
    assert len(kernels) <= MAX_MODULES
    assert len(structures()) <= MAX_MODULES, "every structure may come to be committed, once a table names it"


def test_the_digests_that_ship_are_those_of_the_kernels_that_ship() -> None:
    shipped: dict[str, Any] = {}
    exec((TUNED / "kernels" / "__init__.py").read_text(), shipped)  # as data: no Triton is imported
    assert shipped["DIGESTS"] == {name: kernel.digest for name, kernel in committed_kernels().items()}
