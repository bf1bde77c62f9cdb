"""A network interface that is not there

says: some rank: Unable to find address for: eth77
see:  An error in init_process_group that names the interface. With NCCL, look for NCCL_SOCKET_IFNAME.
find: `ip -brief address` lists the interfaces of a node.
fix:  Name one that all nodes have, or unset the variable.
then: rank 0: is there | rank 1: is there
"""

import os
from datetime import timedelta

import torch.distributed as dist

# right: pass
os.environ["GLOO_SOCKET_IFNAME"] = "eth77"  # wrong
dist.init_process_group("gloo", timeout=timedelta(seconds=60))
print(f"rank {dist.get_rank()} is there")
dist.barrier()
dist.destroy_process_group()
