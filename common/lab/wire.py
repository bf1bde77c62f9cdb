"""The wire: how many bytes do the ranks of this machine really send each other?

The ledger charges a collective what the ring algorithm sends. Inside `with Wire() as wire:` the kernel counts instead:
ranks on one machine talk through its loopback interface, which keeps a counter of the bytes that went through it. So
one sees what the backend (gloo, or NCCL over sockets) does, headers and acknowledgements included, which add some
thousandths to large messages.

The counter knows nothing of processes. Whatever else talks to itself on this machine is counted too: other runs, a
browser with JupyterLab, a TCP store. Measure where nothing else talks, and tens of megabytes at a time.
"""

import sys
import time

import psutil
import torch
import torch.distributed as dist

from common.errors import UserError

LOOPBACK = "lo"


class Wire:
    """Bytes through this machine's loopback interface while the block runs, from all ranks together: `sent`, set when
    the block ends.

    Collective: all ranks of `group` (default: all there are) enter and leave the block; they have to be on this
    machine, and have to be done with the block's messages, asynchronous ones included, when they leave it. The barriers
    of entering and leaving are outside of what is counted, but for some kilobytes; a Ledger of the same calls belongs
    inside the block, or it enters them too. On an exception nothing is counted.

    Raises UserError where the system keeps no such counter: on anything but Linux.
    """

    def __init__(self, group: dist.ProcessGroup | None = None):
        self.group = group or dist.group.WORLD
        self.sent: int | None = None
        self._counter()

    def __enter__(self) -> "Wire":
        self.before = self._counter_at_rest()
        dist.barrier(self.group)  # nobody begins before rank 0 has read the counter
        return self

    def __exit__(self, kind, error, trace) -> None:
        if error is not None:
            return  # a barrier might wait for a rank that is no more
        sent = torch.tensor(self._counter_at_rest() - self.before)
        dist.broadcast(sent, group=self.group, group_src=0)
        self.sent = int(sent)

    def _counter_at_rest(self) -> int:
        """The counter on the group's rank 0 once all ranks are here and nothing moves any more; 0 on the others."""
        dist.barrier(self.group)
        if dist.get_rank(self.group) > 0:
            return 0
        count, deadline = self._counter(), time.monotonic() + 1.0
        while time.monotonic() < deadline:
            time.sleep(0.02)  # the barrier's last messages and acknowledgements are under way
            count, last = self._counter(), count
            if count == last:
                break
        return count

    @staticmethod
    def _counter() -> int:
        interfaces = psutil.net_io_counters(pernic=True) if sys.platform == "linux" else {}
        if LOOPBACK not in interfaces:
            raise UserError(
                f"bytes on the wire are counted by Linux's loopback interface '{LOOPBACK}', and this machine "
                f"({sys.platform}) has none; use the ledger, which counts by formula"
            )
        return interfaces[LOOPBACK].bytes_sent
