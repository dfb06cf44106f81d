"""One model trained on all GPUs by PyTorch's DistributedDataParallel, on scikit-learn's digits, with a checkpoint each epoch.

    dask-gpu-mpi launch -n 2 examples/ddp_digits.py [EPOCHS]

Training continues from the checkpoint, in the working directory, after a worker was lost, and in the next job after the walltime:
exit code 75, and `launch --requeue 10` runs the job again. Exit code 1: the losses are not those of a single process.
"""

from __future__ import annotations

import os
import sys

import torch
from sklearn.datasets import load_digits
from torch.nn.parallel import DistributedDataParallel

from dask_gpu_mpi import Group, SpmdError, current_session


def fit(group: Group, epochs: int, file: str) -> list[float]:
    """Train, each member with its share of each batch of 200; return the loss of each epoch."""
    device = torch.device("cpu" if group.device is None else f"cuda:{group.device}")
    x, y = (torch.tensor(column, device=device) for column in load_digits(return_X_y=True))
    torch.manual_seed(0)
    network = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10))
    model = DistributedDataParallel(network.to(device, x.dtype))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses = []
    saved = torch.load(file, map_location="cpu") if group.rank == 0 and os.path.exists(file) else None
    if saved := group.broadcast(saved):  # rank 0's: the others may see the file a moment later
        losses, *states = saved
        model.load_state_dict(states[0])
        optimizer.load_state_dict(states[1])
        print(f"rank {group.rank} of {group.size} continues after epoch {len(losses)}", flush=True)
    for epoch in range(len(losses), epochs):
        total = x.new_zeros(())
        for batch in torch.randperm(len(x), generator=torch.Generator().manual_seed(epoch)).split(200):
            own = batch[group.rank :: group.size]
            loss = torch.nn.functional.cross_entropy(model(x[own] / 16), y[own], reduction="sum")
            optimizer.zero_grad()
            (loss * group.size / len(batch)).backward()  # DDP takes the mean over the members
            optimizer.step()
            total += loss.detach()
        torch.distributed.all_reduce(total)
        losses.append(float(total) / len(x))
        if group.rank == 0:
            torch.save((losses, model.state_dict(), optimizer.state_dict()), f"{file}.new")
            os.replace(f"{file}.new", file)
    return losses


def train(group: Group, epochs: int, file: str) -> list[float]:
    """A member. `fit` has freed its model before the process group ends: later, PyTorch may hang. As it may where this fails."""
    torch.distributed.init_process_group("gloo" if group.device is None else "nccl")
    losses = fit(group, epochs, file)
    torch.distributed.destroy_process_group()
    return losses


def main() -> None:
    """Train on all workers, again where one was lost, and on one; compare the losses."""
    session, epochs = current_session(), int(sys.argv[1]) if sys.argv[1:] else 20
    session.on_walltime(lambda: print("time is up: the next job continues"), before=60)
    for left in range(4, -1, -1):  # the training itself may kill a worker
        try:
            losses = session.spmd(train, epochs, os.path.abspath("digits.pt"))[0]
            break
        except SpmdError as error:
            if not (error.died and left):
                raise
            print(f"{error}; starting again", flush=True)
    [alone] = session.spmd(train, epochs, os.path.abspath("alone.pt"), workers=[session.plan.workers[0].name])
    if not (difference := max(abs(a - b) for a, b in zip(losses, alone, strict=True))) < 1e-4:
        sys.exit(f"WRONG: the losses differ by {difference:.1e} from those of a single process")
    print(f"right: the losses of {epochs} epochs are those of a single process, the last is {losses[-1]:.4f}")


if __name__ == "__main__":
    main()
