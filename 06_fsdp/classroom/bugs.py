"""Sharded training with one mistake each, of the kind people really make. Can you find it?

    python classroom/bugs.py                 the names
    python classroom/bugs.py NAME            by_hand_zero1.py or by_hand_zero23.py with the mistake in it, in one place
    python classroom/bugs.py NAME --answer   the place, and the check that refuses it

Every one is refused by the comparison with training on one process (common/lab/equality.py), some already by an error.
"""

from functools import partial

from common.lab.bugs import Bug, Bugs

stage1 = partial(Bug, "Zero1ByHand", ranks=2, file="by_hand_zero1.py")
stage2 = partial(Bug, "Zero2ByHand", ranks=2, file="by_hand_zero23.py")
hybrid = partial(Bug, "HSDPByHand", ranks=4, file="by_hand_zero23.py")
stage3 = partial(Bug, "FSDPByHand", ranks=2, file="by_hand_zero23.py")

BUGS = Bugs(
    __file__,
    {
        "local_norm": stage1(
            right="global_norm([([shard.grad for shard in shards], [self.axis.group])], self.device)",
            wrong="global_norm([([shard.grad for shard in shards], [])], self.device)",
            inside="step",
            refused_by="grad_norm",
            why="Each rank clips by the norm of its own shard: each by another factor, and all by one that is too near "
            "to 1.",
        ),
        "sum_of_norms": stage1(
            right="grad_norm = global_norm([([shard.grad for shard in shards], [self.axis.group])], self.device)\n",
            wrong="grad_norm = torch.nn.utils.get_total_norm([shard.grad for shard in shards])\n"
            "        dist.all_reduce(grad_norm, group=self.axis.group)\n",
            inside="step",
            refused_by="grad_norm",
            why="Norms are added up where their squares should be.",
        ),
        "summed": stage1(
            right="            flat.gradient /= self.data_size\n",
            wrong="",
            inside="step",
            refused_by="grad_norm",
            why="A reduce-scatter sums. Gradients are N times too large, which AdamW's curve does not show.",
        ),
        "never_gathered": stage1(
            right="    for work in [flat.gather() for flat in flats]:\n        work.wait()\n",
            wrong="",
            inside="gather_updated",
            refused_by="loss",
            why="Every rank steps its own shard, and goes on with the other ranks' shards as they were at the start.",
        ),
        "built_before_sharding": stage1(
            right="make_optimizer([flat.shard for flat in self.trained])",
            wrong="make_optimizer([flat.shard.detach().clone() for flat in self.trained])",
            inside="__init__",
            refused_by="loss",
            why="The optimizer holds tensors from before the parameters were cut: it steps what nobody uses, without "
            "a word, because without a gradient there is nothing to step.",
        ),
        "only_own_shard": stage1(
            right="        return parts_of(self.model, self.flats)\n",
            wrong="        return super().parts()\n",
            inside="parts",
            refused_by="optimizer",
            why="The state is taken from the parameters, which are whole, and the moments that a rank keeps of its "
            "shard are in no checkpoint. Training is right, until somebody resumes it.",
        ),
        "padding_in_the_norm": stage1(
            right="torch.zeros(len(self.vector), device=self.vector.device)",
            wrong="torch.ones(len(self.vector), device=self.vector.device)",
            inside="allocate_gradient",
            refused_by="grad_norm",
            ranks=3,
            why="What stands in the padding when the buffer is made counts in the norm. On 2 or 4 ranks nothing is "
            "padded here: sizes that divide hide it.",
        ),
        "wrong_shard": stage1(
            right="return vector.chunk(self.axis.size)[self.axis.rank]",
            wrong="return vector.chunk(self.axis.size)[0]",
            inside="own",
            refused_by="loss",
            why="All ranks take the first shard for their own, as if their rank were 0: the others are never stepped.",
        ),
        "own_weights": stage1(
            right="broadcast_together([vector], start)",
            wrong="pass",
            inside="__init__",
            refused_by="loss",
            why="Ranks seeded differently cut different models into shards, and gather a model of pieces of several.",
        ),
        "impatient": stage2(
            right="            self.reducer.finish()\n",
            wrong="            self.reducer.finish()\n"
            "            self.optimizer.step()\n"
            "            gather_updated(self.trained)\n",
            inside="Zero2ByHand",
            refused_by="loss",
            why="The optimizer steps after every micro-batch, not after the last.",
        ),
        "local_loss": stage1(
            right="dist.all_reduce(loss, group=self.axis.group, async_op=True)",
            wrong="dist.all_reduce(loss.clone(), group=self.axis.group, async_op=True)",
            inside="step",
            refused_by="loss",
            why="A copy is reduced, and thrown away: every rank reports its own slice's loss, divided by the number of "
            "ranks. Training is right; the curve is not.",
        ),
        "last_micro_batch": stage2(
            right="part if flat.shard.grad is None else flat.shard.grad + part",
            wrong="part",
            inside="finish_reduce",
            refused_by="grad_norm",
            why="A micro-batch's shard of the gradient takes the place of those before it.",
        ),
        "neighbours_shard": stage2(
            right="(part, flat.gradient, group",
            wrong="(part, flat.gradient.roll(len(part)), group",
            inside="reduce",
            refused_by="loss",
            why="The gradient is cut in another order than the parameters: a rank steps its shard with its neighbour's "
            "gradient. The norm is right.",
        ),
        "divided_twice": stage2(
            right="1 / data_size",
            wrong="1 / data_size**2",
            inside="__init__",
            refused_by="grad_norm",
            why="Gradients are divided by the number of ranks twice: AdamW's curve looks fine.",
        ),
        "stale": stage3(
            right="            self.hooks.free()\n",
            wrong="",
            inside="FSDPByHand",
            refused_by="loss",
            why="What is still gathered when the backward pass ends is never freed: the next step computes with the "
            "parameters of this one.",
        ),
        "freed_too_early": stage3(
            right="        self.gather(place, place - 1)\n",
            wrong="",
            inside="before_backward",
            refused_by="error: out of bounds for storage of size 0",
            why="After the forward pass the parameters are gone, and nobody gathers them for the backward pass.",
        ),
        "forgotten_tie": stage3(
            right="own = dict.fromkeys(part.parameters())",
            wrong="own = dict.fromkeys(p for p in part.parameters() if not any(p in group for group in groups))",
            inside="units_of",
            refused_by="error: out of bounds for storage of size 0",
            why="A weight that two modules share goes to the first one's unit, and is not gathered for the second.",
        ),
        "prefetched_too_early": stage3(
            right="            self.hooks.free()\n",
            wrong="            self.hooks.free()\n            self.hooks.gather(0, 0)\n",
            inside="FSDPByHand",
            refused_by="loss",
            why="The next step's first unit is gathered as soon as the backward pass is over, which is before the "
            "optimizer has stepped.",
        ),
        "replicas_apart": hybrid(
            right="            all_reduce_together([shard.grad for shard in shards], self.replicas.group)\n",
            wrong="            pass\n",
            inside="FSDPByHand",
            refused_by="grad_norm",
            why="Replicas do not average the gradients of their shards: each group of ranks trains a model of its own, "
            "on its own part of the data.",
        ),
        "norm_over_replicas": hybrid(
            right="[shard.grad for shard in shards], [self.axis.group]",
            wrong="[shard.grad for shard in shards], [self.readers.group]",
            inside="FSDPByHand",
            refused_by="grad_norm",
            why="Squares are summed over the replicas too, which all have the same gradient: the norm is too large by "
            "the root of their number.",
        ),
    },
)

if __name__ == "__main__":
    BUGS.command_line()
