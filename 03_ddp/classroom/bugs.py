"""Data parallelism with one mistake each, of the kind people really make. Can you find it?

    python classroom/bugs.py                 the names
    python classroom/bugs.py NAME            the file with the mistake in it, in one place
    python classroom/bugs.py NAME --answer   the place, and the check that refuses it

Every one is refused by the comparison with training on one process (common/lab/equality.py), which sees a number that
is off, ranks that no longer hold the same, or ranks that wait for each other in vain; or by that of what the ranks
read with what they should (check_loading.py). Those of the program to copy, standalone.py, are refused by the
comparison of what it saves, or prints, with a plain loop.
"""

from functools import partial

from common.lab.bugs import Bug, Bugs

bug = partial(Bug, "DDPByHand", ranks=2)
program = partial(Bug, "train", ranks=2, file="standalone.py")

BUGS = Bugs(
    __file__,
    {
        "too_large": bug(
            right="1 / self.size",
            wrong="1.0",
            inside="average_bucket",
            refused_by="grad_norm",
            why="Gradients are summed over the ranks, not averaged. AdamW's steps do not depend on the scale of the "
            "gradient, so its loss curve looks fine; SGD's learning rate is N times what was asked for.",
        ),
        "too_small": bug(
            right="1 / self.size",
            wrong="1 / self.size**2",
            inside="average_bucket",
            refused_by="grad_norm",
            why="Gradients are divided by the number of ranks twice: once would have been done by a loss that was "
            "divided already.",
        ),
        "wrong_tensor": bug(
            right="self.missing[self.bucket_of[index]].remove(index)",
            wrong="self.views[index].copy_(parameter)\n        self.missing[self.bucket_of[index]].remove(index)",
            inside="put",
            refused_by="grad_norm",
            why="The hook reduces the parameter, not its gradient: the optimizer is handed the weights for a gradient.",
        ),
        "never_reduced": bug(
            right="dist.all_reduce(bucket, group=self.group, async_op=True)",
            wrong="dist.all_reduce(bucket.clone(), group=self.group, async_op=True)",
            inside="average_bucket",
            refused_by="grad_norm",
            why="A copy is reduced, and thrown away. Every rank trains a model of its own on its own slice, and each "
            "loss curve looks fine.",
        ),
        "only_the_last": bug(
            right="            return",
            wrong="            parameter.grad = None\n            return",
            inside="ready",
            refused_by="grad_norm",
            why="Gradients that were accumulated without being sent are dropped: only the last micro-batch is reduced.",
        ),
        "clipped_too_early": bug(
            right="bucket *= 1 / self.size",
            wrong="bucket *= 1 / self.size / bucket.norm().clamp(min=1.0)",
            inside="average_bucket",
            refused_by="grad_norm",
            why="Each rank clips by the norm of its own gradient, which is larger than that of the mean: the mean of "
            "clipped gradients is not the clipped mean.",
        ),
        "own_weights": bug(
            right="broadcast_module(model, group)",
            wrong="pass",
            inside="__init__",
            refused_by="loss",
            why="Ranks seeded differently start from different weights, and equal gradients keep them apart.",
        ),
        "drifting_buffers": bug(
            right="broadcast_together([*self.model.buffers()], self.group)",
            wrong="pass",
            inside="finish",
            refused_by="agreement",
            why="BatchNorm's running statistics are no parameters and have no gradient: each rank keeps those of its "
            "own slices, and evaluates another model than the others do.",
        ),
        "not_divided": bug(
            right="cross_entropy(self.model(inputs), targets) / len(micro_batches)",
            wrong="cross_entropy(self.model(inputs), targets)",
            refused_by="loss",
            why="The loss is not divided by the number of micro-batches: with accumulation M, gradients are M times "
            "too large.",
        ),
        "impatient": bug(
            right="            loss += part.detach()",
            wrong="            loss += part.detach()\n            self.optimizer.step()",
            refused_by="loss",
            why="The optimizer steps after the first micro-batch, and after every other, by the gradient of this rank "
            "alone.",
        ),
        "leftovers": bug(
            right="self.reducer.zero_grad()",
            wrong="pass",
            refused_by="grad_norm",
            why="Gradients of the step before are still there, and are added to.",
        ),
        "local_loss": bug(
            right="return loss / self.data_size, grad_norm",
            wrong="return part.detach() * len(micro_batches), grad_norm",
            refused_by="loss",
            why="Every rank reports the loss of its own last micro-batch. Training is right; the curve is not.",
        ),
        "same_slice": bug(
            right="self.model = model.to(self.device)",
            wrong="self.model, self.data_rank = model.to(self.device), 0",
            refused_by="loss",
            why="All ranks read the first slice of each batch: N times the work, for one rank's gradient.",
        ),
        "alone_on_rank_0": bug(
            right="total = dist.all_reduce(loss, group=self.group, async_op=True)",
            wrong="total = dist.all_reduce(loss, group=self.group, async_op=True)\n        if self.data_rank == 0:\n"
            "            dist.reduce(loss, group=self.group, group_dst=0)",
            refused_by="timeout",
            why="Rank 0 wants a number for its log, and asks for it alone; but a collective needs all ranks: rank 0 "
            "waits until its time is up.",
        ),
        "no_set_epoch": Bug(
            "stream",
            right="epoch_order(plan.seed, epoch, dataset.size)",
            wrong="epoch_order(plan.seed, 0, dataset.size)",
            inside="records",
            file="loading.py",
            ranks=2,
            refused_by="order",
            why="Every epoch has the order of the first. Nothing fails and the loss falls, on the same batches again "
            "and again; a test that ends within the first epoch never notices.",
        ),
        "a_batch_more": Bug(
            "shard_stream",
            right="if place == plan.batch_size - 1:",
            wrong="if len(mine) == plan.slice_size:",
            inside="slices",
            file="loading.py",
            ranks=2,
            refused_by="count",
            why="A rank has its batch as soon as its own slice is full. Where the data ends in the middle of a global "
            "batch, the first ranks have one more, and wait in its all-reduce until the timeout.",
        ),
        "momenta_forgotten": program(
            right='optimizer.load_state_dict(state["optimizer"])',
            wrong="pass",
            refused_by="saved",
            why="A restart goes on with the weights, and with an optimizer that has averaged nothing yet. The loss "
            "goes on falling, by other steps; only a run that was never interrupted says so. The learning rate of the "
            "optimizer's groups is forgotten with it.",
        ),
        "batch_times_ranks": program(
            right="BATCH_SIZE // world_size",
            wrong="BATCH_SIZE",
            refused_by="saved",
            why="Each rank reads a whole batch, so a step takes N times the examples at the learning rate of one "
            "batch, and an epoch has an Nth of the steps.",
        ),
        "metrics_of_one_rank": program(
            right="        dist.all_reduce(metrics)",
            wrong="        pass",
            refused_by="printed",
            why="Training is right. What is printed is rank 0's share of the loss, and the test images that it alone "
            "has seen: it looks as if accuracy had fallen to an Nth.",
        ),
    },
)

if __name__ == "__main__":
    BUGS.command_line()
