"""Sharded training with one mistake each, of the kind people really make. Can you find it?

    python bugs.py                 the names
    python bugs.py NAME            by_hand.py or by_hand_fsdp.py with the mistake in it, in one place
    python bugs.py NAME --answer   the place, and the check that refuses it

Every one is refused by the comparison with training on one process (common/equality.py).
"""

from functools import partial

from common.bugs import Bug, Bugs

stage1 = partial(Bug, "ShardedOptimizer", ranks=2)
stage2 = partial(Bug, "ShardedGradients", ranks=2, file="by_hand_fsdp.py")
stage3 = partial(Bug, "ShardedParameters", ranks=2, file="by_hand_fsdp.py")

BUGS = Bugs(
    __file__,
    {
        "local_norm": stage1(
            right="        dist.all_reduce(square)\n",
            wrong="",
            inside="clip",
            refused_by="grad_norm",
            why="Each rank clips by the norm of its own shard: each by another factor, and all by one that is too near "
            "to 1.",
        ),
        "sum_of_norms": stage1(
            right="get_total_norm([shard.grad for shard in shards]) ** 2",
            wrong="get_total_norm([shard.grad for shard in shards])",
            inside="clip",
            refused_by="grad_norm",
            why="Norms are added up where their squares should be.",
        ),
        "summed": stage1(
            right="            flat.gradient /= self.data_size\n",
            wrong="",
            inside="finish_gradients",
            refused_by="grad_norm",
            why="A reduce-scatter sums. Gradients are N times too large, which AdamW's curve does not show.",
        ),
        "never_gathered": stage1(
            right="            flat.gather()",
            wrong="            pass",
            inside="finish_parameters",
            refused_by="loss",
            why="Every rank steps its own shard, and goes on with the other ranks' shards as they were at the start.",
        ),
        "built_before_sharding": stage1(
            right="make_optimizer([flat.shard for flat in self.flats])",
            wrong="make_optimizer([flat.shard.detach().clone() for flat in self.flats])",
            inside="__init__",
            refused_by="loss",
            why="The optimizer holds tensors from before the parameters were cut: it steps what nobody uses, without "
            "a word, because without a gradient there is nothing to step.",
        ),
        "only_own_state": stage1(
            right="                    flat.gather(vector, value)\n",
            wrong="                    vector.zero_()\n                    flat.own(vector).copy_(value)\n",
            inside="full_state",
            refused_by="optimizer",
            why="Each rank saves the optimizer state of its own shard, and rank 0's file has zeros for the rest. "
            "Training is right, until somebody resumes it.",
        ),
        "wrong_shard": stage1(
            right="return vector.chunk(self.ranks.size)[self.ranks.rank]",
            wrong="return vector.chunk(self.ranks.size)[0]",
            inside="own",
            refused_by="loss",
            why="All ranks take the first shard for their own, as if their rank were 0: the others are never stepped.",
        ),
        "own_weights": stage1(
            right="        start_alike(model)\n",
            wrong="",
            inside="__init__",
            refused_by="loss",
            why="Ranks seeded differently cut different models into shards, and gather a model of pieces of several.",
        ),
        "impatient": stage1(
            right="            self.after_backward()\n",
            wrong="            self.finish_gradients()\n"
            "            self.optimizer.step()\n"
            "            self.finish_parameters()\n",
            inside="step",
            refused_by="loss",
            why="The optimizer steps after every micro-batch, not after the last.",
        ),
        "local_loss": stage1(
            right="        total = dist.all_reduce(loss, async_op=True)\n",
            wrong="        total = dist.all_reduce(loss.clone(), async_op=True)\n",
            inside="step",
            refused_by="loss",
            why="A copy is reduced, and thrown away: every rank reports its own slice's loss, divided by the number of "
            "ranks. Training is right; the curve is not.",
        ),
        "last_micro_batch": stage2(
            right="part if flat.shard.grad is None else flat.shard.grad + part",
            wrong="part",
            inside="take_in",
            refused_by="grad_norm",
            why="A micro-batch's shard of the gradient takes the place of those before it.",
        ),
        "divided_twice": stage2(
            right="1 / self.data_size",
            wrong="1 / self.data_size**2",
            inside="ready",
            refused_by="grad_norm",
            why="Gradients are divided by the number of ranks twice: AdamW's curve looks fine.",
        ),
        "stale": stage3(
            right="        for unit in self.units:\n            unit.free()\n        super().after_backward()",
            wrong="        super().after_backward()",
            inside="after_backward",
            refused_by="loss",
            why="What is still gathered when the backward pass ends is never freed: the next step computes with the "
            "parameters of this one.",
        ),
        "prefetched_too_early": stage3(
            right="            unit.free()\n        super().after_backward()\n",
            wrong="            unit.free()\n        super().after_backward()\n        self.gather(0, 0)\n",
            inside="after_backward",
            refused_by="loss",
            why="The next step's first unit is gathered as soon as the backward pass is over, which is before the "
            "optimizer has stepped.",
        ),
    },
)

if __name__ == "__main__":
    BUGS.command_line()
