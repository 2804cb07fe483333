"""Rank 0 sends rank 1 two tensors of different sizes at a time, many times over; rank 1 says what has come."""

import os

import torch
import torch.distributed as dist

TIMES = 300
SIZES = (3, 5)


def main() -> None:
    rank = int(os.environ["RANK"])
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", device_id=torch.device("cuda", rank))
    found = 0
    for time in range(TIMES):
        given = [torch.arange(n, dtype=torch.float32) + time for n in SIZES]
        tensors = [x.cuda() if rank == 0 else torch.zeros(len(x), device="cuda") for x in given]
        way = dist.isend if rank == 0 else dist.irecv
        for work in dist.batch_isend_irecv([dist.P2POp(way, x, 1 - rank) for x in tensors]):
            work.wait()
        found += all(torch.equal(x.cpu(), y) for x, y in zip(tensors, given))
    if rank == 1:
        print(f"{found} of {TIMES} came in order", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
