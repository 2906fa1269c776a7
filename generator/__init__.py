"""Everything that happens before a model runs: spaces, rendering, compiling, checking, timing, searching, recording."""
