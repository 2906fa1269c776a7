"""The gradient of a GRU over sequences."""

RANK = 4  # among families: those of most models first
TITLE = "GRU gradient"
GROUPS = ("GRU gradient",)  # of the calls, as charts tell them apart
REPRESENTATIVE = ()  # problems: one of each kind, for a look at the family
