"""A linear layer of segments that lie apart."""

RANK = 2  # among families: those of most models first
TITLE = "linear over segments"
GROUPS = ("GRU cell",)  # of the calls, as charts tell them apart
REPRESENTATIVE = ()  # problems: one of each kind, for a look at the family
