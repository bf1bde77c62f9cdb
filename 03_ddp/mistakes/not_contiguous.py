"""A tensor that is not contiguous

says: rank 0: input tensor has to be contiguous
see:  The sender is told, and the receiver waits. (With NCCL, PyTorch warns once and sends the memory as it lies.)
find: The message and its line.
fix:  Call contiguous() first, and copy back afterwards where the original should change.
then: rank 1: received [0.0, 3.0, 1.0, 4.0, 2.0, 5.0]
"""

from datetime import timedelta

import torch
import torch.distributed as dist

dist.init_process_group("gloo", timeout=timedelta(seconds=60))

weight, received = torch.arange(6.0).view(2, 3), torch.empty(3, 2)
# right: columns = weight.t().contiguous()
columns = weight.t()  # wrong
if dist.get_rank() == 0:
    dist.send(columns, dst=1)
else:
    dist.recv(received, src=0)
    print(f"received {received.flatten().tolist()}")
dist.destroy_process_group()
