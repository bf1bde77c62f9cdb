"""No destroy_process_group

says: rank 0: the sum of 1 rank is 1...trying to initialize the default process group twice!
see:  The second start in the same process fails. At the end of a program, NCCL warns that resources may leak, and
      gloo's threads can abort Python.
find: The message.
fix:  End with destroy_process_group(), on the way out of a successful run; after an exception just exit.
then: rank 0: the sum of 1 rank is 1...the sum of 1 rank is 1
"""

import torch
import torch.distributed as dist


def train():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # one process, as in a notebook
    total = torch.ones(1)
    dist.all_reduce(total)
    print(f"the sum of {dist.get_world_size()} rank is {total.item():.0f}")
    # right: dist.destroy_process_group()
    # wrong


train()
train()  # as when a notebook's cell is run again
