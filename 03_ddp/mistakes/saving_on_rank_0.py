"""A collective hidden in saving

says: some rank: Timed out waiting 3000ms for
see:  Training runs well, and stops at the first checkpoint. Rank 0 gathers the shards of the others, who do not send
      them.
find: The stack of rank 0 ends in an all-gather below the line that makes the state dict.
fix:  Let all ranks write pieces with torch.distributed.checkpoint; or make the state dict on all ranks (with
      cpu_offload=True where a GPU cannot hold the whole model), and let rank 0 alone write it.
then: rank 0: saving 2 tensors
"""

from datetime import timedelta

import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

dist.init_process_group("gloo", timeout=timedelta(seconds=3))
model = fully_shard(nn.Linear(4, 4), mesh=init_device_mesh("cpu", (2,)))
# right: state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
# right: if dist.get_rank() == 0:
if dist.get_rank() == 0:  # wrong
    state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))  # wrong
    print(f"saving {len(state)} tensors")
dist.barrier()
dist.destroy_process_group()
