"""copy_rows: up to six tensors of rows copied into wider or narrower rows, or filled, in one launch.

@generated from templates/copy_rows.py.jinja. Do not edit: change the template, then run
`python tune.py --render`.

Each x and y is seen as integers of its item size, and a program writes ROWS rows of COLUMNS elements of one y. Rows of
y form groups of ``group`` rows. Row j of a group is row min(j, ``last``) of the same group of x, if j is below
``held``. A row of y is parts of ``width`` elements; the first ``given`` elements of each part come from x. All elements
that do not come from x are ``bits``, which is 0 or all bits set.
"""

import triton
import triton.language as tl


@triton.jit
def _copy(
    x,
    y,
    program,
    rows,
    group,
    held,
    last,
    x_group,
    x_row,
    y_row,
    columns,
    width,
    given,
    bits,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Copy a tile of one tensor if ``program``, from 0 on, is one of the tensor's programs; return how many it has."""
    across = tl.cdiv(columns, COLUMNS)
    programs = tl.cdiv(rows, ROWS) * across
    if (program >= 0) & (program < programs):
        i_row = (program // across) * ROWS + tl.arange(0, ROWS)
        i_column = (program % across) * COLUMNS + tl.arange(0, COLUMNS)
        # A thread divides for each of its rows, which takes longer than to copy them: most copies have one group and one part.
        i_group, i_held, i_part, i_given = tl.zeros_like(i_row), i_row, tl.zeros_like(i_column), i_column
        if rows > group:
            i_group = i_row // group
            i_held = i_row - i_group * group
        if columns > width:
            i_part = i_column // width
            i_given = i_column - i_part * width
        m_y = (i_row < rows)[:, None] & (i_column < columns)[None, :]
        m_x = m_y & (i_held < held)[:, None] & (i_given < given)[None, :]
        p_row = i_group.to(tl.int64) * x_group + tl.minimum(i_held, last).to(tl.int64) * x_row
        b_x = tl.load(x + (p_row[:, None] + (i_part * given + i_given)[None, :]), mask=m_x, other=0)
        b_y = tl.where(m_x, b_x, bits.to(b_x.dtype))
        tl.store(y + (i_row.to(tl.int64) * y_row)[:, None] + i_column[None, :], b_y, mask=m_y)
    return programs


# fmt: off
@triton.jit(
    do_not_specialize=[
        "x_0", "y_0", "rows_0", "group_0", "held_0", "last_0", "x_group_0", "x_row_0", "y_row_0", "columns_0", "width_0", "given_0", "bits_0",
        "x_1", "y_1", "rows_1", "group_1", "held_1", "last_1", "x_group_1", "x_row_1", "y_row_1", "columns_1", "width_1", "given_1", "bits_1",
        "x_2", "y_2", "rows_2", "group_2", "held_2", "last_2", "x_group_2", "x_row_2", "y_row_2", "columns_2", "width_2", "given_2", "bits_2",
        "x_3", "y_3", "rows_3", "group_3", "held_3", "last_3", "x_group_3", "x_row_3", "y_row_3", "columns_3", "width_3", "given_3", "bits_3",
        "x_4", "y_4", "rows_4", "group_4", "held_4", "last_4", "x_group_4", "x_row_4", "y_row_4", "columns_4", "width_4", "given_4", "bits_4",
        "x_5", "y_5", "rows_5", "group_5", "held_5", "last_5", "x_group_5", "x_row_5", "y_row_5", "columns_5", "width_5", "given_5", "bits_5",
    ]
)
def copy_rows(
    x_0, y_0, x_1, y_1, x_2, y_2, x_3, y_3, x_4, y_4, x_5, y_5,
    rows_0, group_0, held_0, last_0, x_group_0, x_row_0, y_row_0, columns_0, width_0, given_0, bits_0,
    rows_1, group_1, held_1, last_1, x_group_1, x_row_1, y_row_1, columns_1, width_1, given_1, bits_1,
    rows_2, group_2, held_2, last_2, x_group_2, x_row_2, y_row_2, columns_2, width_2, given_2, bits_2,
    rows_3, group_3, held_3, last_3, x_group_3, x_row_3, y_row_3, columns_3, width_3, given_3, bits_3,
    rows_4, group_4, held_4, last_4, x_group_4, x_row_4, y_row_4, columns_4, width_4, given_4, bits_4,
    rows_5, group_5, held_5, last_5, x_group_5, x_row_5, y_row_5, columns_5, width_5, given_5, bits_5,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):
    # The programs of a launch are those of the first tensor, then those of the second, and so on: each call of _copy
    # takes its own.
    i = tl.program_id(0)
    i -= _copy(x_0, y_0, i, rows_0, group_0, held_0, last_0, x_group_0, x_row_0, y_row_0, columns_0, width_0, given_0, bits_0, ROWS, COLUMNS)
    i -= _copy(x_1, y_1, i, rows_1, group_1, held_1, last_1, x_group_1, x_row_1, y_row_1, columns_1, width_1, given_1, bits_1, ROWS, COLUMNS)
    i -= _copy(x_2, y_2, i, rows_2, group_2, held_2, last_2, x_group_2, x_row_2, y_row_2, columns_2, width_2, given_2, bits_2, ROWS, COLUMNS)
    i -= _copy(x_3, y_3, i, rows_3, group_3, held_3, last_3, x_group_3, x_row_3, y_row_3, columns_3, width_3, given_3, bits_3, ROWS, COLUMNS)
    i -= _copy(x_4, y_4, i, rows_4, group_4, held_4, last_4, x_group_4, x_row_4, y_row_4, columns_4, width_4, given_4, bits_4, ROWS, COLUMNS)
    i -= _copy(x_5, y_5, i, rows_5, group_5, held_5, last_5, x_group_5, x_row_5, y_row_5, columns_5, width_5, given_5, bits_5, ROWS, COLUMNS)
# fmt: on
