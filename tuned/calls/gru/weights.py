"""The gradients of a layer's weights: library products of the results of the recurrence's gradient."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tuned.calls.gru.factors import Factor, multiplied

Grads = list[torch.Tensor | None]


def grad_weights(grads: Factor, rows: Factor, before: torch.Tensor, hidden: int, wanted: Sequence[bool]) -> Grads:
    """The gradients of one direction's w_ih, w_hh and, with biases, b_ih, b_hh. ``grads``: of h_n, r, z, i_n for each token."""
    w_ih, w_hh, *biases = wanted
    found: Grads = [multiplied(grads.columns(hidden).t(), rows) if w_ih else None, None]
    if w_hh:
        states = Factor.of(before, split=grads.parts is not None)
        grad = before.new_empty(3 * hidden, hidden)
        multiplied(grads.columns(hidden, 3 * hidden).t(), states, out=grad[: 2 * hidden])
        multiplied(grads.columns(0, hidden).t(), states, out=grad[2 * hidden :])
        found[1] = grad
    if not biases:
        return found
    if not any(biases):
        return [*found, None, None]
    # By a product: a sum over so many rows takes 128 MiB more memory.
    sums = torch.mv(grads.whole.t(), grads.whole.new_ones(len(grads.whole)))
    return [
        *found,
        sums[hidden:] if biases[0] else None,
        torch.cat((sums[hidden : 3 * hidden], sums[:hidden])) if biases[1] else None,
    ]
