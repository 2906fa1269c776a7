"""What families share of texts: what one is, and the Python text of a shown launch and of the function around it."""

from __future__ import annotations

import dataclasses
import textwrap
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tuned.families.launch import Launch

Text = tuple[str, str, Any, Any, bool]  # template, name, spec, variant, whether a caller can be given it by default
WIDTH = 100  # characters of a line of arguments

# Constants that not every GPU, or not every tensor, can take -> value -> what all can. A shown kernel has these as defaults, so
# that it compiles for any GPU; the launch gives the winner's where they hold.
ANYWHERE: dict[str, Callable[[Any], Any]] = {
    "PDL": lambda _: False,
    "EXCHANGE": lambda exchange: "poll" if exchange in ("spin", "probe") else exchange,
    "MULTIPLE": lambda _: 1,
    "ANGLE_MULTIPLE": lambda _: 1,
}


@dataclasses.dataclass(frozen=True)
class Shown:
    """The launch of a shown function, whose arguments follow from the names of the kernel's parameters."""

    launch: Launch
    parameters: tuple[str, ...]  # without those that are tl.constexpr
    others: tuple[Launch, ...] = ()  # launches of the call before it

    def text(
        self, grid: str, dims: Mapping[str, str], given: Mapping[str, str], *, indent: int = 8, options: str = ""
    ) -> str:
        """The statement that launches: numbers as literals; dependent launch where the hardware has it.

        A parameter is a variable of its own name, or what ``given`` has for it. ``dims`` has a letter for each dimension
        of a tensor, so that out_stride_b is that of b; a dimension that it lacks has stride 0.
        """

        def argument(name: str) -> str:
            tensor, strides, letter = name.partition("_stride")
            if not strides or name in given:
                return given.get(name, name)
            axis = dims.get(tensor, "b").find(letter[1:])
            return f"{given.get(tensor, tensor)}.stride({axis})" if axis >= 0 else "0"

        known = {name: f"{name}={value!r}" for name, value in self.launch.options.items()}
        if known.pop("launch_pdl", None):
            known |= {"PDL": "PDL=dependent", "launch_pdl": "launch_pdl=dependent"}
        words = [*map(argument, self.parameters), *([options] if options else []), *known.values()]
        inside = textwrap.indent("\n".join(textwrap.wrap(", ".join(words), WIDTH - indent)), "    ")
        return textwrap.indent(f"{self.launch.kernel}[({grid},)](\n{inside},\n)\n", " " * indent)


def head(name: str, parameters: Sequence[str], what: str, takes: Sequence[str]) -> list[str]:
    """The first lines of a shown function, to the end of its docstring."""
    said = [f"    {line}" for line in takes]
    return [f"def {name}({', '.join(parameters)}):", f'    """{what} No autograd.', "", *said, '    """']


def refusal(condition: str, wanted: str, tensor: str) -> list[str]:
    """The lines that raise where a tensor is not what is wanted."""
    got = f"got {{{tensor}.dtype}} {{tuple({tensor}.shape)}}"
    return [f"    if {condition}:", f'        raise ValueError(f"{wanted}, {got}")']


def contiguous_lines(names: Sequence[str]) -> list[str]:
    """Make arguments contiguous: ALIGN, a literal here, is that of contiguous rows."""
    return [f"    {name} = {name}.contiguous()" for name in names]


def chosen_lines(
    name: str, tensor: str, capability: tuple[int, int], values: tuple[str, str] | None = None
) -> list[str]:
    """Set a variable by the GPU of a tensor: whether it has a capability at least; or the first of two values, or the second."""
    has = f"{tensor}.is_cuda and torch.version.hip is None and torch.cuda.get_device_capability({tensor}.device) >= {capability}"
    if values is None:
        return [f"    {name} = (\n        {has}\n    )"]
    return [f"    {name} = {values[1]}", f"    if {has}:", f"        {name} = {values[0]}"]


def finished(lines: Sequence[str], call: str, tensor: str, *, pdl: bool) -> str:
    """The function whose lines before the launch these are, and which returns ``out``."""
    dependent = chosen_lines("dependent", tensor, (9, 0)) if pdl else []
    return "\n".join([*lines, *dependent, f"    with torch.cuda.device_of({tensor}):", f"{call}    return out\n"])
