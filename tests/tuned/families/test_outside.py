"""A family from outside: what its module must define, what it gets by default, and that two of one name never mix."""

from __future__ import annotations

import importlib
import math
from typing import TYPE_CHECKING, Any

import pytest

from tests.support.outside import changed, copied
from tuned.families.choices import choices
from tuned.families.outside import REQUIRED, FamilyError, described, family_name, home_folder, load, octaves
from tuned.lookup.lookup import Gpu, choose

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def softmax(tmp_path: Path) -> Path:
    return copied("softmax", tmp_path)


def test_a_module_is_a_family(softmax: Path) -> None:
    module = load(str(softmax))
    family = described(module)
    assert (family.name, family.spec_type, family.variant_type) == ("softmax", module.Spec, module.Variant)
    assert family.core_knobs == tuple(choices(module.Variant))
    spec = module.Spec("bfloat16", 128)
    assert family.kernel_names(spec, module.Variant()) == ("softmax_split",)
    call = module.inputs(spec, module.Size(3), "meta", 0)
    (launch,) = family.launches(spec, module.Variant("whole", block_columns=1024), call)
    assert (launch.kernel, launch.programs, launch.constants["BLOCK_COLUMNS"]) == ("softmax_whole", 3, 128)
    assert load(str(softmax)) is module, "it is loaded once"


@pytest.mark.parametrize("name", REQUIRED)
def test_what_is_missing_is_named(softmax: Path, name: str) -> None:
    softmax.write_text(softmax.read_text() + f"\ndel {name}\n")
    with pytest.raises(FamilyError, match=rf"softmax.py is no family yet, it lacks {name}: docs/own-kernel.md"):
        described(load(str(softmax)))


WRONG = {
    "not frozen": (("@dataclasses.dataclass(frozen=True)\nclass Spec:", "@dataclasses.dataclass\nclass Spec:"), "Spec must be a frozen dataclass"),
    "no tokens": (("class Size(own.Size):", "class Size:"), "Size must have 'tokens': derive it from tuned.own.Size"),
    "no simplicity": (("class Variant(own.Variant):", "class Variant:"), "Variant must have 'simplicity'"),
    "a Variant without warps": (("    num_warps: int", "    warps: int"), "Variant must have num_warps"),
    "a Variant that is none itself": (("@dataclasses.dataclass(frozen=True)\nclass Variant(", "class Variant("), "Variant must be a dataclass itself"),
    "a knob without choices": (("own.one_of(1, 2, 4, 8, 16, 32, default=4)", "4"), "declared by one_of, got num_warps"),
    "text of nothing": (('TEXT = ("strategy",)', 'TEXT = ("stratgy",)'), "TEXT must name fields of Spec or Variant, got stratgy"),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_what_is_wrong_is_said(softmax: Path, case: str) -> None:
    change, message = WRONG[case]
    with pytest.raises(FamilyError, match=message):
        described(load(str(changed(softmax, change))))


def test_a_file_that_cannot_be_imported_is_a_sentence(tmp_path: Path) -> None:
    broken = tmp_path / "broken.py"
    broken.write_text("import nothing_of_this_name\n")
    for name in (str(broken), str(tmp_path / "absent.py"), "no.such.module"):
        with pytest.raises(FamilyError, match="cannot be imported: "):
            load(name)
    strange = tmp_path / "My-Kernel.py"
    strange.write_text(copied("softmax", tmp_path).read_text())
    with pytest.raises(FamilyError, match="small letters, digits and _"):
        described(load(str(strange)))


def test_families_of_one_name_never_meet(tmp_path: Path) -> None:
    files = [copied("softmax", tmp_path / package) for package in ("one", "other")]
    changed(files[1], ("1024, 2048, 4096, 8192", "1024, 2048"))
    one, other = (described(load(str(file))) for file in files)
    assert {one.name, other.name} == {"softmax"}
    assert one.home != other.home
    assert len(choices(one.variant_type)["block_columns"]) == 2 * len(choices(other.variant_type)["block_columns"])
    for file, family in zip(files, (one, other), strict=True):
        kernels = home_folder(file) / "kernels"
        kernels.mkdir(parents=True)
        (kernels / "__init__.py").write_text(f"DIGESTS = {{'softmax_split': '{file.parent.name}'}}\n")
        found = importlib.import_module(f"{family.home}.kernels")
        assert found.DIGESTS["softmax_split"] == file.parent.name


def test_a_package_is_a_family_too(tmp_path: Path) -> None:
    file = copied("softmax", tmp_path / "softmax")
    package = file.rename(file.parent / "__init__.py")
    assert family_name(package) == "softmax"
    assert described(load(str(package.parent))).name == "softmax"


def test_the_default_is_legal_everywhere_and_the_first_that_is(softmax: Path) -> None:
    module = load(str(softmax))
    family = described(module)
    for columns in (8, 128, 5000, 10**6):
        spec = module.Spec("float32", columns)
        variant = family.default_variant(spec, module.Size(1))
        assert all(family.rejection(spec, module.Size(1), variant, capability) is None for capability in (0, 70, 90))
    changed(softmax, ("    elements = block", '    return "none is"\n    elements = block'))
    family = described(load(str(copied_again(softmax))))
    found = choose(family, spec, module.Size(1), Gpu("test_gpu", 90, 132))
    assert found.rule == "eager"
    assert found.why.endswith("nor can the default variant: none is")


def test_the_default_is_asked_of_the_newest_cards_and_of_a_rule_that_asks_for_multiprocessors(softmax: Path) -> None:
    new = "    if capability >= 120 and not multiprocessors and variant.num_warps == 4:\n        return 'none on new cards'\n"
    changed(
        softmax,
        ("_capability: int) -> str | None:\n", "capability: int, multiprocessors: int | None) -> str | None:\n"),
        ("    elements = block", f"{new}    elements = block"),
    )
    module = load(str(softmax))
    family = described(module)
    spec, size = module.Spec("float32", 4096), module.Size(1)
    variant = family.default_variant(spec, size)
    assert variant.num_warps != 4
    assert all(family.rejection(spec, size, variant, capability) is None for capability in (0, 90, 120))


def copied_again(file: Path) -> Path:
    folder = file.parent / "again"
    folder.mkdir()
    return file.rename(folder / file.name)


def test_octaves_count_numbers_and_part_all_else(softmax: Path) -> None:
    spec: Any = load(str(softmax)).Spec
    assert octaves(spec("float32", 256), spec("float32", 1024)) == 2
    assert not octaves(spec("float32", 256), spec("float32", 256))
    assert math.isinf(octaves(spec("float32", 256), spec("bfloat16", 256)))
