"""A GRU over sequences."""

RANK = 3  # among families: those of most models first
TITLE = "GRU"
GROUPS = ("GRU cell",)  # of the calls, as charts tell them apart
REPRESENTATIVE = ()  # problems: one of each kind, for a look at the family
