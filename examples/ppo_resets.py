"""A recurrent policy learns to remember, with PPO: episodes end in mid-rollout, and the GRU's state is reset there.

    python examples/ppo_resets.py                                  # learns in a minute or two on a CPU
    python examples/ppo_resets.py --hidden 512 --dtype bfloat16    # times of a larger learner, on a GPU

The script simulates the environment. A sign, 0 or 1, hangs in the first room of a corridor; the other rooms are bare.
In the last room the agent has to name the sign: reward 1 or -1. Corridors have different lengths, so that some agents
of a batch begin a new corridor at each step. The usual code for this is a loop over the steps which multiplies the
state by 0 (CleanRL's LSTM agent, https://github.com/vwxyzjn/cleanrl); tuned.nn.GRU takes the marks of a whole rollout
in one call.

PPO is that of https://arxiv.org/abs/1707.06347 with generalized advantages, https://arxiv.org/abs/1506.02438. Writes the curve
of rewards to --picture if matplotlib is installed. Exit code 1: the loop and the one call have different gradients.
"""

# ruff: noqa: INP001, T201 - a script, which prints

from __future__ import annotations

import argparse
import copy
import io
import time
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from shared import DTYPES, milliseconds, parser_of, run
from torch import nn

import tuned
import tuned.nn

SIGNS, SEEN = 2, 4  # SEEN features: one per sign, whether this is the last room, and a 1
DISCOUNT, TRACE = 0.97, 0.95  # gamma of a step's reward, lambda of generalized advantages
CLIP, ENTROPY, VALUE = 0.2, 0.01, 0.5  # PPO's clipping range, and the weights of entropy and value loss
EPOCHS = 4  # over each rollout
CLOSE = 2e-2  # allowed difference of gradients, relative to the largest gradient


class Corridors:
    """Agents in corridors of 3 to ``longest`` rooms. B agents; a step moves each one room on, or into a new corridor."""

    def __init__(self, agents: int, longest: int, random: torch.Generator) -> None:
        self.longest, self.random = longest, random
        self.room = torch.zeros(agents, dtype=torch.int64)
        self.rooms, self.sign = torch.zeros_like(self.room), torch.zeros_like(self.room)
        self.begin(torch.ones(agents, dtype=torch.bool))

    def begin(self, which: torch.Tensor) -> None:
        """New corridors for the agents that are marked, [B]."""
        count = int(which.sum())
        self.room[which] = 0
        self.rooms[which] = torch.randint(3, self.longest + 1, (count,), generator=self.random)
        self.sign[which] = torch.randint(SIGNS, (count,), generator=self.random)

    def seen(self) -> torch.Tensor:
        """What each agent sees, [B, SEEN]."""
        first, last = self.room == 0, self.room == self.rooms - 1
        signs = nn.functional.one_hot(self.sign, SIGNS) * first[:, None]
        return torch.cat((signs, last[:, None], torch.ones_like(last)[:, None]), 1).float()

    def step(self, named: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(reward, whether a new corridor has begun), both [B], for the named signs [B]; they count in the last room only."""
        last = self.room == self.rooms - 1
        reward = torch.where(last, torch.where(named == self.sign, 1.0, -1.0), 0.0)
        self.room += 1
        self.begin(last)
        return reward, last


class Policy(nn.Module):
    """From what agents see, [T, B, SEEN], to logits [T, B, SIGNS] and values [T, B]."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.enter = nn.Linear(SEEN, hidden)
        self.memory = tuned.nn.GRU(hidden, hidden)
        self.name, self.value = nn.Linear(hidden, SIGNS), nn.Linear(hidden, 1)

    def forward(
        self, seen: torch.Tensor, state: torch.Tensor, begun: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Logits, values and the last state, [1, B, H]; ``begun`` [T, B] marks the first step of each corridor."""
        features, state = self.memory(torch.tanh(self.enter(seen)), state, resets=begun)
        return self.name(features), self.value(features).squeeze(-1), state


class LoopPolicy(Policy):
    """The same policy without resets: one step at a time, with the state multiplied by 0 where a corridor begins."""

    def forward(
        self, seen: torch.Tensor, state: torch.Tensor, begun: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """As Policy's."""
        entered, steps = torch.tanh(self.enter(seen)), []
        for x, new in zip(entered, begun, strict=True):
            features, state = self.memory(x[None], state * (~new)[None, :, None])
            steps.append(features)
        features = torch.cat(steps)
        return self.name(features), self.value(features).squeeze(-1), state


class Rollout(NamedTuple):
    """T steps of B agents; tensors without another shape below are [T, B]."""

    seen: torch.Tensor  # [T, B, SEEN]
    begun: torch.Tensor
    named: torch.Tensor
    chance: torch.Tensor  # log probability of the sign that was named
    advantage: torch.Tensor
    wanted: torch.Tensor  # targets of the values
    state: torch.Tensor  # [1, B, H] before the first step


@torch.no_grad()
def played(
    policy: Policy, corridors: Corridors, state: torch.Tensor, begun: torch.Tensor, steps: int
) -> tuple[Rollout, torch.Tensor, torch.Tensor, float]:
    """(rollout, state after it, marks after it, mean reward of the corridors that ended in it)."""
    first, device = state, state.device
    rows: list[tuple[torch.Tensor, ...]] = []
    for _ in range(steps):
        seen = corridors.seen().to(device, state.dtype)
        logits, value, state = policy(seen[None], state, begun[None])
        chances = torch.distributions.Categorical(logits=logits[0].float())
        named = chances.sample()
        reward, ended = corridors.step(named.cpu())
        rows.append(
            (seen, begun, named, chances.log_prob(named), value[0].float(), reward.to(device), ended.to(device))
        )
        begun = ended.to(device)
    seen, marks, named, chance, value, reward, ended = (torch.stack(column) for column in zip(*rows, strict=True))
    _, after, _ = policy(corridors.seen().to(device, state.dtype)[None], state, begun[None])
    advantage, carried, later = torch.zeros_like(reward), torch.zeros_like(reward[0]), after[0].float()
    for t in reversed(range(steps)):
        alive = (~ended[t]).float()
        carried = reward[t] + DISCOUNT * alive * later - value[t] + DISCOUNT * TRACE * alive * carried
        advantage[t], later = carried, value[t]
    rollout = Rollout(seen, marks, named, chance, advantage, advantage + value, first)
    return rollout, state, begun, float(reward[ended].mean()) if bool(ended.any()) else 0.0


def loss_of(policy: Policy, rollout: Rollout) -> torch.Tensor:
    """PPO's loss over a whole rollout."""
    logits, value, _ = policy(rollout.seen, rollout.state, rollout.begun)
    chances = torch.distributions.Categorical(logits=logits.float())
    ratio = (chances.log_prob(rollout.named) - rollout.chance).exp()
    better = (rollout.advantage - rollout.advantage.mean()) / (rollout.advantage.std(correction=0) + 1e-6)
    gain = torch.minimum(ratio * better, ratio.clamp(1 - CLIP, 1 + CLIP) * better).mean()
    missed = (value.float() - rollout.wanted).square().mean()
    return VALUE * missed - gain - ENTROPY * chances.entropy().mean()


def gradients(policy: Policy, rollout: Rollout) -> list[torch.Tensor]:
    """The gradients of all weights: a step of the learner, without the optimiser."""
    return list(torch.autograd.grad(loss_of(policy, rollout), list(policy.parameters())))


def largest(tensors: Iterable[torch.Tensor]) -> float:
    """The largest magnitude of an entry; NaN if any entry is NaN, which Python's max() may miss."""
    return float(torch.stack([tensor.abs().max() for tensor in tensors]).max())


def compare(options: argparse.Namespace, random: torch.Generator) -> bool:
    """Print the time of a learner's step with the marks in one call and in a loop. Returns whether gradients agree."""
    dtype = DTYPES[options.dtype]
    policy = Policy(options.hidden).to(options.device, dtype)
    loop = copy.deepcopy(policy)
    loop.__class__ = LoopPolicy
    state = torch.zeros(1, options.agents, options.hidden, device=options.device, dtype=dtype)
    begun = torch.ones(options.agents, dtype=torch.bool, device=options.device)
    corridors = Corridors(options.agents, options.longest, random)
    rollout, *_ = played(policy, corridors, state, begun, options.rollout)
    ours, theirs = gradients(policy, rollout), gradients(loop, rollout)
    apart = largest(one - other for one, other in zip(ours, theirs, strict=True)) / largest(theirs)
    told = f"{options.rollout} steps of {options.agents} agents, {options.hidden} units, {options.dtype}"
    print(f"\na step of the learner, {told}; gradients of both are {apart:.1g} of the largest apart")
    entered = torch.zeros(*rollout.seen.shape[:2], options.hidden, device=options.device, dtype=dtype)
    print(f"what serves it: {tuned.explain(policy.memory, entered, state, resets=rollout.begun)}")
    if options.device == "cpu":
        print("The kernels need a GPU: here both run PyTorch's own operators, one call over the pieces between marks.")
    loop_ms, ours_ms = (milliseconds(partial(gradients, each, rollout)) for each in (loop, policy))
    print(
        f"a loop over the steps {loop_ms:.3f} ms, one call with resets {ours_ms:.3f} ms: {loop_ms / ours_ms:.2f} times"
    )
    return apart <= CLOSE


def curve(rewards: Sequence[float], kind: str) -> bytes:
    """The curve of rewards as a picture; ``kind`` is a format that matplotlib knows."""
    from matplotlib.figure import Figure  # noqa: PLC0415 - optional

    figure = Figure(figsize=(6, 3.5), layout="constrained")
    axes = figure.subplots()
    axes.plot(range(1, len(rewards) + 1), rewards)
    axes.axhline(0.0, color="grey", linewidth=0.8, linestyle="--", label="a guess")
    axes.set(xlabel="rollout", ylabel="mean reward of corridors that ended", ylim=(-1.05, 1.05))
    axes.legend(loc="lower right")
    picture = io.BytesIO()
    figure.savefig(picture, dpi=120, format=kind)
    return picture.getvalue()


def picture_of(parser: argparse.ArgumentParser, path: Path) -> Path | None:
    """The path if the curve can be written there, or None without matplotlib: before training, which takes minutes."""
    try:
        curve([], path.suffix[1:])
        path.open("ab").close()
    except ImportError:
        print("no picture: matplotlib is not installed")
        return None
    except (OSError, RuntimeError, ValueError) as error:
        parser.error(f"argument --picture: {error}")
    return path


def main(arguments: Sequence[str] | None = None) -> int:
    """Learn, draw, compare. Returns the exit code."""
    parser = parser_of(
        __doc__,
        tuple(DTYPES),
        "of the timed learner; training is float32",
        rollouts=(60, "of training; 0 to time alone", 0),
        agents=(64, None),
        rollout=(64, "steps of one"),
        longest=(12, "rooms of a corridor", 3),
        hidden=(64, None),
    )
    parser.add_argument("--picture", type=Path, default=Path("ppo_resets.png"), help="of the rewards")
    options = parser.parse_args(arguments)
    picture = picture_of(parser, options.picture) if options.rollouts else None

    torch.manual_seed(options.seed)
    random = torch.Generator().manual_seed(options.seed)
    policy = Policy(options.hidden).to(options.device)
    optimiser = torch.optim.Adam(policy.parameters(), lr=3e-3)
    corridors = Corridors(options.agents, options.longest, random)
    state = torch.zeros(1, options.agents, options.hidden, device=options.device)
    begun = torch.ones(options.agents, dtype=torch.bool, device=options.device)
    rewards: list[float] = []
    started = time.perf_counter()
    for number in range(options.rollouts):
        rollout, state, begun, reward = played(policy, corridors, state, begun, options.rollout)
        rewards.append(reward)
        for _ in range(EPOCHS):
            optimiser.zero_grad()
            loss_of(policy, rollout).backward()
            nn.utils.clip_grad_norm_(policy.parameters(), 0.5)
            optimiser.step()
        if number % 10 == 0 or number == options.rollouts - 1:
            print(f"rollout {number + 1}: mean reward {reward:.2f}", flush=True)
    if rewards:
        print(f"{options.rollouts} rollouts in {time.perf_counter() - started:.1f} s; a guess has reward 0, memory 1")
    if picture:
        picture.write_bytes(curve(rewards, picture.suffix[1:]))
        print(f"the curve is in {picture}")
    return 0 if compare(options, random) else 1


if __name__ == "__main__":
    run(main)
