"""One rank of a GRU under DistributedDataParallel: python -m tests.gpu.distributed RANK RANKS PORT; 0 if right."""

from __future__ import annotations

import sys

import torch
import torch.distributed
from torch.nn.parallel import DistributedDataParallel

import tuned.nn
from tuned.calls.gru import training

STEPS, ROWS, HIDDEN = 64, 16, 256


def main(rank: int, ranks: int, port: int) -> int:
    """For some steps, every rank's gradients of a shared batch must be those of the whole batch."""
    gpus = torch.cuda.device_count()
    device = torch.device("cuda", rank % gpus)
    torch.cuda.set_device(device)
    backend = "nccl" if gpus >= ranks else "gloo"  # NCCL needs a GPU for each rank
    torch.distributed.init_process_group(backend, f"tcp://127.0.0.1:{port}", world_size=ranks, rank=rank)
    by_kernels, served = training._by_kernels, [0]

    def counted(*args: object) -> object:
        served[0] += 1
        return by_kernels(*args)  # type: ignore[arg-type]

    training._by_kernels = counted  # type: ignore[assignment]
    torch.manual_seed(0)
    alone = tuned.nn.GRU(HIDDEN, HIDDEN, 2, device=device, dtype=torch.bfloat16)
    shared = tuned.nn.GRU(HIDDEN, HIDDEN, 2, device=device, dtype=torch.bfloat16)
    shared.load_state_dict(alone.state_dict())
    parallel = DistributedDataParallel(shared, device_ids=[device.index])
    worst = 0.0
    for _ in range(3):
        x = torch.randn(STEPS, ROWS * ranks, HIDDEN, device=device, dtype=torch.bfloat16)  # equal on every rank
        own = x[:, rank * ROWS : (rank + 1) * ROWS]
        alone.zero_grad()
        shared.zero_grad()
        alone(x)[0].float().square().mean().backward()
        parallel(own)[0].float().square().mean().backward()
        for ours, whole in zip(shared.parameters(), alone.parameters(), strict=True):
            assert ours.grad is not None
            assert whole.grad is not None
            apart = (ours.grad.float() - whole.grad.float()).abs().max() / whole.grad.float().abs().max()
            worst = max(worst, apart.item())
    torch.distributed.destroy_process_group()
    print(f"rank {rank} of {ranks} by {backend}: {served[0]} layers by kernels, {worst:.2g} apart", flush=True)  # noqa: T201
    return 0 if worst < 2e-2 and served[0] == 12 else 1


if __name__ == "__main__":
    raise SystemExit(main(*map(int, sys.argv[1:])))
