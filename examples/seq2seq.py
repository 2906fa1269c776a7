"""A seq2seq model with attention, trained, then run on PyTorch's operators and on tuned's kernels: same words? how fast?

    python examples/seq2seq.py                                 # learns to reverse digits in a minute or two on a CPU
    python examples/seq2seq.py --hidden 512 --dtype bfloat16   # on a GPU

The script generates the task: a source is a random string of symbols, the target is the same string backwards, then an
end mark. The model is Bahdanau's (https://arxiv.org/abs/1409.0473): a bidirectional GRU reads the source; a GRUCell
writes, from the embedding of the last symbol and attention's context of the source; the output layer takes state,
context and embedding.

Exit code 1: the two models wrote different symbols.
"""

# ruff: noqa: INP001, T201 - a script, which prints

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from shared import DTYPES, milliseconds, parser_of, run
from torch import nn

import tuned
import tuned.nn
from tuned.dispatch import linear_cat


class Seq2Seq(nn.Module):
    """Plain PyTorch. B sequences, S source positions, T target positions, E embedding, H hidden."""

    def __init__(self, symbols: int, hidden: int) -> None:
        super().__init__()
        self.end = symbols  # ends every target, and starts every decoding
        self.embedding = nn.Embedding(symbols + 1, hidden // 2)
        self.encoder = nn.GRU(hidden // 2, hidden, batch_first=True, bidirectional=True)
        self.first_state = nn.Linear(2 * hidden, hidden)
        self.key = nn.Linear(2 * hidden, hidden)
        self.query = nn.Linear(hidden, hidden, bias=False)
        self.score = nn.Linear(hidden, 1, bias=False)
        self.decoder = nn.GRUCell(hidden // 2 + 2 * hidden, hidden)
        self.output = nn.Linear(hidden + 2 * hidden + hidden // 2, symbols + 1)

    def advance(self, embedded: torch.Tensor, context: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
        """The decoder's next state, [B, H], from [B, E], [B, 2 H] and [B, H]."""
        return self.decoder(torch.cat((embedded, context), -1), state)

    def predict(self, state: torch.Tensor, context: torch.Tensor, embedded: torch.Tensor) -> torch.Tensor:
        """The logits of the next symbol, [B, symbols + 1]."""
        return self.output(torch.cat((state, context, embedded), -1))

    def attend(self, state: torch.Tensor, memory: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        """The context, [B, 2 H]: an average of memory [B, S, 2 H], weighted by how well keys [B, S, H] fit the state."""
        weights = self.score(torch.tanh(keys + self.query(state)[:, None])).softmax(1)  # [B, S, 1]
        return torch.bmm(weights.transpose(1, 2), memory).squeeze(1)

    def forward(self, source: torch.Tensor, target: torch.Tensor | None = None) -> torch.Tensor:
        """Logits [B, S + 1, symbols + 1] for a source [B, S]. A step gets target's previous symbol, or else its own."""
        memory, last = self.encoder(self.embedding(source))  # [B, S, 2 H], [2, B, H]
        keys, state = self.key(memory), torch.tanh(self.first_state(torch.cat((last[0], last[1]), -1)))
        symbol, logits = torch.full_like(source[:, 0], self.end), []
        for i in range(source.shape[1] + 1):
            embedded, context = self.embedding(symbol), self.attend(state, memory, keys)
            state = self.advance(embedded, context, state)
            logits.append(self.predict(state, context, embedded))
            symbol = logits[-1].argmax(-1) if target is None else target[:, i]
        return torch.stack(logits, 1)


class TunedSeq2Seq(Seq2Seq):
    """The same model, which concatenates nothing in a decoding step; ``main`` replaces its GRUs."""

    def advance(self, embedded: torch.Tensor, context: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
        """As Seq2Seq's: the cell takes its input in segments."""
        return self.decoder((embedded, context), state)

    def predict(self, state: torch.Tensor, context: torch.Tensor, embedded: torch.Tensor) -> torch.Tensor:
        """As Seq2Seq's."""
        return linear_cat((state, context, embedded), self.output.weight, self.output.bias)


def examples(options: argparse.Namespace, random: torch.Generator, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A batch of sources [B, length] and of their targets [B, length + 1]."""
    source = torch.randint(options.symbols, (options.batch, length), generator=random)
    target = torch.cat((source.flip(1), torch.full((options.batch, 1), options.symbols)), 1)
    return source.to(options.device), target.to(options.device)


def loss_of(model: Seq2Seq, source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Cross entropy of the targets, nats a symbol."""
    return nn.functional.cross_entropy(model(source, target).flatten(0, 1).float(), target.flatten())


def train_step(model: Seq2Seq, optimiser: torch.optim.Optimizer, batch: tuple[torch.Tensor, torch.Tensor]) -> None:
    """Forward, backward and an update."""
    optimiser.zero_grad()
    loss_of(model, *batch).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimiser.step()


def report(when: str, model: Seq2Seq, batch: tuple[torch.Tensor, torch.Tensor]) -> None:
    """Print the loss, and the fraction of sources reversed without an error when the model reads its own symbols."""
    with torch.no_grad():
        right = (model(batch[0]).argmax(-1) == batch[1]).all(1).float().mean()
        print(f"{when}: loss {loss_of(model, *batch):.4f}, all symbols right {right:.1%}", flush=True)


def compare_times(name: str, calls: Sequence[Callable[[], object]]) -> None:
    """Print the milliseconds of the call before and after the swap, and their ratio."""
    before, after = map(milliseconds, calls)
    print(f"{name:<42} {before:9.3f} {after:9.3f} {before / after:9.2f}", flush=True)


def same_words(before: Seq2Seq, after: Seq2Seq, source: torch.Tensor) -> bool:
    """Print how the two models' greedy decodings of the source differ. Returns whether they wrote the same symbols."""
    logits = before(source), after(source)
    words = [each.argmax(-1) for each in logits]
    same = torch.equal(*words)
    apart = (logits[0].float() - logits[1].float()).abs().max()
    print(f"\nsame symbols before and after: {same} ({words[0].numel()}; largest difference of a logit {apart:.2g})")
    if not same:
        print(f"{(words[0] != words[1]).any(1).sum()} of {len(source)} strings differ")
    return same


def compare(before: Seq2Seq, after: TunedSeq2Seq, options: argparse.Namespace, source: torch.Tensor) -> bool:
    """Print outputs, kernels and times of decoding before and after the swap. Returns whether the symbols agree."""
    same = same_words(before, after, source)
    embedded = after.embedding(source)
    memory, last = before.encoder(embedded)
    segments = after.embedding(source[:, 0]), memory.mean(1)  # embedding and context of a step
    state = last[0]
    output = (state, *reversed(segments))
    explained: dict[str, tuple[Any, ...]] = {
        "encoder": (after.encoder, embedded),
        "decoder step": (after.decoder, segments, state),
        "output layer": (linear_cat, output, after.output.weight, after.output.bias),
    }
    for name, call in explained.items():
        print(f"\n{name}: {tuned.explain(*call)}")
    if options.device == "cpu":
        print("\nThe kernels need a GPU: here both columns run PyTorch's own operators.")
    models = before, after
    print(f"\n{'milliseconds a batch, under no_grad':<42} {'PyTorch':>9} {'tuned':>9} {'ratio':>9}")
    compare_times("encoder", [partial(m.encoder, embedded) for m in models])
    compare_times("decoder step", [partial(m.advance, *segments, state) for m in models])
    compare_times("output layer", [partial(m.predict, *output) for m in models])
    compare_times("greedy decoding, all of it", [partial(m, source) for m in models])
    return same


def main(arguments: Sequence[str] | None = None) -> int:
    """Train, swap the kernels in, compare. Returns the exit code."""
    parser = parser_of(
        __doc__,
        tuple(DTYPES),
        "after training, which is float32",
        steps=(500, "of training"),
        batch=(64, None),
        hidden=(128, "units; embeddings have half as many", 2),
        length=(8, "of the longest source; one length a batch"),
        symbols=(10, "in the alphabet"),
    )
    options = parser.parse_args(arguments)

    torch.manual_seed(options.seed)
    random = torch.Generator().manual_seed(options.seed)
    model = Seq2Seq(options.symbols, options.hidden).to(options.device)
    optimiser = torch.optim.Adam(model.parameters(), lr=2e-3)
    unseen = examples(options, random, options.length)
    report("before training", model, unseen)
    started = time.perf_counter()
    for _ in range(options.steps):
        length = int(torch.randint(max(1, options.length // 2), options.length + 1, (), generator=random))
        train_step(model, optimiser, examples(options, random, length))
    print(f"{options.steps} steps of training in {time.perf_counter() - started:.1f} s")
    report("after training", model, unseen)

    model = model.to(DTYPES[options.dtype])
    after = TunedSeq2Seq(options.symbols, options.hidden)
    after.load_state_dict(model.state_dict())
    tuned.nn.replace(after).to(options.device, DTYPES[options.dtype])
    with torch.no_grad():
        same = compare(model, after, options, unseen[0])
    steps = [(m, torch.optim.Adam(m.parameters(), lr=0.0)) for m in (model.float(), after.float())]
    compare_times("training step", [partial(train_step, m, optimiser, unseen) for m, optimiser in steps])
    print(f"encoder in training: {tuned.explain(after.encoder, after.embedding(unseen[0]))}")
    return 0 if same else 1


if __name__ == "__main__":
    run(main)
