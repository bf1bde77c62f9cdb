"""A port behind a firewall

says: rank 0: Timed out after 4 seconds waiting for clients. 1/2 clients joined. | rank 1: The client socket has timed
      out after 3000ms while trying to connect to
see:  Like a wrong address, but slower: nothing refuses the connection, so it is tried until the timeout.
find: `nc -vz HOST PORT` waits, where a wrong port says `refused` at once. Try a second port too: gloo and NCCL open
      others.
fix:  Open the ports between the nodes, all of them: the store's, and the random ones of the ranks.
then: rank 0: is there | rank 1: is there
"""

import os
import socket
from datetime import timedelta

import torch.distributed as dist

closed = socket.create_server(("127.0.0.1", 0), backlog=0)  # when its queue is full, Linux drops what comes
for waiting in [socket.socket() for _ in range(4)]:
    waiting.setblocking(False)
    waiting.connect_ex(closed.getsockname())
if os.environ["RANK"] == "1":
    # right: pass
    os.environ["MASTER_PORT"] = str(closed.getsockname()[1])  # wrong
dist.init_process_group("gloo", timeout=timedelta(seconds=3))
print(f"rank {dist.get_rank()} is there")
dist.barrier()
dist.destroy_process_group()
