"""Model parallelism with one mistake each, of the kind people really make. Can you find it?

    python bugs.py                 the names
    python bugs.py NAME            the code with the mistake in it: a file of this chapter, but for one place
    python bugs.py NAME --answer   the place, and the check that refuses it

Every one is refused by the comparison with training on one process (common/equality.py), which sees a number that is
off, ranks that no longer hold the same, or ranks that wait for each other in vain.
"""

from functools import partial

from common.bugs import Bug, Bugs

layers = partial(Bug, "SplitLayers", file="by_hand_layers.py", ranks=2)

BUGS = Bugs(
    __file__,
    {
        "tied_apart": layers(
            right="dist.all_reduce(self.tied.grad, group=self.ends_group)",
            wrong="pass",
            inside="add_tied_gradients",
            refused_by="grad_norm",
            why="Embedding and output layer are one weight in the model and two on the ranks. Each is updated by the "
            "gradient of its own place; from the first step on they are two different weights.",
        ),
        "tied_counted_twice": layers(
            right="self.tied if self.last else None",
            wrong="None",
            inside="clip",
            refused_by="grad_norm",
            why="The tied weight is on two ranks, and its gradient is in the norm twice: clipping begins too early. "
            "While nothing is clipped, the training is right and only the number in the log is wrong.",
        ),
        "own_norm": layers(
            right="        dist.all_reduce(square)\n",
            wrong="",
            inside="clip",
            refused_by="grad_norm",
            why="Each rank clips by the norm of its own layers: the parts of one gradient are scaled by different "
            "factors, so it points elsewhere.",
        ),
        "ones_for_a_gradient": layers(
            right="return gradient, None, None",
            wrong="return torch.ones_like(gradient), None, None",
            inside="backward",
            refused_by="grad_norm",
            why="Ones make backward() run where there is no loss, and the gradient that came over the boundary is "
            "forgotten. Layers before the cut learn nonsense, those behind it learn to live with that: the loss falls.",
        ),
        "no_anchor": layers(
            right="requires_grad=True",
            wrong="requires_grad=False",
            inside="__init__",
            refused_by="timeout",
            why="What was received has no history, so autograd never calls Receive.backward, and nobody sends the "
            "gradient for which the rank before waits.",
        ),
        "both_receive": layers(
            right="dist.send(gradient.contiguous(), ctx.source)",
            wrong="dist.recv(gradient.contiguous(), ctx.source)",
            inside="backward",
            refused_by="timeout",
            why="Both sides of the boundary receive: a gradient is waited for where one should be sent.",
        ),
        "own_weights": layers(
            right="dist.broadcast(tensor.detach(), src=0)",
            wrong="pass",
            inside="__init__",
            refused_by="loss",
            why="Each rank keeps the layers of a model that it made with its own seed. It trains, but it is a model "
            "that no single process has made: no run can be repeated on another number of ranks.",
        ),
        "loss_on_the_last": layers(
            right="dist.broadcast(loss, src=self.ranks.size - 1)",
            wrong="pass",
            inside="step",
            refused_by="loss",
            why="Only the last rank has the loss, and rank 0 writes the log: the curve is a straight line at zero.",
        ),
        "not_divided": layers(
            right="self.forward(inputs, targets) / len(micro_batches)",
            wrong="self.forward(inputs, targets)",
            inside="step",
            refused_by="loss",
            why="The loss is not divided by the number of micro-batches: with accumulation M, gradients are M times "
            "too large.",
        ),
    },
)

if __name__ == "__main__":
    BUGS.command_line()
