from __future__ import annotations


def draw(rng, world, *, wrong=False):
    from tests.fuzz import draw_rope

    return draw_rope.draw(rng, world)
