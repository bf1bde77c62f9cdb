"""A model that outlives its group

says: some rank: Timeout (0:00:20)!...in train
see:  Sometimes the last line is printed, and the program doesn't end (gloo only; of groups left in a loop on two cores,
      one of the first 15 hung). Here Python is told to keep its lock, so that one of 300 groups surely hangs.
find: py-spy dump --native shows the main thread in `~Reducer`, `~ProcessGroupGloo` and `join`. A thread of gloo, which
      drops the tensor of the last all-reduce, waits for Python's lock, which the main thread holds (pytorch#56297).
fix:  Let DDP go before its group: train in a function of its own, and destroy the group after it, or `del model`. A
      barrier before it makes the hang more likely.
then: rank 0: all groups are left | rank 1: all groups are left
"""

import faulthandler
import sys

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP


def train():
    group = dist.new_group()
    model = DDP(torch.nn.Linear(64, 64), process_group=group)
    dist.all_reduce(model(torch.ones(64)).detach(), group=group)  # as of a loss, when all is trained
    # right: del model
    # wrong
    dist.destroy_process_group(group)


dist.init_process_group("gloo")
sys.setswitchinterval(60)  # seconds for which a thread keeps Python's lock, so that we see soon what is rare else
for _ in range(300):
    faulthandler.dump_traceback_later(20, exit=True)  # who hangs says where, and ends
    train()
faulthandler.cancel_dump_traceback_later()
print("all groups are left")
dist.destroy_process_group()
