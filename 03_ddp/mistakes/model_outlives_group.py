"""A model that outlives its group

says: some rank: Timeout (0:00:20)!
see:  Sometimes the last line is printed, and the program doesn't end (gloo only; of groups left in a loop on two cores,
      one of the first 15 hung). Here nobody waits for the last all-reduce, so that each run hangs.
find: py-spy dump --native shows the main thread in `~Reducer`, `~ProcessGroupGloo` and `join`. A thread of gloo, which
      drops the tensor of the last all-reduce, waits for Python's lock, which the main thread holds (pytorch#56297).
fix:  Let DDP go before its group: train in a function of its own, and destroy the group after it, or `del model`. A
      barrier before it makes the hang more likely.
then: rank 0: the group is left | rank 1: the group is left
"""

import faulthandler

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP


def train():
    group = dist.new_group()
    model = DDP(torch.nn.Linear(64, 64), process_group=group)
    loss = model(torch.ones(64)).detach()
    dist.all_reduce(loss, group=group, async_op=True)  # with wait() it is a matter of luck
    # right: del model
    # wrong
    dist.destroy_process_group(group)


dist.init_process_group("gloo")
faulthandler.dump_traceback_later(20, exit=True)  # who hangs says where, and ends
train()
faulthandler.cancel_dump_traceback_later()
print("the group is left")
dist.destroy_process_group()
