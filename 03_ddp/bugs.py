"""Mistakes people make when they write data parallelism by hand, each one line away from by_hand.py.

Find them by reading; the tests find them by comparing with training on one process.
"""

from common.equality import Bug

CLASS = "DataParallelByHand"

BUGS = {
    "gradients are summed over the ranks, not averaged": Bug(
        line="parameter.grad /= self.data_size",
        becomes="pass",
        refused_by="grad_norm",
    ),
    "the parameter is reduced, not its gradient": Bug(
        line="dist.all_reduce(parameter.grad)",
        becomes="dist.all_reduce(parameter.data)",
        refused_by="grad_norm",
    ),
    "gradients are never reduced": Bug(
        line="self.average_gradients()",
        becomes="pass",
        refused_by="grad_norm",
    ),
    "each rank clips its own gradients before they are averaged": Bug(
        line="self.average_gradients()",
        becomes="clip_grad_norm_(self.model.parameters(), self.max_norm)\nself.average_gradients()",
        refused_by="grad_norm",
    ),
    "every rank starts from weights of its own": Bug(
        line="dist.broadcast(tensor, src=0)",
        becomes="pass",
        refused_by="loss",
    ),
    "the loss is not divided by the number of micro-batches": Bug(
        line="part = cross_entropy(self.model(inputs), targets) / len(micro_batches)",
        becomes="part = cross_entropy(self.model(inputs), targets)",
        refused_by="loss",
    ),
    "the optimizer steps after every micro-batch": Bug(
        line="loss += part.detach()",
        becomes="loss += part.detach()\nself.optimizer.step()",
        refused_by="loss",
    ),
    "gradients of the step before are still there": Bug(
        line="self.optimizer.zero_grad()",
        becomes="pass",
        refused_by="grad_norm",
    ),
    "every rank reports the loss of its own slice": Bug(
        line="dist.all_reduce(loss)",
        becomes="loss = loss * self.data_size",
        refused_by="loss",
    ),
    "every rank reads the same slice": Bug(
        line="self.data_rank, self.data_size = ranks.rank, ranks.size",
        becomes="self.data_rank, self.data_size = 0, ranks.size",
        refused_by="loss",
    ),
    "gradients are divided by the number of ranks twice": Bug(
        line="parameter.grad /= self.data_size",
        becomes="parameter.grad /= self.data_size**2",
        refused_by="grad_norm",
    ),
}
