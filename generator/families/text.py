"""What families share of texts: what one is, and the Python text of a shown launch."""

from __future__ import annotations

import textwrap
from typing import Any

from tuned.families.launch import Launch

Text = tuple[str, str, Any, Any, bool]  # template, name, spec, variant, whether a caller can be given it by default


def launch_text(launch: Launch, grid: str, arguments: list[str], indent: str) -> str:
    """The statement that launches: numbers as literals; dependent launch where the hardware has it."""
    options = [f"num_warps={launch.options['num_warps']}", f"num_stages={launch.options['num_stages']}"]
    if launch.options.get("launch_pdl"):
        options += ["PDL=dependent", "launch_pdl=dependent"]
    lines = textwrap.wrap(", ".join([*arguments, *options]), 100 - len(indent))
    inner = "".join(f"{indent}    {line}\n" for line in lines).rstrip("\n")
    return f"{indent}{launch.kernel}[({grid},)](\n{inner}{'' if inner.endswith(',') else ','}\n{indent})\n"


def contiguous_lines(names: list[str]) -> list[str]:
    """Make arguments contiguous: ALIGN, a literal here, is that of contiguous rows."""
    return [f"    {name} = {name}.contiguous()" for name in names]


def finished(lines: list[str], call: str, tensor: str, *, pdl: bool) -> str:
    """The function whose lines before the launch these are, and which returns ``out``."""
    if pdl:
        lines.append(f"    dependent = {tensor}.is_cuda and torch.version.hip is None")
    return "\n".join(lines) + f"\n    with torch.cuda.device_of({tensor}):\n{call}    return out\n"
