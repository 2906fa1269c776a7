"""A linear layer over several inputs, taken as if concatenated."""

from tuned.families.family import described
from tuned.families.linear_cat import launches, spec, variant

FAMILY = described("linear_cat", "LinearCat", spec, variant, launches)
