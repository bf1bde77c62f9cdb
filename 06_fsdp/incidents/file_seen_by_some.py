"""A restart hangs before its first step, sometimes, on a shared filesystem.

thread:   https://github.com/KempnerInstitute/KempnerForge/issues/49
          https://github.com/NVIDIA-NeMo/Speech/pull/8153
reported: `exists` disagrees between ranks for a while; some go on to load, and the broadcast behind it deadlocks
net:      --check-collectives, at the first call that differs
cause:    Each rank asks the filesystem by itself, and a shared one may show a new file to one node later than to
          another. So the ranks take different branches. One rank has to ask and tell the others, and that
          rank alone may read: another one might not see the file yet.
"""

import torch.distributed as dist

from common.lab.launch import launch
from course.fsdp.museum import Seen
from course.fsdp.toy import examples, keep, learn, net, sgd

RANKS, REPORTED, EXPECTED = 2, (1.0, 1.0), 0.0
STEPS, WAIT = 2, 2.0  # seconds that a rank waits for the others
SHOWN = [True, False]  # what the filesystem tells each rank: rank 1's node has not seen the new file yet


def there(rank):
    """Is there a checkpoint to go on from?"""
    answer = [SHOWN[rank]]
    # right: dist.broadcast_object_list(answer, src=0)
    len(answer)  # wrong
    return answer[0]


def on_rank():
    model, seen = net(), Seen()
    if there(dist.get_rank()):
        load(model)
    optimizer = sgd(model)
    for step in range(STEPS):
        seen.numbers[f"loss {step}"] = learn(model, optimizer, *examples(step), ranks=True)
    return keep(seen, model)


def load(model):
    """Rank 0 reads, and sends to all. (The weights in the checkpoint are the double of the new ones.)"""
    for parameter in model.parameters():
        parameter.data = 2 * parameter.data
        dist.broadcast(parameter.data, src=0)


def alone():
    model, seen = net(), Seen()
    for parameter in model.parameters():
        parameter.data = 2 * parameter.data
    optimizer = sgd(model)
    for step in range(STEPS):
        seen.numbers[f"loss {step}"] = learn(model, optimizer, *examples(step), ranks=False)
    return keep(seen, model)


def answers():
    """For each rank, whether it goes to load."""
    return launch(lambda: there(dist.get_rank()), RANKS)


def effect(*_):
    """How many of the two ranks go to load alone."""
    return float(answers().count(True) % RANKS)
