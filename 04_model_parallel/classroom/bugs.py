"""Model parallelism with one mistake each, of the kind people really make. Can you find it?

    python classroom/bugs.py                 the names
    python classroom/bugs.py NAME            the code with the mistake in it: a file of this chapter, but for one place
    python classroom/bugs.py NAME --answer   the place, and the check that refuses it

Every one is refused by the comparison with training on one process (common/lab/equality.py), which sees a number that
is off, ranks that no longer hold the same, or ranks that wait for each other in vain.
"""

from functools import partial

from common.lab.bugs import Bug, Bugs

layers = partial(Bug, "SplitLayers", file="by_hand_layers.py", ranks=2)
tensor = partial(Bug, "TensorParallelByHand", file="by_hand_tensor.py", ranks=2)
sequence = partial(Bug, "SequenceParallelByHand", file="by_hand_tensor.py", ranks=2)
context = partial(Bug, "ContextParallel", file="by_hand_ring_attention.py")
experts = partial(Bug, "ExpertParallel", file="by_hand_experts.py", ranks=2)

BUGS = Bugs(
    __file__,
    {
        "tied_apart": layers(
            right="dist.all_reduce(self.tied.grad, group=self.embedding_group)",
            wrong="pass",
            inside="add_tied_gradients",
            refused_by="grad_norm",
            why="Embedding and output layer are one weight in the model and two on the ranks. Each is updated by the "
            "gradient of its own place; from the first step on they are two different weights.",
        ),
        "tied_counted_twice": layers(
            right="self.tied if self.last else None",
            wrong="None",
            inside="grad_norm",
            refused_by="grad_norm",
            why="The tied weight is on two ranks, and its gradient is in the norm twice: clipping begins too early. "
            "While nothing is clipped, the training is right and only the number in the log is wrong.",
        ),
        "own_norm": layers(
            right="global_norm([(own, [self.group])], self.device)",
            wrong="global_norm([(own, [])], self.device)",
            inside="grad_norm",
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
            right="dist.send(gradient.contiguous(), group=ctx.group, group_dst=ctx.source)",
            wrong="dist.recv(gradient.contiguous(), group=ctx.group, group_src=ctx.source)",
            inside="backward",
            refused_by="timeout",
            why="Both sides of the boundary receive: a gradient is waited for where one should be sent.",
        ),
        "own_weights": layers(
            right="broadcast_module(model, self.group, own=own)",
            wrong="pass",
            inside="__init__",
            refused_by="loss",
            why="Each rank keeps the layers of a model that it made with its own seed. It trains, but it is a model "
            "that no single process has made: no run can be repeated on another number of ranks.",
        ),
        "loss_on_the_last": layers(
            right="dist.broadcast(loss, group=self.group, group_src=self.size - 1)",
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
        "without_f": tensor(
            right="Conjugate.apply(x, group, same, all_reduce)",
            wrong="x",
            inside="f",
            refused_by="grad_norm",
            why="The forward pass is right, and so is the first loss. On the way back each rank knows only what its "
            "own outputs had to do with the input: all that lies below gets a part of its gradient, each rank another.",
        ),
        "without_g": tensor(
            right="Conjugate.apply(x, group, all_reduce, same)",
            wrong="x",
            inside="g",
            refused_by="loss",
            why="Each rank goes on with its part of every sum.",
        ),
        "g_both_ways": tensor(
            right="Conjugate.apply(x, group, all_reduce, same)",
            wrong="Conjugate.apply(x, group, all_reduce, all_reduce)",
            inside="g",
            refused_by="grad_norm",
            why="The backward pass of g sums gradients that every rank has whole already: what lies below is N times "
            "too large at each g, N * N times two layers down. The loss looks fine, and AdamW hides it.",
        ),
        "bias_on_every_rank": tensor(
            right="self.leave(F.linear(x, self.weight)) + self.bias",
            wrong="self.leave(F.linear(x, self.weight, self.bias))",
            inside="RowParallel",
            refused_by="loss",
            why="Every rank adds the bias to its part of the sum, and the sum has it N times. Biases begin at zero, so "
            "the first loss is right.",
        ),
        "whole_heads": tensor(
            right="        block.attention.heads //= axis.size\n",
            wrong="",
            inside="apply_tensor_parallel",
            refused_by="loss",
            why="The rank's columns are cut into as many heads as the whole model has, each N times too narrow: a head "
            "of the model becomes N heads, and all shapes fit.",
        ),
        "own_largest": tensor(
            right="        dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)\n",
            wrong="",
            inside="VocabularyParallelCrossEntropy",
            refused_by="loss",
            why="Each rank subtracts the largest of its own logits before exp(), and sums of exponentials that were "
            "scaled differently are added up.",
        ),
        "words_of_others": tensor(
            right=" * mine[..., None]",
            wrong="",
            inside="VocabularyParallelEmbedding",
            refused_by="loss",
            why="For a word that it does not have, a rank adds its own first word instead of zeros.",
        ),
        "norm_of_own_part": tensor(
            right="(parts, [self.group])",
            wrong="(parts, [])",
            inside="grad_norm",
            refused_by="grad_norm",
            why="Each rank clips by the norm of what it holds: ranks scale their parts of one gradient differently, "
            "and what is whole drifts apart. While nothing is clipped, only the number in the log is wrong.",
        ),
        "whole_counted_again": tensor(
            right="[(parts, [self.group]), (whole, [])]",
            wrong="[(parts + whole, [self.group])]",
            inside="grad_norm",
            refused_by="grad_norm",
            why="Norms, biases and positions, which every rank has whole, are in the norm N times. They are a small "
            "part of it, so the number looks right, and clipping begins a little too early.",
        ),
        "own_columns_of_own_weights": tensor(
            right="self.sequence, self.group)",
            wrong="self.sequence)",
            inside="__init__",
            refused_by="loss",
            why="Ranks seeded differently cut their parts out of different models.",
        ),
        "joined_along_rows": tensor(
            right="{parameter: (dim, axis)}",
            wrong="{parameter: (0, axis)}",
            inside="cut_weight",
            refused_by="parameters",
            why="Training is right, and the strategy says of all its parts that they were cut along dimension 0: the "
            "checkpoint has the layers that were cut by inputs in the wrong shape.",
        ),
        "norms_not_reduced": sequence(
            right="all_reduce_together([parameter.grad for parameter in partial], self.group)",
            wrong="pass",
            inside="step",
            refused_by="grad_norm",
            why="Each rank's norms and biases have seen its part of the sequence only. Each rank updates them by that, "
            "and the copies of one LayerNorm drift apart. The loss falls all the same.",
        ),
        "everybody_begins_at_0": sequence(
            right="own(x, 0, axis)",
            wrong="x.chunk(axis.size)[0]",
            inside="apply_tensor_parallel",
            refused_by="loss",
            why="Every rank counts the positions of its part of the sequence from zero.",
        ),
        "mask_off_by_a_block": context(
            right="key_chunk <= query_chunk",
            wrong="key_chunk <= query_chunk + 1",
            inside="pairs",
            refused_by="loss",
            why="Each token sees the chunk after its own, and learns to copy: the loss falls too well, and the model "
            "is of no use where there is no future to look at.",
        ),
        "mask_by_place": context(
            right="key_chunk <= query_chunk",
            wrong="j <= i",
            inside="pairs",
            ranks=2,
            refused_by="loss",
            why="The mask compares places on the ranks, not in the sequence. On one rank they are the same.",
        ),
        "masked_every_turn": context(
            right="causal and key_chunk == query_chunk",
            wrong="causal and i == j",
            inside="pairs",
            ranks=2,
            refused_by="loss",
            why="The triangle that belongs on the diagonal is laid over blocks of earlier chunks too, of which all is "
            "to be seen: is_causal=True in every turn does that.",
        ),
        "not_rescaled": context(
            right="out * (lse - new).exp()",
            wrong="out",
            inside="merge",
            refused_by="loss",
            why="A block is added without rescaling the sum so far to the new normaliser: the weights of a query no "
            "longer add up to 1.",
        ),
        "wrong_way_round": context(
            right="source = (rank - turn) % size",
            wrong="source = (rank + turn) % size",
            inside="forward",
            refused_by="loss",
            why="Keys come from the rank before, so in turn t they are those of rank r - t; here the mask takes them "
            "for those of rank r + t. With two ranks there is no difference.",
        ),
        "softmax_of_a_block": context(
            right="(scores(q, k, diagonal) - lse).exp()",
            wrong="scores(q, k, diagonal).softmax(-1)",
            inside="attend_backward",
            refused_by="grad_norm",
            why="The backward pass normalises each block by itself, not over all keys. The forward pass is right, so "
            "the loss of the first step is.",
        ),
        "gradients_stay": context(
            right="travelling = pass_on(grad_kv + travelling() if travelling else grad_kv, group)",
            wrong="at_home += grad_kv",
            inside="backward",
            refused_by="grad_norm",
            why="The gradients of visiting keys and values are added to those of the rank that computed them, at the "
            "wrong tokens. All shapes fit, and the loss of the first step is right.",
        ),
        "positions_from_zero": context(
            right="positions(axis.rank, axis.size, len(args[0]) * axis.size, order, args[0].device)",
            wrong="torch.arange(len(args[0]))",
            inside="apply_context_parallel",
            refused_by="loss",
            why="Each rank counts its tokens from 0: attention is right, and every token gets a position at the "
            "beginning of the sequence.",
        ),
        "targets_in_plain_order": context(
            right="(local_tokens(tokens, self.axis, self.order) for tokens in (inputs, targets))",
            wrong="local_tokens(inputs, self.axis, self.order), local_tokens(targets, self.axis, contiguous)",
            inside="step",
            refused_by="loss",
            why="Inputs lie in zig-zag order and targets in the plain one: the model learns to guess other tokens than "
            "the next.",
        ),
        "own_gradients": context(
            right="all_reduce_together([p.grad for p in self.model.parameters() if p.requires_grad], self.axis.group)",
            wrong="pass",
            inside="sum_gradients",
            refused_by="grad_norm",
            why="All ranks read the same batch, so who thinks of summing? Each has the gradient of its own tokens' "
            "loss alone, and the copies of the model drift apart.",
        ),
        "mean_on_each_rank": context(
            right="/ (len(micro_batches) * self.axis.size)",
            wrong="/ len(micro_batches)",
            inside="step",
            refused_by="loss",
            why="Each rank takes the mean over its own tokens, and the means are summed: N times too large. AdamW's "
            "steps would hardly change.",
        ),
        "own_loss": context(
            right="dist.all_reduce(loss, group=self.axis.group)",
            wrong="loss *= self.axis.size",
            inside="step",
            refused_by="loss",
            why="The log shows the mean over rank 0's tokens, the first and the last of each sequence, as if it were "
            "that of all.",
        ),
        "experts_averaged": experts(
            right="all_reduce_together(others, self.readers.group)",
            wrong="all_reduce_together(experts + others, self.readers.group)",
            inside="average_gradients",
            refused_by="grad_norm",
            why="All gradients are averaged over the ranks, as under data parallelism. But expert 0 of one rank is not "
            "expert 0 of another: gradients of different weights are mixed.",
        ),
        "experts_not_scaled": experts(
            right="(*experts, *others)",
            wrong="others",
            inside="average_gradients",
            refused_by="grad_norm",
            why="An expert's gradient has the tokens of all ranks in it already, so it is left as it is. But each rank "
            "took the mean over its own slice: the experts learn N times too fast. AdamW hides it.",
        ),
        "no_gates": experts(
            right="gates.flatten()[order, None] * rows",
            wrong="rows",
            inside="forward",
            refused_by="loss",
            why="The experts' results are added without their gates: all chosen experts count alike, and the router "
            "learns from the balancing loss alone.",
        ),
        "router_cut": experts(
            right="gates.flatten()[order, None] * rows",
            wrong="gates.flatten()[order, None].detach() * rows",
            inside="forward",
            refused_by="grad_norm",
            why="The gates are cut off from autograd. The loss of a step is right; but the router never hears which "
            "choice was good.",
        ),
        "not_renormalised": experts(
            right="gates = gates / gates.sum(dim=-1, keepdim=True)",
            wrong="pass",
            inside="route",
            refused_by="loss",
            why="The gates of the chosen experts do not add up to 1, as they would if the softmax were taken over the "
            "chosen ones only: what a layer adds is scaled down by the share of the experts not asked.",
        ),
        "left_in_disorder": experts(
            right="rows[together.argsort()]",
            wrong="rows",
            inside="forward",
            refused_by="loss",
            why="Results are sent back in the order of the experts, not in that in which the tokens came: tokens get "
            "each other's results. On one rank both orders are the same.",
        ),
        "passed_on_twice": experts(
            right="torch.zeros_like(x).flatten(0, 1)",
            wrong="x.flatten(0, 1) * ~kept.any(dim=1, keepdim=True)",
            inside="forward",
            refused_by="loss",
            why="A token without a place is passed on unchanged, but that is what the residual connection around the "
            "layer does: here it is added once more.",
        ),
        "last_come_first_served": experts(
            right="choices.cumsum(dim=1)",
            wrong="choices.flip(1).cumsum(dim=1).flip(1)",
            inside="route",
            refused_by="loss",
            why="Places go to the last tokens. So whether a token is dropped depends on the tokens after it, which a "
            "model that predicts them must not see.",
        ),
        "balanced_by_slice": experts(
            right="(shares * probabilities.mean(dim=1))",
            wrong="(shares.mean(dim=0) * probabilities.mean(dim=(0, 1)))",
            inside="route",
            refused_by="grad_norm",
            why="The balancing loss is computed over a rank's whole slice. It is a product of two means, so the mean "
            "over the slices is not that of the batch: it changes with the number of ranks and of micro-batches.",
        ),
        "unbalanced": experts(
            right="self.scaler.scale(part + auxiliary)",
            wrong="self.scaler.scale(part)",
            inside="step",
            refused_by="grad_norm",
            why="The balancing loss is computed and not minimised: a few experts get most of the tokens, and the ranks "
            "that hold them most of the work.",
        ),
        "norm_of_own_experts": experts(
            right="(experts, [self.group])",
            wrong="(experts, [])",
            inside="grad_norm",
            refused_by="grad_norm",
            why="Each rank clips by a norm that knows its own experts only: replicated weights are scaled differently "
            "on each rank, and drift apart.",
        ),
    },
)

if __name__ == "__main__":
    BUGS.command_line()
