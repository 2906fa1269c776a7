"""Other libraries' RoPE calls, served by ``tuned.dispatch``: a project changes one import."""
