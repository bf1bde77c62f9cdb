"""set_device forgotten

says: rank 0: ranks 0 and 1 share cuda:0
see:  NCCL says `Duplicate GPU detected`. Without NCCL it works, at half the speed and with twice the memory on GPU 0.
find: `nvidia-smi` lists two processes on GPU 0, and none on the others.
fix:  torch.cuda.set_device(LOCAL_RANK) before init_process_group, and device_id= in it.
then: rank 0: every rank has a GPU of its own
"""

import os
from datetime import timedelta

import torch
import torch.distributed as dist

dist.init_process_group("gloo", timeout=timedelta(seconds=60))
local_rank = int(os.environ["LOCAL_RANK"])
# right: device = torch.device(f"cuda:{local_rank}")
device = torch.device("cuda:0")  # wrong
devices = [None] * 2
dist.all_gather_object(devices, device)
print("every rank has a GPU of its own" if len(set(devices)) == 2 else f"ranks 0 and 1 share {device}")
dist.destroy_process_group()
