"""A port that is in use

says: rank 0: The server socket has failed to listen on any local network address...EADDRINUSE | rank 1: The client
      socket has timed out after 3000ms while trying to connect to
see:  Rank 0 ends at once. The others connect to the wrong program, and fail later with another message.
find: Read rank 0's message first. `ss -ltnp` shows who has the port.
fix:  Another --master_port; on one node none at all, or --standalone: torchrun then takes a free one.
then: rank 0: is there | rank 1: is there
"""

import os
import socket
from datetime import timedelta

import torch.distributed as dist

port = int(os.environ["MASTER_PORT"])
if os.environ["RANK"] == "0":
    # right: pass
    another_job = socket.create_server(("", port))  # wrong
dist.init_process_group("gloo", timeout=timedelta(seconds=3))
print(f"rank {dist.get_rank()} is there")
dist.barrier()
dist.destroy_process_group()
