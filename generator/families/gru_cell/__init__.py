"""A step of a GRU."""

RANK = 1  # among families: those of most models first
TITLE = "GRU cell"
GROUPS = ("GRU cell",)  # of the calls, as charts tell them apart
REPRESENTATIVE = ("gru_cell_1024_64",)  # problems: one of each kind, for a look at the family
