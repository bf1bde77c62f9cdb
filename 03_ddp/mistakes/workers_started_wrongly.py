"""A DataLoader's workers that cannot be started

says: rank 0: Can't pickle <function <lambda> at
see:  With spawn (macOS, Windows, or because CUDA is in use) all that a worker needs is pickled, and a lambda cannot
      be.
find: Set num_workers=0: then the true message appears in the main process.
fix:  Functions at the top of a module, the program under `if __name__ == '__main__'`, no open files in the dataset.
then: rank 0: reads [[0, 1], [0, 1]]
"""

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

dist.init_process_group("gloo")


def pairs(batch):
    return torch.stack([torch.tensor(batch), torch.tensor(batch) ** 2])


# right: collate, context = pairs, "fork"
collate, context = lambda batch: pairs(batch), "spawn"  # wrong
loader = DataLoader(range(4), 2, collate_fn=collate, num_workers=1, multiprocessing_context=context)
print(f"rank {dist.get_rank()} reads {[batch.tolist() for batch in loader][0]}")
dist.barrier()
dist.destroy_process_group()
