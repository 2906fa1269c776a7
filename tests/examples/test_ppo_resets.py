"""The recurrent policy learns to remember, plots its rewards, and reports resets that differ from those of the loop."""

from __future__ import annotations

import re
import sys
from typing import TYPE_CHECKING, Any

import pytest
import torch

from examples import ppo_resets

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.processes

SMALL = ["--device", "cpu", "--agents", "32", "--rollout", "24", "--longest", "5", "--hidden", "24"]


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shared.SECONDS", 0.0)


def test_it_learns_and_draws_what_it_learned(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    picture = tmp_path / "rewards.png"
    assert ppo_resets.main([*SMALL, "--rollouts", "31", "--picture", str(picture)]) == 0
    told = capsys.readouterr().out
    rewards = [float(reward) for reward in re.findall(r"mean reward (-?[\d.]+)", told)]
    assert abs(rewards[0]) < 0.3, "without memory it guesses"
    assert rewards[-1] > 0.8
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert "what serves it: eager: the tensors are on cpu, the kernels are for GPUs" in told
    assert "The kernels need a GPU" in told
    assert re.search(r"a loop over the steps [\d.]+ ms, one call with resets [\d.]+ ms: [\d.]+ times", told)


@pytest.mark.parametrize("dtype", sorted(ppo_resets.DTYPES))
def test_every_dtype_is_timed_without_training(dtype: str, tmp_path: Path) -> None:
    assert ppo_resets.main([*SMALL, "--rollouts", "0", "--dtype", dtype, "--picture", str(tmp_path / "none.png")]) == 0
    assert not list(tmp_path.iterdir())


def test_a_policy_that_forgets_its_marks_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    forward = ppo_resets.Policy.forward

    def forgetful(self: Any, seen: torch.Tensor, state: torch.Tensor, begun: torch.Tensor) -> Any:
        return forward(self, seen, state, torch.zeros_like(begun))

    monkeypatch.setattr(ppo_resets.Policy, "forward", forgetful)
    assert ppo_resets.main([*SMALL, "--rollouts", "0"]) == 1


def test_a_gradient_that_is_not_a_number_is_seen(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    gradients = ppo_resets.gradients

    def broken(policy: Any, rollout: Any) -> list[torch.Tensor]:
        *first, last = gradients(policy, rollout)
        return [*first, last if isinstance(policy, ppo_resets.LoopPolicy) else last * torch.nan]

    monkeypatch.setattr(ppo_resets, "gradients", broken)
    assert ppo_resets.main([*SMALL, "--rollouts", "0"]) == 1
    assert "gradients of both are nan of the largest apart" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("none/x.png", "No such file or directory"),
        ("", "Format '' is not supported"),
        ("x.foo", "Format 'foo' is not supported"),
        ("x" * 300 + ".svg", "File name too long"),
    ],
    ids=["no folder", "a folder", "no format", "no name"],
)
def test_a_picture_that_cannot_be_is_refused_before_training(
    name: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        ppo_resets.main([*SMALL, "--rollouts", "1", "--picture", str(tmp_path / name)])
    told = capsys.readouterr()
    assert told.out == ""
    assert "error: argument --picture: " in told.err.splitlines()[-1]
    assert said in told.err.splitlines()[-1]
    assert not list(tmp_path.iterdir())


def test_without_matplotlib_it_learns_and_draws_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert ppo_resets.main([*SMALL, "--rollouts", "1", "--picture", str(tmp_path / "none.png")]) == 0
    assert "no picture: matplotlib is not installed" in capsys.readouterr().out
    assert not list(tmp_path.iterdir())


def test_corridors_ask_in_the_last_room_alone_and_end_there() -> None:
    corridors = ppo_resets.Corridors(500, 6, torch.Generator().manual_seed(0))
    seen, rooms, sign = corridors.seen(), corridors.rooms.clone(), corridors.sign.clone()
    assert torch.equal(seen[:, :2].argmax(1), sign)
    assert set(rooms.tolist()) == {3, 4, 5, 6}
    for room in range(6):
        asked = rooms == room + 1
        reward, ended = corridors.step(sign)
        alive = rooms > room
        assert torch.equal(ended[alive], asked[alive])
        assert torch.equal(reward[alive], asked[alive].float())
        if room == 0:
            assert not corridors.seen()[:, :2].any(), "the sign hangs in the first room"
