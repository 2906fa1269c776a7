"""Rotary position embeddings."""

RANK = 0  # order of the families: those that most models use come first
TITLE = "RoPE"
GROUPS = ("forward", "backward", "in place")  # groups of calls that charts tell apart
REPRESENTATIVE = (
    "llama3_8b_2x4096",
    "llama3_8b_decode_64x1",
    "half_rotary_inplace_bshd_4x4096",
)  # problems: one of each kind, for a look at the family
