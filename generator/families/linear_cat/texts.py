"""Every text of a kernel of the linear over segments: the product of the text axes."""

from __future__ import annotations

from collections.abc import Iterator

from tuned.families.linear_cat.launches import kernel_name
from tuned.families.linear_cat.spec import LinearCatSpec
from tuned.families.linear_cat.variant import LinearCatVariant

from ..text import Text


def texts() -> Iterator[Text]:
    """One for each form."""
    spec = LinearCatSpec("bfloat16", (512, 512), 1024)
    for variant in (LinearCatVariant("tile"), LinearCatVariant("vector")):
        yield "linear_cat", kernel_name(spec, variant), spec, variant, True
