"""RoPE functions of other libraries, served by ``tuned.dispatch``: a project changes one import."""
