"""A step of a GRU."""

RANK = 1  # order of the families: those that most models use come first
TITLE = "GRU cell"
GROUPS = ("GRU cell",)  # groups of calls that charts tell apart
REPRESENTATIVE = ("gru_cell_1024_64",)  # problems: one of each kind, for a look at the family
