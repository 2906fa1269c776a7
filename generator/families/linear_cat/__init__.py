"""A linear layer over the concatenation of separate input tensors (segments)."""

RANK = 2  # order of the families: those that most models use come first
TITLE = "linear over segments"
GROUPS = ("GRU cell",)  # groups of calls that charts tell apart
REPRESENTATIVE = ()  # problems: one of each kind, for a look at the family
