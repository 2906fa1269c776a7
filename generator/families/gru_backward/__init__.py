"""The gradient of a GRU over sequences."""

RANK = 4  # order of the families: those that most models use come first
TITLE = "GRU gradient"
GROUPS = ("GRU gradient",)  # groups of calls that charts tell apart
REPRESENTATIVE = ()  # problems: one of each kind, for a look at the family
