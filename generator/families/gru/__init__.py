"""A GRU over sequences."""

RANK = 3  # order of the families: those that most models use come first
TITLE = "GRU"
GROUPS = ("GRU cell",)  # groups of calls that charts tell apart
REPRESENTATIVE = ()  # problems: one of each kind, for a look at the family
