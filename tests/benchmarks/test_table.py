"""The tables: what tells their rows apart."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import table

RESULTS: dict[str, Any] = json.loads((table.RESULTS / "nvidia_h200.json").read_text())
LAYOUTS = ("bshd", "sbhd", "thd")


def lines_of(text: str, heading: str) -> list[list[str]]:
    """The cells of a table, line by line, without the line of dashes."""
    lines = text.partition(f"**{heading}**\n\n")[2].partition("\n\n")[0].splitlines()
    cells = [line.strip("| ").split(" | ") for line in lines]
    return [cells[0], *cells[2:]]


@pytest.mark.parametrize("heading", table.HEADINGS.values())
def test_rows_of_several_layouts_have_a_column_for_it(heading: str) -> None:
    text = table.rope_markdown(RESULTS, LAYOUTS)
    head, *rows = lines_of(text, heading)
    assert head[:4] == ["batch, seq, heads, dim, rotated", "layout", "pass", "angles"]
    assert {row[1] for row in rows} == set(LAYOUTS)
    assert len({tuple(row[:4]) for row in rows}) == len(rows) > 10
    assert "| --- | --- | --- | --- | ---: |" in text


def test_rows_of_one_layout_have_no_column_for_it() -> None:
    for layout in LAYOUTS:
        text = table.rope_markdown(RESULTS, (layout,))
        head, *rows = lines_of(text, "Shapes that are tuned")
        assert head[:4] == ["batch, seq, heads, dim, rotated", "pass", "angles", "ours"]
        assert len({tuple(row[:3]) for row in rows}) == len(rows) > 5
        assert f", bfloat16, {layout}; " in text


def test_a_file_that_lacks_the_marks_of_one_table_gets_none(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("<!-- benchmark:begin -->\nold\n<!-- benchmark:end -->\n")
    before = page.read_text()
    with pytest.raises(SystemExit, match="must have the marks <!-- benchmark-calls:begin -->"):
        table.main(["--write", str(page)])
    assert page.read_text() == before
