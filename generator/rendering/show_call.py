"""The statement that launches a shown kernel, as Python text."""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tuned.families.launch import Launch


def call_text(launch: Launch, grid: str, arguments: list[str], indent: str) -> str:
    """The statement that launches: numbers as literals; dependent launch where the hardware has it."""
    options = [f"num_warps={launch.options['num_warps']}", f"num_stages={launch.options['num_stages']}"]
    if launch.options.get("launch_pdl"):
        options += ["PDL=dependent", "launch_pdl=dependent"]
    lines = textwrap.wrap(", ".join([*arguments, *options]), 100 - len(indent))
    inner = "".join(f"{indent}    {line}\n" for line in lines).rstrip("\n")
    return f"{indent}{launch.kernel}[({grid},)](\n{inner}{'' if inner.endswith(',') else ','}\n{indent})\n"
