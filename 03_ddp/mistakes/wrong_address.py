"""A wrong MASTER_ADDR

says: rank 0: Timed out after 4 seconds waiting for clients. 1/2 clients joined. | rank 1: The client socket has timed
      out after 3000ms while trying to connect to (192.0.2.1,
see:  The rank with the wrong address cannot connect; rank 0 waits for it until the timeout.
find: `getent hosts NAME` and `nc -vz HOST PORT` on the node that cannot connect.
fix:  The address of the node of rank 0, as the others see it: not localhost, and not 127.0.1.1.
then: rank 0: is there | rank 1: is there
"""

import os
from datetime import timedelta

import torch.distributed as dist

if os.environ["RANK"] == "1":
    # right: pass
    os.environ["MASTER_ADDR"] = "192.0.2.1"  # wrong
dist.init_process_group("gloo", timeout=timedelta(seconds=3))
print(f"rank {dist.get_rank()} is there")
dist.barrier()
dist.destroy_process_group()
