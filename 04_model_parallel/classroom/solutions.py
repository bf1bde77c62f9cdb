"""Answers to the exercises of chapter 04, and after each the wrong answers that people really give.

The table WRONG at the end says for which reason the checker must refuse each wrong answer, and RIGHT which other
answers it must accept; the tests hold it to that. Nothing in the course imports this file except its test, so that
an instructor can leave it out.
"""

import math
from itertools import accumulate

import torch
import torch.distributed as dist

from course.model_parallel.faulty import faulty_attention, passed_on


def summed(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.clone()
    dist.all_reduce(tensor)
    return tensor


def gathered(tensor: torch.Tensor) -> list[torch.Tensor]:
    parts = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, tensor.contiguous())
    return parts


# --- balanced_cut ---------------------------------------------------------------------------------------------


def balanced_cut(costs, parts):
    """The smallest limit with which `parts` ranks are enough, filled from the left. A cut that leaves ranks over
    (the largest layer decides) is cut further where it can be: that makes no rank's cost larger."""
    for limit in sorted({sum(costs[a:b]) for a in range(len(costs)) for b in range(a + 1, len(costs) + 1)}):
        sizes = filled(costs, limit)
        if max(costs) <= limit and len(sizes) <= parts:
            while len(sizes) < parts:
                place = next(place for place, layers in enumerate(sizes) if layers > 1)
                sizes[place : place + 1] = [1, sizes[place] - 1]
            return sizes


def filled(costs, limit):
    sizes, load = [0], 0
    for cost in costs:
        if load + cost > limit and sizes[-1]:
            sizes.append(0)
            load = 0
        sizes[-1] += 1
        load += cost
    return sizes


def cut_into_equal_numbers(costs, parts):
    return [len(costs) // parts + (part < len(costs) % parts) for part in range(parts)]


def cut_when_the_share_is_reached(costs, parts):
    sizes, load = [0], 0
    for cost in costs:
        if load >= sum(costs) / parts and len(sizes) < parts:
            sizes.append(0)
            load = 0
        sizes[-1] += 1
        load += cost
    return sizes + [0] * (parts - len(sizes))


def cut_before_the_share_is_passed(costs, parts):
    sizes, load = [0], 0
    for cost in costs:
        if sizes[-1] and load + cost > sum(costs) / parts and len(sizes) < parts:
            sizes.append(0)
            load = 0
        sizes[-1] += 1
        load += cost
    return sizes + [0] * (parts - len(sizes))


def cut_with_empty_ranks(costs, parts):
    sizes = filled(costs, max(costs))
    return sizes + [0] * (parts - len(sizes)) if len(sizes) <= parts else balanced_cut(costs, parts)


def cut_into_costs(costs, parts):
    ends = [0, *accumulate(balanced_cut(costs, parts))]
    return [sum(costs[a:b]) for a, b in zip(ends, ends[1:], strict=False)]


# --- frozen_step ----------------------------------------------------------------------------------------------


def frozen_step(weight, inputs, targets, batch, frozen):
    rank, size = dist.get_rank(), dist.get_world_size()
    weight, x = weight.detach().clone().requires_grad_(rank >= frozen), inputs
    if rank > 0:
        x = torch.empty(batch, weight.shape[0], dtype=weight.dtype)
        dist.recv(x, rank - 1)
        x.requires_grad_(rank > frozen)  # else nobody before this rank needs a gradient
    outputs = torch.tanh(x @ weight)
    if rank < size - 1:
        dist.send(outputs.detach(), rank + 1)
        if rank < frozen:
            return None
        grad = torch.empty_like(outputs)
        dist.recv(grad, rank + 1)
        outputs.backward(grad)
    else:
        (outputs - targets).square().sum().backward()
    if rank > frozen:
        dist.send(x.grad, rank - 1)
    return weight.grad


def frozen_but_sent(weight, inputs, targets, batch, frozen):
    """The step in which nothing is frozen; gradients that nobody needs are thrown away where they arrive."""
    gradient = frozen_step(weight, inputs, targets, batch, 0)
    return None if dist.get_rank() < frozen else gradient


def frozen_rank_still_gets_a_gradient(weight, inputs, targets, batch, frozen):
    """One boundary too far: the first rank that trains sends a gradient to the last one that doesn't."""
    gradient = frozen_step(weight, inputs, targets, batch, max(frozen - 1, 0))
    return None if dist.get_rank() < frozen else gradient


def step_without_a_way_back(weight, inputs, targets, batch, frozen):
    """Autograd ends where the message came from: each rank makes up a loss of its own."""
    rank, size = dist.get_rank(), dist.get_world_size()
    weight, x = weight.detach().clone().requires_grad_(), inputs
    if rank > 0:
        x = torch.empty(batch, weight.shape[0], dtype=weight.dtype)
        dist.recv(x, rank - 1)
    outputs = torch.tanh(x @ weight)
    if rank < size - 1:
        dist.send(outputs.detach(), rank + 1)
    loss = outputs.square().sum() if targets is None else (outputs - targets).square().sum()
    return None if rank < frozen else torch.autograd.grad(loss, weight)[0]


def step_with_the_gradient_of_the_outputs(weight, inputs, targets, batch, frozen):
    """Sends on what came in, past its own layer: the chain rule with a link left out."""
    rank, size = dist.get_rank(), dist.get_world_size()
    weight, x = weight.detach().clone().requires_grad_(), inputs
    if rank > 0:
        x = torch.empty(batch, weight.shape[0], dtype=weight.dtype)
        dist.recv(x, rank - 1)
    outputs = torch.tanh(x @ weight)
    grad = torch.empty_like(outputs)
    if rank < size - 1:
        dist.send(outputs.detach(), rank + 1)
        if rank < frozen:
            return None
        dist.recv(grad, rank + 1)
    else:
        grad = 2 * (outputs - targets).detach()
    if rank > frozen:
        dist.send((grad @ weight.detach().T).contiguous(), rank - 1)
    return torch.autograd.grad(outputs, weight, grad)[0]


def step_with_a_mean(weight, inputs, targets, batch, frozen):
    gradient = frozen_step(weight, inputs, targets, batch, frozen)
    return None if gradient is None else gradient / batch


# --- tied_gradient --------------------------------------------------------------------------------------------


def tied_gradient(gradient):
    if gradient is None:
        return None
    rank, size = dist.get_rank(), dist.get_world_size()
    partner, other = size - 1 - rank, torch.empty_like(gradient)
    request = dist.isend(gradient, partner)
    dist.recv(other, partner)
    request.wait()
    return gradient + other


def tied_in_turns(gradient):
    """Right: one sends first, the other receives first."""
    if gradient is None:
        return None
    rank, size = dist.get_rank(), dist.get_world_size()
    partner, other = size - 1 - rank, torch.empty_like(gradient)
    for sends in (rank == 0, rank > 0):
        if sends:
            dist.send(gradient, partner)
        else:
            dist.recv(other, partner)
    return gradient + other


def tied_and_stepped_apart(gradient):
    return None if gradient is None else gradient.clone()


def tied_by_all_reduce(gradient):
    """Right on two ranks. On more, those between would have to take part, with zeros of a shape they do not know."""
    return summed(gradient)


def tied_on_the_first_only(gradient):
    if gradient is None:
        return None
    if dist.get_rank():
        dist.send(gradient, 0)
        return gradient.clone()
    other = torch.empty_like(gradient)
    dist.recv(other, dist.get_world_size() - 1)
    return gradient + other


def tied_by_average(gradient):
    total = tied_gradient(gradient)
    return None if total is None else total / 2


def tied_and_summed_in_place(gradient):
    total = tied_gradient(gradient)
    return None if total is None else gradient.copy_(total)


def tied_both_send_first(gradient):
    if gradient is None:
        return None
    partner, other = dist.get_world_size() - 1 - dist.get_rank(), torch.empty_like(gradient)
    dist.send(gradient, partner)
    dist.recv(other, partner)
    return gradient + other


# --- naive_utilisation ----------------------------------------------------------------------------------------


def naive_utilisation(forward, backward, message):
    step = sum(forward) + sum(backward) + 2 * (len(forward) - 1) * message
    return step, [(f + b) / step for f, b in zip(forward, backward, strict=True)]


def utilisation_as_if_all_at_once(forward, backward, message):
    step = max(forward) + max(backward) + 2 * (len(forward) - 1) * message
    return step, [(f + b) / step for f, b in zip(forward, backward, strict=True)]


def utilisation_with_one_way_of_messages(forward, backward, message):
    step = sum(forward) + sum(backward) + (len(forward) - 1) * message
    return step, [(f + b) / step for f, b in zip(forward, backward, strict=True)]


def utilisation_with_a_message_for_each_rank(forward, backward, message):
    step = sum(forward) + sum(backward) + 2 * len(forward) * message
    return step, [(f + b) / step for f, b in zip(forward, backward, strict=True)]


def utilisation_is_one_over_n(forward, backward, message):
    step = sum(forward) + sum(backward) + 2 * (len(forward) - 1) * message
    return step, [1 / len(forward)] * len(forward)


# --- parallel_mlp_backward ------------------------------------------------------------------------------------


def parallel_mlp_backward(x, up, down, grad_output):
    hidden = torch.relu(x @ up)
    grad_hidden = grad_output @ down.T * (hidden > 0)
    return summed(grad_hidden @ up.T), x.T @ grad_hidden, hidden.T @ grad_output


def backward_without_f(x, up, down, grad_output):
    leaves = [tensor.clone().requires_grad_() for tensor in (x, up, down)]
    (torch.relu(leaves[0] @ leaves[1]) @ leaves[2]).backward(grad_output)
    return tuple(leaf.grad for leaf in leaves)


def backward_with_an_all_reduce_in_g(x, up, down, grad_output):
    """g sums forward and must not sum backward: all ranks have the same gradient already."""
    return backward_without_f(x, up, down, summed(grad_output))


def backward_with_f_and_g_summing(x, up, down, grad_output):
    return parallel_mlp_backward(x, up, down, summed(grad_output))


def backward_with_an_average(x, up, down, grad_output):
    grad_x, grad_up, grad_down = parallel_mlp_backward(x, up, down, grad_output)
    return grad_x / dist.get_world_size(), grad_up, grad_down


def backward_that_sums_the_weights_too(x, up, down, grad_output):
    """The habit of data parallelism; but the parts on the ranks are of different parameters."""
    return tuple(summed(gradient) for gradient in backward_without_f(x, up, down, grad_output))


def backward_without_relu(x, up, down, grad_output):
    grad_hidden = grad_output @ down.T
    return summed(grad_hidden @ up.T), x.T @ grad_hidden, torch.relu(x @ up).T @ grad_output


def backward_with_relu_of_the_gradient(x, up, down, grad_output):
    grad_hidden = torch.relu(grad_output @ down.T)
    return summed(grad_hidden @ up.T), x.T @ grad_hidden, torch.relu(x @ up).T @ grad_output


def backward_with_the_forward_pass(x, up, down, grad_output):
    summed(torch.relu(x @ up) @ down)
    return parallel_mlp_backward(x, up, down, grad_output)


# --- parallel_embedding ---------------------------------------------------------------------------------------


def parallel_embedding(tokens, table):
    own = tokens - dist.get_rank() * len(table)
    here = (own >= 0) & (own < len(table))
    return summed(table[own.where(here, 0)] * here[..., None])


def embedding_without_a_mask(tokens, table):
    own = tokens - dist.get_rank() * len(table)
    return summed(table[own.clamp(0, len(table) - 1)])


def embedding_with_wrapped_rows(tokens, table):
    own = tokens - dist.get_rank() * len(table)
    return summed(table[own % len(table)])


def embedding_out_of_range(tokens, table):
    return summed(table[tokens])


def embedding_one_past_the_end(tokens, table):
    own = tokens - dist.get_rank() * len(table)
    here = (own >= 0) & (own <= len(table))
    return summed(table[own.where(here, 0).clamp(max=len(table) - 1)] * here[..., None])


def embedding_by_gathering(tokens, table):
    return torch.cat(gathered(table))[tokens]


def embedding_by_a_maximum(tokens, table):
    own = tokens - dist.get_rank() * len(table)
    here = (own >= 0) & (own < len(table))
    rows = table[own.where(here, 0)] * here[..., None]
    dist.all_reduce(rows, dist.ReduceOp.MAX)
    return rows


def embedding_of_this_rank(tokens, table):
    own = tokens - dist.get_rank() * len(table)
    here = (own >= 0) & (own < len(table))
    return table[own.where(here, 0)] * here[..., None]


# --- parallel_cross_entropy -----------------------------------------------------------------------------------


def parallel_cross_entropy(logits, targets):
    largest = logits.amax(1)
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    own = targets - dist.get_rank() * logits.shape[1]
    here = (own >= 0) & (own < logits.shape[1])
    shifted = logits - largest[:, None]
    of_target = shifted.gather(1, own.where(here, 0)[:, None])[:, 0] * here
    total, of_target = summed(torch.stack([shifted.exp().sum(1), of_target]))
    return (total.log() - of_target).mean()


def entropy_in_three_messages(logits, targets):
    """Right: as many bytes, whether they travel together or not."""
    largest = logits.amax(1)
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    own = targets - dist.get_rank() * logits.shape[1]
    here = (own >= 0) & (own < logits.shape[1])
    of_target = summed(logits.gather(1, own.where(here, 0)[:, None])[:, 0] * here)
    return (summed((logits - largest[:, None]).exp().sum(1)).log() + largest - of_target).mean()


def entropy_by_gathering(logits, targets):
    return torch.nn.functional.cross_entropy(torch.cat(gathered(logits), 1), targets)


def entropy_without_the_largest(logits, targets):
    own = targets - dist.get_rank() * logits.shape[1]
    here = (own >= 0) & (own < logits.shape[1])
    of_target = summed(logits.gather(1, own.where(here, 0)[:, None])[:, 0] * here)
    return (summed(logits.exp().sum(1)).log() - of_target).mean()


def entropy_with_the_largest_of_this_rank(logits, targets):
    """Sums of exponentials of different shifts do not add up."""
    largest = logits.amax(1)
    own = targets - dist.get_rank() * logits.shape[1]
    here = (own >= 0) & (own < logits.shape[1])
    of_target = summed(logits.gather(1, own.where(here, 0)[:, None])[:, 0] * here)
    return (summed((logits - largest[:, None]).exp().sum(1)).log() + largest - of_target).mean()


def entropy_with_the_largest_magnitude(logits, targets):
    """A shift that is too large leaves no exponential above zero."""
    largest = logits.abs().amax(1)
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    own = targets - dist.get_rank() * logits.shape[1]
    here = (own >= 0) & (own < logits.shape[1])
    shifted = logits - largest[:, None]
    of_target = shifted.gather(1, own.where(here, 0)[:, None])[:, 0] * here
    total, of_target = summed(torch.stack([shifted.exp().sum(1), of_target]))
    return (total.log() - of_target).mean()


def entropy_with_a_target_of_every_rank(logits, targets):
    """The target's logit of the ranks that do not have it must be no summand."""
    largest = logits.amax(1)
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    shifted = logits - largest[:, None]
    of_target = summed(shifted.gather(1, targets[:, None] % logits.shape[1])[:, 0])
    return (summed(shifted.exp().sum(1)).log() - of_target).mean()


def entropy_of_this_rank(logits, targets):
    own = targets - dist.get_rank() * logits.shape[1]
    here = (own >= 0) & (own < logits.shape[1])
    loss = torch.nn.functional.cross_entropy(logits, own.where(here, -100), reduction="sum")
    return summed(loss) / len(targets)


def entropy_summed_over_tokens(logits, targets):
    return parallel_cross_entropy(logits, targets) * len(targets)


# --- gradient_norm --------------------------------------------------------------------------------------------


def gradient_norm(gradients, sharded):
    squares = [0.0, 0.0]
    for gradient, cut in zip(gradients, sharded, strict=True):
        squares[cut] += gradient.double().square().sum()
    return math.sqrt(squares[0] + summed(torch.as_tensor(squares[1])))


def norm_in_float32(gradients, sharded):
    """Right: a number of 4 bytes is exact enough."""
    squares = [torch.zeros(()), torch.zeros(())]
    for gradient, cut in zip(gradients, sharded, strict=True):
        squares[cut] += gradient.square().sum()
    return (squares[0] + summed(squares[1])).sqrt().item()


def norm_of_everything_summed(gradients, sharded):
    return math.sqrt(summed(sum(gradient.double().square().sum() for gradient in gradients)))


def norm_of_this_rank(gradients, sharded):
    return math.sqrt(sum(gradient.double().square().sum() for gradient in gradients))


def norm_as_a_sum_of_norms(gradients, sharded):
    return summed(torch.tensor(norm_of_this_rank(gradients, sharded))).item()


def norm_of_the_mean_square(gradients, sharded):
    return norm_of_everything_summed(gradients, sharded) / math.sqrt(dist.get_world_size())


def norm_parameter_by_parameter(gradients, sharded):
    """Right, with a message for every parameter."""
    squares = [gradient.double().square().sum() for gradient in gradients]
    return math.sqrt(sum(summed(square) if cut else square for square, cut in zip(squares, sharded, strict=True)))


def norm_by_gathering(gradients, sharded):
    whole = [part for g, cut in zip(gradients, sharded, strict=True) for part in (gathered(g) if cut else [g])]
    return math.sqrt(sum(part.double().square().sum() for part in whole))


# --- parallel_dropout -----------------------------------------------------------------------------------------


def generator(seed):
    return torch.Generator().manual_seed(seed)


def parallel_dropout(x, probability, seed, dimension):
    rank, size, shape = dist.get_rank(), dist.get_world_size(), list(x.shape)
    if dimension is not None:
        shape[dimension] *= size
    keep = torch.rand(shape, generator=generator(seed)) >= probability
    if dimension is not None:
        keep = keep.chunk(size, dimension)[rank]
    return x * keep / (1 - probability)


def dropout_with_the_same_mask(x, probability, seed, dimension):
    """Two ranks drop at the same places of their parts: the mask repeats itself along the whole."""
    return x * (torch.rand(x.shape, generator=generator(seed)) >= probability) / (1 - probability)


def dropout_with_a_seed_for_each_rank(x, probability, seed, dimension):
    """Copies that should stay alike come apart."""
    return dropout_with_the_same_mask(x, probability, seed + dist.get_rank(), dimension)


def dropout_without_scaling(x, probability, seed, dimension):
    return parallel_dropout(x, probability, seed, dimension) * (1 - probability)


def dropout_scaled_by_two(x, probability, seed, dimension):
    """Right for a probability of one half."""
    return parallel_dropout(x, probability, seed, dimension) * (1 - probability) * 2


def dropout_the_other_way(x, probability, seed, dimension):
    """Keeps where it should drop; with a probability of one half nobody would see it in the mean."""
    return x / (1 - probability) - parallel_dropout(x, probability, seed, dimension)


def dropout_always_along_the_rows(x, probability, seed, dimension):
    return parallel_dropout(x, probability, seed, None if dimension is None else 0)


def dropout_from_rank_0(x, probability, seed, dimension):
    keep = (torch.rand(x.shape, generator=generator(seed)) >= probability).float()
    dist.broadcast(keep, src=0)
    return x * keep / (1 - probability)


# --- ring_pairs -----------------------------------------------------------------------------------------------


def pairs(queries, keys):
    return sum(key <= query for query in queries for key in keys)


def ring_pairs(positions):
    size = len(positions)
    return sum(max(pairs(positions[r], positions[(r - t) % size]) for r in range(size)) for t in range(size))


def pairs_of_the_busiest_rank(positions):
    """A rank that is quick in one turn cannot begin the next before its keys arrive."""
    return max(sum(pairs(own, keys) for keys in positions) for own in positions)


def pairs_of_all_ranks(positions):
    return sum(pairs(own, keys) for own in positions for keys in positions)


def pairs_without_a_mask(positions):
    return sum(len(own) for own in positions) * max(len(own) for own in positions)


def pairs_without_the_token_itself(positions):
    return ring_pairs(positions) - max(len(own) for own in positions)


def pairs_shared_evenly(positions):
    return pairs_of_all_ranks(positions) // len(positions)


def pairs_by_the_order_of_ranks(positions):
    """As if every token of an earlier rank stood before every token of a later one."""
    starts = list(accumulate([0, *map(len, positions)]))
    return ring_pairs([list(range(a, b)) for a, b in zip(starts, starts[1:], strict=False)])


# --- sequence_to_heads ----------------------------------------------------------------------------------------


def sequence_to_heads(x):
    parts = torch.stack(x.chunk(dist.get_world_size(), 1))
    received = torch.empty_like(parts)
    dist.all_to_all_single(received, parts)
    return received.flatten(0, 1)


def heads_by_gathering(x):
    return torch.cat(gathered(x)).chunk(dist.get_world_size(), 1)[dist.get_rank()].contiguous()


def heads_sent_as_they_lie(x):
    """Cuts tokens where heads were to be cut."""
    received = torch.empty_like(x)
    dist.all_to_all_single(received, x)
    heads, d = x.shape[1:]
    return received.reshape(-1, heads // dist.get_world_size(), d)


def heads_joined_side_by_side(x):
    size = dist.get_world_size()
    parts = torch.stack(x.chunk(size, 1))
    received = torch.empty_like(parts)
    dist.all_to_all_single(received, parts)
    return torch.cat(received.unbind(), 1)


def heads_with_tokens_shuffled(x):
    size = dist.get_world_size()
    parts = torch.stack(x.chunk(size, 1))
    received = torch.empty_like(parts)
    dist.all_to_all_single(received, parts)
    return received.transpose(0, 1).flatten(0, 1)


def heads_of_this_rank_only(x):
    return x.chunk(dist.get_world_size(), 1)[dist.get_rank()].clone()


def heads_dealt_in_turns(x):
    size = dist.get_world_size()
    parts = torch.stack([x[:, rank::size] for rank in range(size)])
    received = torch.empty_like(parts)
    dist.all_to_all_single(received, parts)
    return received.flatten(0, 1)


# --- apply_capacity -------------------------------------------------------------------------------------------


def apply_capacity(probabilities, k, capacity):
    taken = [[] for _ in range(probabilities.shape[1])]
    for token, choices in enumerate(probabilities.topk(k).indices.tolist()):
        for expert in choices:
            if len(taken[expert]) < capacity:
                taken[expert].append(token)
    return taken


def capacity_for_first_choices_first(probabilities, k, capacity):
    """A token's second choice is dropped for the first choice of a later token: the past depends on the future."""
    taken = [[] for _ in range(probabilities.shape[1])]
    for choices in probabilities.topk(k).indices.T.tolist():
        for token, expert in enumerate(choices):
            if len(taken[expert]) < capacity:
                taken[expert].append(token)
    return [sorted(tokens) for tokens in taken]


def capacity_without_limit(probabilities, k, capacity):
    return apply_capacity(probabilities, k, len(probabilities))


def capacity_for_the_most_probable(probabilities, k, capacity):
    """Each expert picks its tokens (expert choice), where here each token picks its experts."""
    return [column.topk(capacity).indices.tolist() for column in probabilities.T]


def capacity_at_the_next_best(probabilities, k, capacity):
    """A dropped choice asks on: nobody is dropped while an expert has capacity."""
    taken = [[] for _ in range(probabilities.shape[1])]
    wishes = [row.tolist() for row in probabilities.argsort(descending=True)]
    for _ in range(k):
        for token, wish in enumerate(wishes):
            while wish:
                expert = wish.pop(0)
                if len(taken[expert]) < capacity:
                    taken[expert].append(token)
                    break
    return taken


def capacity_for_the_last(probabilities, k, capacity):
    return [tokens[-capacity:] for tokens in apply_capacity(probabilities, k, len(probabilities))]


def capacity_for_all_choices_or_none(probabilities, k, capacity):
    """A token that one expert drops is dropped by the others, too."""
    taken = [[] for _ in range(probabilities.shape[1])]
    for token, choices in enumerate(probabilities.topk(k).indices.tolist()):
        if all(len(taken[expert]) < capacity for expert in choices):
            for expert in choices:
                taken[expert].append(token)
    return taken


# --- load_balancing_loss --------------------------------------------------------------------------------------


def load_balancing_loss(probabilities):
    experts = probabilities.shape[1]
    counts = torch.bincount(probabilities.argmax(1), minlength=experts)
    counts, sums = summed(torch.stack([counts, probabilities.sum(0)]))
    tokens = counts.sum()
    return (experts * (counts / tokens * (sums / tokens)).sum()).item()


def loss_of_this_rank(probabilities):
    experts = probabilities.shape[1]
    shares = torch.bincount(probabilities.argmax(1), minlength=experts).double() / len(probabilities)
    return (experts * (shares * probabilities.mean(0)).sum()).item()


def loss_as_a_mean_of_losses(probabilities):
    """The mean of the ranks' losses: each may be balanced badly in a way that another makes up for."""
    loss = summed(torch.tensor(loss_of_this_rank(probabilities), dtype=torch.float64))
    return loss.item() / dist.get_world_size()


def loss_without_the_number_of_experts(probabilities):
    return load_balancing_loss(probabilities) / probabilities.shape[1]


def loss_of_probabilities_only(probabilities):
    """f has no gradient, P has; with P in the place of both the loss is a different one."""
    sums = summed(torch.cat([probabilities.sum(0), torch.tensor([len(probabilities)]).double()]))
    return (probabilities.shape[1] * (sums[:-1] / sums[-1]).square().sum()).item()


def loss_of_a_mean_of_means(probabilities):
    experts, size = probabilities.shape[1], dist.get_world_size()
    if len(probabilities):
        shares = torch.bincount(probabilities.argmax(1), minlength=experts).double() / len(probabilities)
        means = torch.stack([shares, probabilities.mean(0)])
    else:
        means = torch.zeros(2, experts, dtype=torch.float64)
    shares, probable = summed(means) / size
    return (experts * (shares * probable).sum()).item()


def loss_by_gathering(probabilities):
    most = torch.tensor(len(probabilities))
    dist.all_reduce(most, dist.ReduceOp.MAX)
    padded = torch.full((int(most), probabilities.shape[1]), -1.0, dtype=torch.float64)
    padded[: len(probabilities)] = probabilities
    whole = torch.cat(gathered(padded))
    return loss_of_this_rank(whole[whole[:, 0] >= 0])


# --- repaired_attention ---------------------------------------------------------------------------------------


def repaired_attention(q, k, v, shift=True, rescale=True, scale=True):
    """The largest score so far is subtracted; what was summed relative to an earlier one is scaled to it."""
    largest = q.new_full((*q.shape[:-1], 1), -torch.inf if shift else 0.0)
    total, out = torch.zeros_like(largest), torch.zeros_like(q)
    for turn in range(dist.get_world_size()):
        if turn > 0:
            k, v = passed_on(k.contiguous()), passed_on(v.contiguous())
        scores = q @ k.transpose(-2, -1) / (q.shape[-1] ** 0.5 if scale else 1)
        now = torch.maximum(largest, scores.amax(-1, keepdim=True)) if shift else largest
        weights, factor = (scores - now).exp(), (largest - now).exp()
        out = out * (factor if rescale else 1) + weights @ v
        total, largest = total * factor + weights.sum(-1, keepdim=True), now
    return out / total


def attention_by_log_sum_exp(q, k, v):
    out, lse, both = torch.zeros_like(q), q.new_full((*q.shape[:-1], 1), -torch.inf), torch.stack([k, v])
    for turn in range(dist.get_world_size()):
        both = passed_on(both) if turn else both
        scores = q @ both[0].transpose(-2, -1) / q.shape[-1] ** 0.5
        block = scores.logsumexp(-1, keepdim=True)
        now = torch.logaddexp(lse, block)
        out, lse = out * (lse - now).exp() + (scores - now).exp() @ both[1], now
    return out


def attention_as_it_was(q, k, v):
    return faulty_attention(q, k, v)


def attention_without_a_maximum(q, k, v):
    return repaired_attention(q, k, v, shift=False)


def attention_with_nothing_scaled(q, k, v):
    return repaired_attention(q, k, v, rescale=False)


def attention_of_whole_tensors(q, k, v):
    k, v = (torch.cat(gathered(x), 1) for x in (k, v))
    return torch.nn.functional.scaled_dot_product_attention(q, k, v)


def attention_as_a_mean_of_the_turns(q, k, v):
    outs = [torch.nn.functional.scaled_dot_product_attention(q, k, v)]
    for _ in range(dist.get_world_size() - 1):
        k, v = passed_on(k), passed_on(v)
        outs.append(torch.nn.functional.scaled_dot_product_attention(q, k, v))
    return sum(outs) / len(outs)


def attention_of_this_rank_alone(q, k, v):
    return torch.nn.functional.scaled_dot_product_attention(q, k, v)


# --- tensor_ranks ---------------------------------------------------------------------------------------------


def tensor_ranks(width, tokens, gpus, smallest, flops, inside, between, gradients=True, across=8, each=True):
    def all_reduce(ranks, nbytes, bandwidth):
        return 2 * (ranks - 1) / ranks * nbytes / bandwidth

    found, ranks = [], smallest
    while ranks <= gpus:
        replicas = gpus // ranks
        activations = 2 * width * tokens / (replicas if each else 1)
        took = 72 * width**2 * tokens / gpus / flops
        took += 4 * all_reduce(ranks, activations, inside if ranks <= across else between)
        if gradients:
            took += all_reduce(replicas, 24 * width**2 / ranks, inside if gpus <= 8 else between)
        found.append((took, ranks))
        ranks *= 2
    took, ranks = min(found)
    return ranks, took


def ranks_of_a_whole_node(width, tokens, gpus, smallest, *more):
    return tensor_ranks(width, tokens, gpus, max(smallest, min(8, gpus)), *more)


def ranks_of_the_fewest(width, tokens, gpus, smallest, *more):
    """That a layer fits is enough, one thinks."""
    _, took = tensor_ranks(width, tokens, gpus, smallest, *more)
    return smallest, took


def ranks_without_gradients(*arguments):
    return tensor_ranks(*arguments, gradients=False)


def ranks_with_one_bandwidth(*arguments):
    return tensor_ranks(*arguments, across=1024)


def ranks_with_all_tokens_in_each_replica(*arguments):
    return tensor_ranks(*arguments, each=False)


# exercise -> other answers that are right, and must be accepted
RIGHT = {
    "repaired_attention": [attention_by_log_sum_exp],
    "tied_gradient": [tied_in_turns],
    "parallel_cross_entropy": [entropy_in_three_messages],
    "gradient_norm": [norm_in_float32],
}

# exercise -> (wrong answer, words that the checker's verdict must contain; " ... " is for any words between)
WRONG = {
    "balanced_cut": [
        (cut_into_equal_numbers, "balanced_cut([5, 1, 1, 1, 1, 3], 2), rank 0: expected [2, 4], got [3, 3]"),
        (cut_when_the_share_is_reached, "balanced_cut([7, 2, 5, 10, 8], 2), rank 0: expected [3, 2], got [4, 1]"),
        (cut_before_the_share_is_passed, "balanced_cut([4, 3, 4, 1], 2), rank 0: expected [2, 2], got [1, 3]"),
        (cut_with_empty_ranks, "balanced_cut([10, 1, 1, 1], 4), rank 0: expected [1, 1, 1, 1], got [1, 3, 0, 0]"),
        (cut_into_costs, "balanced_cut([5, 1, 1, 1, 1, 3], 2), rank 0: expected [2, 4], got [6, 6]"),
    ],
    "frozen_step": [
        (step_without_a_way_back, "widths (3, 2, 4), 0 frozen, rank 0: expected [[-0.08 ... got [[-0.3669"),
        (
            step_with_the_gradient_of_the_outputs,
            "widths (3, 2, 4), 0 frozen, rank 0: expected [[-0.08 ... got [[-0.1008",
        ),
        (step_with_a_mean, "widths (3, 2, 4), 0 frozen, rank 0: expected [[-0.08 ... got [[-0.0411"),
        (frozen_but_sent, "1 frozen, rank 1: expected nothing sent, got 24 bytes to rank 0"),
        (frozen_rank_still_gets_a_gradient, "1 frozen, rank 1: expected nothing sent, got 24 bytes to rank 0"),
    ],
    "tied_gradient": [
        (tied_and_stepped_apart, "rank 0: expected 11 at element [0, 0], got 1 (300000 of 300000 elements differ)"),
        (tied_by_all_reduce, "rank 0: expected only sends and receives, got a call of all_reduce"),
        (tied_on_the_first_only, "rank 1: expected 11 at element [0, 0], got 10 (300000 of 300000 elements differ)"),
        (tied_by_average, "rank 0: expected 11 at element [0, 0], got 5.5 (300000 of 300000 elements differ)"),
        (tied_and_summed_in_place, "expected the arguments left as they were, got the function wrote into its argumen"),
        (tied_both_send_first, "expected a result on every rank, got a deadlock, no answer for 5 s: rank 0 and rank 1"),
    ],
    "naive_utilisation": [
        (utilisation_as_if_all_at_once, "rank 0: expected [6, [0.5, 0.5]], got [3, [1, 1]]"),
        (
            utilisation_with_one_way_of_messages,
            "naive_utilisation([1.0, 2.0, 1.0], [2.0, 4.0, 2.0], 1.0), rank 0: expected ... got [14, ",
        ),
        (
            utilisation_with_a_message_for_each_rank,
            "naive_utilisation([1.0, 2.0, 1.0], [2.0, 4.0, 2.0], 1.0), rank 0: ... got [18, ",
        ),
        (
            utilisation_is_one_over_n,
            "naive_utilisation([1.0, 2.0, 1.0], [2.0, 4.0, 2.0], 1.0), rank 0: expected [16, ... got [16, [0.3333",
        ),
    ],
    "parallel_mlp_backward": [
        (backward_without_f, "9], [44, 40, 34], [-89, -85, 41]] as item 0, got [[25, -15, -25], [15, -9, -15], [0, 0,"),
        (backward_with_an_all_reduce_in_g, ", 40, 34], [-89, -85, 41]] as item 0, got [[50, -30, -50], [30, -18, -30]"),
        (backward_with_f_and_g_summing, "44, 40, 34], [-89, -85, 41]] as item 0, got [[50, -30, -50], [118, -258, -58"),
        (backward_with_an_average, " [44, 40, 34], [-89, -85, 41]] as item 0, got [[12.5, -7.5, -12.5], [29.5, -64.5,"),
        (backward_that_sums_the_weights_too, "expected [[-45, 18], [45, 4], [15, -30]] as item 1, got [[-24, -43], [4"),
        (backward_without_relu, "], [44, 40, 34], [-89, -85, 41]] as item 0, got [[-4, -88, 20], [20, -168, 36], [4,"),
        (backward_with_relu_of_the_gradient, "as item 0, got [[-13, -43, 29], ... a mask"),
        (backward_with_the_forward_pass, "expected all_reduce of 48 bytes, got all_reduce of 48 ... too many"),
    ],
    "parallel_embedding": [
        (embedding_without_a_mask, "rank 0: expected 11 at element [0, 0, 0], got 16 (20 of 20 elements differ)"),
        (embedding_with_wrapped_rows, "rank 0: expected 11 at element [0, 0, 0], got 16 (20 of 20 elements differ)"),
        (embedding_out_of_range, "expected a result on every rank, got IndexError: index 5 is out of bounds for dimen"),
        (embedding_one_past_the_end, "rank 0: expected 7 at element [1, 0, 0], got 12 (4 of 20 elements differ)"),
        (embedding_by_gathering, "rank 0: expected all_reduce of 80 bytes, got all_gather of 48 bytes"),
        (embedding_by_a_maximum, "rank 0: expected -3 at element [0, 4, 0], got 0 (8 of 20 elements differ)"),
        (embedding_of_this_rank, "rank 0: expected 11 at element [0, 0, 0], got 0 (8 of 20 elements differ)"),
    ],
    "parallel_cross_entropy": [
        (entropy_by_gathering, "expected at most 120 bytes sent by each rank, got 1200 bytes: all_gather of 2400 byte"),
        (
            entropy_without_the_largest,
            "each token with a logit of 10,000 on the last rank, rank 0: expected 7499.20 ... got inf",
        ),
        (entropy_with_the_largest_of_this_rank, "small logits, rank 0: expected 5.32 ... got 5.0714"),
        (
            entropy_with_the_largest_magnitude,
            "each token with a logit of -10,000 on the last rank, rank 0: expected ... got -inf",
        ),
        (entropy_with_a_target_of_every_rank, "small logits, rank 0: expected 5.32 ... got 8.527"),
        (entropy_of_this_rank, "small logits, rank 0: expected 5.32 ... got 4.5241"),
        (entropy_summed_over_tokens, "small logits, rank 0: expected 5.32 ... got 26.64"),
    ],
    "gradient_norm": [
        (norm_of_everything_summed, "one replicated beside them, rank 0: expected 10, got 11.661904"),
        (norm_of_this_rank, "two sharded parameters, rank 0: expected 8, got 6.9282032"),
        (norm_as_a_sum_of_norms, "two sharded parameters, rank 0: expected 8, got 10.928204"),
        (norm_of_the_mean_square, "two sharded parameters, rank 0: expected 8, got 5.6568542"),
        (norm_parameter_by_parameter, "expected all_reduce of at most 8 bytes, got all_reduce of 8 bytes, all_reduce"),
        (norm_by_gathering, "expected all_reduce of at most 8 bytes, got all_gather of 16 bytes, all_gather of 16 byt"),
    ],
    "parallel_dropout": [
        (
            dropout_with_the_same_mask,
            "probability 0.5, dimension 0, rank 1: expected [[6, 2, -2], ... got [[0, 0, -0], [-0, -0, 0]",
        ),
        (dropout_with_a_seed_for_each_rank, "expected [[0, 0, 0, 0], [-0, 0, 6, 2], [-2, -6, -0, 10]], got [[2, 6, 0,"),
        (dropout_without_scaling, "expected [[0, 0, 0, 0], [-0, 0, 6, 2], [-2, -6, -0, 10]], got [[0, 0, 0, 0], [-0,"),
        (dropout_the_other_way, "expected [[0, 0, 0, 0], [-0, 0, 6, 2], [-2, -6, -0, 10]], got [[2, 6, 2, 2], [-6, 6,"),
        (
            dropout_always_along_the_rows,
            "probability 0.5, dimension 1, rank 0: expected -0 at element [1, 0, 0] ... got -2 (10 of 24 elements",
        ),
        (dropout_from_rank_0, "rank 0: expected nothing sent, got broadcast of 48 bytes"),
        (
            dropout_scaled_by_two,
            "probability 0.25, dimension None, rank 0: expected [[1.3333 ... got [[2, 6, 0, 0], [-0, 0, 6",
        ),
    ],
    "ring_pairs": [
        (pairs_of_the_busiest_rank, "ring_pairs([[0, 1], [2, 5], [4, 3]]), rank 0: expected 11, got 9"),
        (pairs_of_all_ranks, "ring_pairs([[0, 1, 2, 3], [4, 5, 6, 7]]), rank 0: expected 26, got 36"),
        (pairs_without_a_mask, "ring_pairs([[0, 1, 2, 3], [4, 5, 6, 7]]), rank 0: expected 26, got 32"),
        (pairs_without_the_token_itself, "ring_pairs([[0, 1, 2, 3], [4, 5, 6, 7]]), rank 0: expected 26, got 22"),
        (pairs_shared_evenly, "ring_pairs([[0, 1, 2, 3], [4, 5, 6, 7]]), rank 0: expected 26, got 18"),
        (pairs_by_the_order_of_ranks, "ring_pairs([[0, 1, 6, 7], [2, 3, 4, 5]]), rank 0: expected 18, got 26"),
    ],
    "sequence_to_heads": [
        (heads_by_gathering, "rank 0: expected all_to_all of 48 bytes, got all_gather of 96 bytes"),
        (heads_sent_as_they_lie, "10]], [[13, 14]], [[17, 18]], [[21, 22]]], got [[[1, 2]], [[3, 4]], [[5, 6]], [[13,"),
        (heads_joined_side_by_side, "expected a tensor of shape (6, 1, 2) and type float32, got a tensor of shape (3,"),
        (heads_with_tokens_shuffled, "]], [[13, 14]], [[17, 18]], [[21, 22]]], got [[[1, 2]], [[13, 14]], [[5, 6]], ["),
        (heads_of_this_rank_only, "expected a tensor of shape (6, 1, 2) and type float32, got a tensor of shape (3, 1"),
        (heads_dealt_in_turns, "1 token on each rank, 4 heads, rank 0: expected [[[1], [2]], [[5], [6]]], got [[[1],"),
    ],
    "apply_capacity": [
        (capacity_for_first_choices_first, "k 2, capacity 1, rank 0: expected [[0], [0], [1]], got [[0], [3], [1]]"),
        (capacity_without_limit, "5 tokens, k 1, capacity 2, rank 0: expected [[0, 1], [3], []], got [[0, 1, 2, 4], ["),
        (capacity_for_the_most_probable, "rank 0: expected [[0, 1], [3], []], got [[4, 1], [3, 2], [1, 4]]"),
        (capacity_at_the_next_best, "rank 0: expected [[0, 1], [3], []], got [[0, 1], [2, 3], [4]]"),
        (capacity_for_the_last, "rank 0: expected [[0, 1], [3], []], got [[2, 4], [3], []]"),
        (capacity_for_all_choices_or_none, "k 2, capacity 1, rank 0: expected [[0], [0], [1]], got [[0], [0], []]"),
    ],
    "load_balancing_loss": [
        (loss_of_this_rank, "3 tokens on each rank, rank 0: expected 1.33 ... got 1.8183"),
        (loss_as_a_mean_of_losses, "3 tokens on each rank, rank 0: expected 1.33 ... got 1.6899"),
        (loss_without_the_number_of_experts, "3 tokens on each rank, rank 0: expected 1.33 ... got 0.334"),
        (loss_of_probabilities_only, "3 tokens on each rank, rank 0: expected 1.33 ... got 1.2391"),
        (loss_of_a_mean_of_means, "unequal numbers, rank 0: expected 1.18 ... got 1.4243"),
        (loss_by_gathering, "expected all_reduce of at most 72 bytes, got all_reduce of 8 bytes, all_gather of 192 by"),
    ],
    "repaired_attention": [
        (attention_as_it_was, "scores close to 0, rank 0: expected ... a maximum that has grown"),
        (attention_without_a_maximum, "scores as large as 1,000, ... exp(1,000) overflows"),
        (attention_with_nothing_scaled, "scores close to 0, rank 0: expected ... got 0.18768"),
        (attention_of_whole_tensors, "expected only sends and receives, got a call of all_gather"),
        (attention_as_a_mean_of_the_turns, "rank 0: expected"),
        (attention_of_this_rank_alone, "rank 0: expected"),
    ],
    "tensor_ranks": [
        (ranks_of_a_whole_node, "tensor_ranks(10, 1000, 16, 1, 7200.0, 1000.0, 100.0), rank 0: expected [2, 93.5]"),
        (ranks_of_the_fewest, "rank 0: expected [2, 93.5], got [1, 93.5]"),
        (ranks_without_gradients, "rank 0: expected [2, 93.5], got [1, 62.5]"),
        (ranks_with_one_bandwidth, "16, 16, 7200.0, 1000.0, 100.0), rank 0: expected [16, 1562.5], got [16, 212.5]"),
        (ranks_with_all_tokens_in_each_replica, "rank 0: expected [2, 93.5], got [1, 107.5]"),
    ],
}
