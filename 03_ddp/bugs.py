"""Data parallelism with one mistake each, of the kind people really make. Can you find it?

    python bugs.py                 the names
    python bugs.py NAME            the code with the mistake in it: by_hand.py, but for one place
    python bugs.py NAME --answer   the place, and the number that refuses it

Every one is refused by the comparison with training on one process (common/equality.py).
"""

from functools import partial

from common.bugs import Bug, Bugs

bug = partial(Bug, "DataParallelByHand", ranks=2)

BUGS = Bugs(
    __file__,
    {
        "too_large": bug(
            right="parameter.grad /= self.data_size",
            wrong="pass",
            refused_by="grad_norm",
            why="Gradients are summed over the ranks, not averaged. AdamW's steps do not depend on the scale of the "
            "gradient, so its loss curve looks fine; SGD's learning rate is N times what was asked for.",
        ),
        "too_small": bug(
            right="parameter.grad /= self.data_size",
            wrong="parameter.grad /= self.data_size**2",
            refused_by="grad_norm",
            why="Gradients are divided by the number of ranks twice: once would have been done by a loss that was "
            "divided already.",
        ),
        "wrong_tensor": bug(
            right="dist.all_reduce(parameter.grad)",
            wrong="dist.all_reduce(parameter.data)",
            refused_by="grad_norm",
            why="The parameter is reduced, not its gradient: every step multiplies the weights by the number of ranks.",
        ),
        "never_reduced": bug(
            right="self.average_gradients()",
            wrong="pass",
            refused_by="grad_norm",
            why="Every rank trains a model of its own on its own slice. Each loss curve looks fine.",
        ),
        "clipped_too_early": bug(
            right="self.average_gradients()",
            wrong="clip_grad_norm_(self.model.parameters(), self.max_norm)\n        self.average_gradients()",
            refused_by="grad_norm",
            why="Each rank clips by the norm of its own gradient, which is larger than that of the mean: the mean of "
            "clipped gradients is not the clipped mean.",
        ),
        "own_weights": bug(
            right="dist.broadcast(tensor, src=0)",
            wrong="pass",
            refused_by="loss",
            why="Ranks seeded differently start from different weights, and equal gradients keep them apart.",
        ),
        "not_divided": bug(
            right="cross_entropy(self.model(inputs), targets) / len(micro_batches)",
            wrong="cross_entropy(self.model(inputs), targets)",
            refused_by="loss",
            why="The loss is not divided by the number of micro-batches: with accumulation M, gradients are M times "
            "too large.",
        ),
        "impatient": bug(
            right="loss += part.detach()",
            wrong="loss += part.detach()\n            self.optimizer.step()",
            refused_by="loss",
            why="The optimizer steps after every micro-batch, by the gradient of this rank alone.",
        ),
        "leftovers": bug(
            right="self.optimizer.zero_grad()",
            wrong="pass",
            refused_by="grad_norm",
            why="Gradients of the step before are still there, and are added to.",
        ),
        "local_loss": bug(
            right="dist.all_reduce(loss)",
            wrong="loss = loss * self.data_size",
            refused_by="loss",
            why="Every rank reports the loss of its own slice. Training is right; the curve is not.",
        ),
        "same_slice": bug(
            right="self.data_rank, self.data_size = ranks.rank, ranks.size",
            wrong="self.data_rank, self.data_size = 0, ranks.size",
            refused_by="loss",
            why="All ranks read the first slice of each batch: N times the work, for one rank's gradient.",
        ),
    },
)

if __name__ == "__main__":
    BUGS.command_line()
