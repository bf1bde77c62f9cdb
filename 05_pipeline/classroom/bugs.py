"""Pipelines with one mistake each, of the kind people really make. Can you find it?

    python classroom/bugs.py                 the names
    python classroom/bugs.py NAME            by_hand.py or executor.py with the mistake in it, in one place
    python classroom/bugs.py NAME --answer   the place, and the check that refuses it

Every one is refused by the comparison with training on one process (common/lab/equality.py), which sees a number that
is off, or ranks that wait for each other in vain. DROPOUT_BUGS show only in models that draw random numbers, which no
two ways to split a batch draw alike: they are refused by the comparison of recomputation with none.
"""

from functools import partial

from common.lab.bugs import Bug, Bugs
from course.pipeline.by_hand import PipelineByHand

pipeline = partial(Bug, "PipelineByHand", ranks=2)
replicas = partial(Bug, "PipelineDDPByHand")
executor = partial(Bug, "Executor", file="executor.py", ranks=2)


class PipelineBugs(Bugs):
    """A broken executor is planted as a pipeline that is right but for its executor."""

    def plant(self, name):
        planted = super().plant(name)
        if self[name].target == "Executor":
            return type("PipelineByHand", (PipelineByHand,), {"executor_class": planted})
        return planted


DROPOUT_BUGS = PipelineBugs(
    __file__,
    {
        "other_elements_dropped": executor(
            right="with with_random_state(state, self.device):",
            wrong="if True:",
            inside="recall",
            refused_by="dropout",
            why="What is computed again draws its own random numbers: the backward pass goes through another network "
            "than the forward pass did. Without dropout nobody sees it.",
        ),
        "drawn_twice": executor(
            right="        set_random_state(before, device)\n",
            wrong="        pass\n",
            inside="with_random_state",
            refused_by="dropout",
            why="After what was computed again, the random numbers go on from there: the next forward passes draw what "
            "has been drawn before.",
        ),
    },
)

BUGS = PipelineBugs(
    __file__,
    {
        "m_times_too_large": pipeline(
            right="/ (self.microbatches * batches)",
            wrong="/ batches",
            inside="run",
            refused_by="loss",
            why="The losses of the micro-batches are added up where their mean is wanted: gradients are M times too "
            "large. AdamW hardly notices, so the curve of a run that prints its loss rightly looks well.",
        ),
        "averaged_twice": pipeline(
            right="/ self.scaler.get_scale()",
            wrong="/ self.microbatches",
            inside="run",
            refused_by="loss",
            why="The loss that is reported has been divided by the number of micro-batches already. The training is "
            "right, its curve is not.",
        ),
        "divided_twice": pipeline(
            right="self.stages.add_tied_gradients()",
            wrong="[gradient.div_(self.microbatches) for gradient in self.stages.gradients()]\n"
            "        self.stages.add_tied_gradients()",
            inside="step",
            refused_by="grad_norm",
            why="Gradients are scaled by the number of micro-batches, as PyTorch's schedules do by default "
            "(scale_grads=True), though the loss was divided by it: gradients are M times too small.",
        ),
        "last_one_dropped": pipeline(
            right="self.options.build(self.pipeline.size)",
            wrong="type(self.options)(microbatches=self.options.microbatches - 1).build(self.pipeline.size)",
            inside="__init__",
            refused_by="loss",
            why="The schedule ends one micro-batch early, on all ranks alike: nobody waits, and a part of each batch "
            "is never learned from.",
        ),
        "stepped_early": pipeline(
            right="loss += self.run(inputs, targets, len(micro_batches) * self.replicas.size)",
            wrong="loss += self.run(inputs, targets, len(micro_batches) * self.replicas.size)\n"
            "            self.optimizer.step()",
            inside="step",
            refused_by="loss",
            why="The weights are stepped before all of the step's backwards are done: later micro-batches see weights "
            "that the earlier ones have changed.",
        ),
        "forgets_what_was_added": pipeline(
            right="loss += self.run(inputs, targets, len(micro_batches) * self.replicas.size)",
            wrong="self.optimizer.zero_grad()\n"
            "            loss += self.run(inputs, targets, len(micro_batches) * self.replicas.size)",
            inside="step",
            refused_by="grad_norm",
            why="With accumulation, each pass through the pipeline deletes the gradients of the pass before.",
        ),
        "receives_first": executor(
            right="for stage, kind, m in actions:\n",
            wrong="for stage, kind, m in sorted(actions, key=lambda action: action.kind.startswith('SEND')):\n"
            "            [work.wait() for work, _ in self.inbox.values() if work is not None]\n",
            inside="exchange",
            refused_by="timeout",
            why="One message after the other, receives first: rank 0 waits for a gradient before it sends the "
            "activations for which rank 1 waits before it sends that gradient.",
        ),
        "freed_too_early": executor(
            right="torch.empty(shape, dtype=dtype, device=self.device)",
            wrong="self.__dict__.setdefault(kind, torch.empty(shape, device=self.device)).detach()",
            inside="exchange",
            ranks=4,
            refused_by="grad_norm",
            why="What is received always comes into the same memory. The activations in there are still needed by a "
            "backward to come, which computes with those of a later micro-batch.",
        ),
        "another_ones_targets": pipeline(
            right="targets[m]",
            wrong="targets[m - 1]",
            inside="run",
            refused_by="loss",
            why="The last stage compares with the targets of another micro-batch. It learns how often each token "
            "comes, and the loss falls, to begin with.",
        ),
        "tied_apart": pipeline(
            right="        self.stages.add_tied_gradients()\n",
            wrong="",
            inside="step",
            refused_by="grad_norm",
            why="Embedding and output layer are one weight in the model and two on the ranks. Each is updated by the "
            "gradient of its own place; from the first step on they are two different weights.",
        ),
        "tied_counted_twice": pipeline(
            right="self.stages.gradients_for_norm()",
            wrong="self.stages.gradients()",
            inside="step",
            refused_by="grad_norm",
            why="The tied weight is on two ranks, and its gradient is in the norm twice: clipping begins too early.",
        ),
        "own_norm": pipeline(
            right="[self.pipeline.group]",
            wrong="[]",
            inside="step",
            refused_by="grad_norm",
            why="Each rank clips by the norm of its own stages: the parts of one gradient are scaled by different "
            "factors, so it points elsewhere.",
        ),
        "loss_on_the_last": pipeline(
            right="dist.broadcast(loss, group=self.pipeline.group, group_src=self.stages.rank_of[-1])",
            wrong="pass",
            inside="step",
            refused_by="loss",
            why="Only the rank of the last stage has the loss, and rank 0 writes the log: a straight line at zero.",
        ),
        "own_weights": pipeline(
            right=", everyone=everyone)",
            wrong=")",
            inside="__init__",
            refused_by="loss",
            why="Each rank keeps the stages of a model that it made with its own seed: no single process has made that "
            "model, and no run can be repeated on another number of ranks.",
        ),
        "reduced_every_time": replicas(
            right="loss += self.run(inputs, targets, len(micro_batches) * self.replicas.size)\n",
            wrong="loss += self.run(inputs, targets, len(micro_batches) * self.replicas.size)\n"
            "            all_reduce_together(self.stages.gradients(), self.replicas.group)\n",
            inside="step",
            refused_by="grad_norm",
            why="The replicas' gradients are summed after every part of a batch, and once more at the end of the step: "
            "what had been summed is summed again. Besides, most of the traffic is for nothing.",
        ),
        "replicas_apart": replicas(
            right="[loss, *self.stages.gradients()]",
            wrong="[loss]",
            inside="step",
            refused_by="grad_norm",
            why="Nobody sums gradients over the replicas: each trains a model of its own, on its own part of the data.",
        ),
        "summed_twice": replicas(
            right="len(micro_batches) * self.replicas.size)",
            wrong="len(micro_batches))",
            inside="step",
            refused_by="loss",
            why="The gradients of the replicas are summed where their mean is wanted.",
        ),
        "tied_weight_summed_first": replicas(
            right="        all_reduce_together([loss, *self.stages.gradients()], self.replicas.group)\n"
            "        self.stages.add_tied_gradients()\n",
            wrong="        self.stages.add_tied_gradients()\n"
            "        all_reduce_together([loss, *self.stages.gradients()], self.replicas.group)\n"
            "        self.stages.add_tied_gradients()\n",
            inside="step",
            refused_by="grad_norm",
            why="The copies of the tied weight are added up, then summed over the replicas, and added up again: its "
            "gradient is twice too large.",
        ),
    },
)

if __name__ == "__main__":
    PipelineBugs(__file__, {**BUGS, **DROPOUT_BUGS}).command_line()
