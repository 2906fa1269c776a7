"""What families share about texts: the type of one, and the Python text of a shown launch and of the function around it."""

from __future__ import annotations

import dataclasses
import textwrap
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tuned.families.launch import Launch

Text = tuple[str, str, Any, Any, bool]  # template, name, spec, variant, whether a caller can be given it by default
WIDTH = 100  # characters of a line of arguments

# Constants whose values not every GPU, or not every tensor, can take -> function from the value to one that all can
# take. A shown kernel has the latter as default, so that it compiles for any GPU; the launch gives the winner's where
# it holds.
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
    parameters: tuple[str, ...]  # without tl.constexpr ones
    others: tuple[Launch, ...] = ()  # launches of the call before this one

    def text(
        self, grid: str, dims: Mapping[str, str], given: Mapping[str, str], *, indent: int = 8, options: str = ""
    ) -> str:
        """The statement that launches: numbers as literals; dependent launch where the hardware has it.

        The argument for a parameter is a variable of the same name, or the text that ``given`` has for it. ``dims`` has
        a letter for each dimension of a tensor: out_stride_b is the stride of dimension b, or 0 if the tensor lacks it.
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
    """Lines that raise a ValueError if ``condition`` holds for a tensor."""
    got = f"got {{{tensor}.dtype}} {{tuple({tensor}.shape)}}"
    return [f"    if {condition}:", f'        raise ValueError(f"{wanted}, {got}")']


def contiguous_lines(names: Sequence[str]) -> list[str]:
    """Lines that make arguments contiguous: the kernel's ALIGN, a literal here, is that of contiguous rows."""
    return [f"    {name} = {name}.contiguous()" for name in names]


def padded_lines(inputs: Sequence[str], weight: str, joined: str, columns: int, rows: int = 0) -> list[str]:
    """Lines that join inputs as ``joined``, and pad its rows and those of the weight to ``columns``; the weight to ``rows`` rows."""
    whole = inputs[0] if len(inputs) == 1 else f"torch.cat(({', '.join(inputs)}), -1)"
    more = f", 0, {rows} - {weight}.shape[0]" if rows else ""
    return [
        f"    {joined} = {whole}",
        f"    {joined} = torch.nn.functional.pad({joined}, (0, {columns} - {joined}.shape[1]))",
        f"    {weight} = torch.nn.functional.pad({weight}, (0, {columns} - {weight}.shape[1]{more}))",
    ]


def chosen_lines(
    name: str, tensor: str, capability: tuple[int, int], values: tuple[str, str] | None = None
) -> list[str]:
    """Lines that set a variable to whether the tensor's GPU has a capability at least, or to one of two values by that."""
    has = f"{tensor}.is_cuda and torch.version.hip is None and torch.cuda.get_device_capability({tensor}.device) >= {capability}"
    if values is None:
        return [f"    {name} = (\n        {has}\n    )"]
    return [f"    {name} = {values[1]}", f"    if {has}:", f"        {name} = {values[0]}"]


def finished(lines: Sequence[str], call: str, tensor: str, *, pdl: bool) -> str:
    """The text of a function from its lines before the launch and the launch ``call``; the function returns ``out``."""
    dependent = chosen_lines("dependent", tensor, (9, 0)) if pdl else []
    return "\n".join([*lines, *dependent, f"    with torch.cuda.device_of({tensor}):", f"{call}    return out\n"])
