"""Answers to the exercises of chapter 03, and after each the wrong answers that people really give.

The table WRONG at the end says for which reason the checker must refuse each wrong answer, and RIGHT which other
answers it must accept; the tests hold it to that. Nothing in the course imports this file except its test, so that
an instructor can leave it out.
"""

import functools
import math
import operator
import zlib
from itertools import cycle, islice

import torch
import torch.distributed as dist

from course.ddp.faulty import FaultyReducer


def flatten(tensors: list[torch.Tensor]) -> torch.Tensor:
    return torch.cat([tensor.reshape(-1) for tensor in tensors])


def unflatten(flat: torch.Tensor, like: list[torch.Tensor]) -> list[torch.Tensor]:
    pieces = flat.split([tensor.numel() for tensor in like])
    return [piece.view_as(tensor) for piece, tensor in zip(pieces, like, strict=True)]


def average(gradients):
    flat = flatten(gradients) / dist.get_world_size()
    dist.all_reduce(flat)
    return unflatten(flat, gradients)


# --- accumulated_gradient -------------------------------------------------------------------------------------


def accumulated_gradient(micro_gradients):
    total = sum(micro_gradients[1:], micro_gradients[0].clone())
    dist.all_reduce(total)
    return total / (len(micro_gradients) * dist.get_world_size())


def accumulated_last_only(micro_gradients):
    last = micro_gradients[-1] / (len(micro_gradients) * dist.get_world_size())
    dist.all_reduce(last)
    return sum(micro_gradients[:-1], torch.zeros_like(last)) / len(micro_gradients) + last


def accumulated_without_dividing(micro_gradients):
    return accumulated_gradient(micro_gradients) * len(micro_gradients)


def accumulated_without_no_sync(micro_gradients):
    total = torch.zeros_like(micro_gradients[0])
    for gradient in micro_gradients:
        share = gradient / (len(micro_gradients) * dist.get_world_size())
        dist.all_reduce(share)
        total += share
    return total


def accumulated_and_reduced_again(micro_gradients):
    """What was summed over the ranks already is added to, and summed over the ranks again."""
    total = torch.zeros_like(micro_gradients[0])
    for gradient in micro_gradients:
        total += gradient
        dist.all_reduce(total)
    return total / (len(micro_gradients) * dist.get_world_size())


def accumulated_in_the_first(micro_gradients):
    total = micro_gradients[0]
    for gradient in micro_gradients[1:]:
        total += gradient
    return accumulated_gradient([total]) / len(micro_gradients)


def accumulated_by_reduce(micro_gradients):
    """The sum of a single gradient is that gradient itself, which the all-reduce then writes into."""
    total = functools.reduce(operator.add, micro_gradients)
    dist.all_reduce(total)
    return total / (len(micro_gradients) * dist.get_world_size())


# --- learning_rate --------------------------------------------------------------------------------------------


def learning_rate(step, base_rate, base_batch, batch, warmup):
    target = base_rate * batch / base_batch
    return target if step >= warmup else base_rate + (target - base_rate) * step / warmup


def rate_from_zero(step, base_rate, base_batch, batch, warmup):
    return base_rate * batch / base_batch * min(1.0, step / max(1, warmup))


def rate_a_step_early(step, base_rate, base_batch, batch, warmup):
    return learning_rate(step + 1, base_rate, base_batch, batch, warmup)


def rate_that_never_stops(step, base_rate, base_batch, batch, warmup):
    return base_rate + (base_rate * batch / base_batch - base_rate) * step / max(1, warmup)


def rate_by_square_root(step, base_rate, base_batch, batch, warmup):
    return learning_rate(step, base_rate, math.sqrt(base_batch), math.sqrt(batch), warmup)


def rate_without_asking_for_a_warmup(step, base_rate, base_batch, batch, warmup):
    return base_rate + (base_rate * batch / base_batch - base_rate) * min(1.0, step / warmup)


# --- average_gradients ----------------------------------------------------------------------------------------


def average_gradients(gradients):
    averages = [torch.empty(0)] * len(gradients)
    for kind in dict.fromkeys(gradient.dtype for gradient in gradients):
        places = [place for place, gradient in enumerate(gradients) if gradient.dtype == kind]
        for place, mean in zip(places, average([gradients[place] for place in places]), strict=True):
            averages[place] = mean
    return averages


def averaged_one_by_one(gradients):
    return [average([gradient])[0] for gradient in gradients]


def averaged_in_the_wider_type(gradients):
    """torch.cat makes float32 of both."""
    return [mean.to(x.dtype) for mean, x in zip(average(gradients), gradients, strict=True)]


def averaged_as_a_sum(gradients):
    return [mean * dist.get_world_size() for mean in average_gradients(gradients)]


def averaged_in_order_of_types(gradients):
    order = sorted(range(len(gradients)), key=lambda place: gradients[place].dtype != torch.float32)
    return average_gradients([gradients[place] for place in order])


# --- rebuilt_buckets ------------------------------------------------------------------------------------------


def rebuilt_buckets(arrived, sizes, first_cap, cap):
    return filled(order_of(arrived), sizes, first_cap, cap)


def order_of(arrived, rank=0):
    order = torch.tensor(arrived)
    dist.broadcast(order, src=rank)
    return order.tolist()


def filled(order, sizes, first_cap, cap):
    buckets, full = [[]], True
    for place, parameter in enumerate(order):
        if place and full:
            buckets.append([])
        buckets[-1].append(parameter)
        full = sum(sizes[p] for p in buckets[-1]) >= (first_cap if len(buckets) == 1 else cap)
    return buckets


def rebuilt_by_each_rank_alone(arrived, sizes, first_cap, cap):
    return filled(arrived, sizes, first_cap, cap)


def rebuilt_in_the_order_of_the_last_rank(arrived, sizes, first_cap, cap):
    return filled(order_of(arrived, dist.get_world_size() - 1), sizes, first_cap, cap)


def rebuilt_with_one_cap(arrived, sizes, first_cap, cap):
    return filled(order_of(arrived), sizes, cap, cap)


def rebuilt_below_the_caps(arrived, sizes, first_cap, cap):
    """Never more than the cap in a bucket, as one packs boxes."""
    buckets = [[]]
    for parameter in order_of(arrived):
        limit = first_cap if len(buckets) == 1 else cap
        if buckets[-1] and sum(sizes[p] for p in buckets[-1]) + sizes[parameter] > limit:
            buckets.append([])
        buckets[-1].append(parameter)
    return buckets


def rebuilt_with_an_empty_bucket(arrived, sizes, first_cap, cap):
    """A new bucket is begun where one is closed, also after the last parameter."""
    buckets = [[]]
    for parameter in order_of(arrived):
        buckets[-1].append(parameter)
        if sum(sizes[p] for p in buckets[-1]) >= (first_cap if len(buckets) == 1 else cap):
            buckets.append([])
    return buckets


# --- bf16_average ---------------------------------------------------------------------------------------------


def bf16_average(gradient):
    small = (gradient / dist.get_world_size()).bfloat16()
    dist.all_reduce(small)
    return small.float()


def bf16_in_float16(gradient):
    small = (gradient / dist.get_world_size()).half()
    dist.all_reduce(small)
    return small.float()


def bf16_sum_first(gradient):
    small = gradient.bfloat16()
    dist.all_reduce(small)
    return small.float() / dist.get_world_size()


def bf16_after_sending(gradient):
    large = (gradient / dist.get_world_size()).bfloat16().float()
    dist.all_reduce(large)
    return large


def bf16_returned(gradient):
    return bf16_average(gradient).bfloat16()


def bf16_for_the_calculation_only(gradient):
    """autocast's own misunderstanding: the gradient of a float32 parameter is float32, and so are its messages."""
    average = gradient / dist.get_world_size()
    dist.all_reduce(average)
    return average


# --- average_with_unused --------------------------------------------------------------------------------------


def average_with_unused(gradients, shapes):
    used = torch.tensor([gradient is not None for gradient in gradients], dtype=torch.uint8)
    dist.all_reduce(used)
    full = [torch.zeros(shape) if g is None else g for g, shape in zip(gradients, shapes, strict=True)]
    averages = average(full)
    return [average if count else None for average, count in zip(averages, used, strict=True)]


def unused_left_out(gradients, shapes):
    """A rank without a gradient does not call its all-reduce: its next one meets the others' this one."""
    averages = [None if gradient is None else gradient / dist.get_world_size() for gradient in gradients]
    for average in averages:
        if average is not None:
            dist.all_reduce(average)
    return averages


def unused_not_in_the_mean(gradients, shapes):
    used = torch.tensor([gradient is not None for gradient in gradients], dtype=torch.uint8)
    dist.all_reduce(used)
    full = [torch.zeros(shape) if g is None else g for g, shape in zip(gradients, shapes, strict=True)]
    totals = [dist.get_world_size() * each for each in average(full)]
    return [total / count if count else None for total, count in zip(totals, used, strict=True)]


def unused_by_its_own_bitmap(gradients, shapes):
    averages = average_with_unused(gradients, shapes)
    return [None if own is None else average for own, average in zip(gradients, averages, strict=True)]


def unused_are_zeros(gradients, shapes):
    """Momentum and weight decay then move a parameter that nobody used."""
    averages = average_with_unused(gradients, shapes)
    return [torch.zeros(s) if average is None else average for average, s in zip(averages, shapes, strict=True)]


def unused_where_zero(gradients, shapes):
    averages = average_with_unused(gradients, shapes)
    return [average if average is not None and average.any() else None for average in averages]


def unused_one_by_one(gradients, shapes):
    used = torch.tensor([gradient is not None for gradient in gradients], dtype=torch.uint8)
    dist.all_reduce(used)
    full = [torch.zeros(shape) if g is None else g for g, shape in zip(gradients, shapes, strict=True)]
    averages = [average([each])[0] for each in full]
    return [average if count else None for average, count in zip(averages, used, strict=True)]


def unused_by_a_maximum(gradients, shapes):
    """Right: whether anybody has it is a maximum, too."""
    used = torch.tensor([gradient is not None for gradient in gradients], dtype=torch.uint8)
    dist.all_reduce(used, dist.ReduceOp.MAX)
    full = [torch.zeros(shape) if g is None else g for g, shape in zip(gradients, shapes, strict=True)]
    averages = average(full)
    return [average if count else None for average, count in zip(averages, used, strict=True)]


# --- first_difference -----------------------------------------------------------------------------------------


def first_difference(parameters):
    return first_of(everybody(torch.tensor([fingerprint(parameter) for parameter in parameters])))


def fingerprint(tensor):
    return zlib.crc32(f"{tensor.dtype} {tuple(tensor.shape)}".encode() + tensor.contiguous().numpy().tobytes())


def everybody(numbers):
    gathered = [torch.empty_like(numbers) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, numbers)
    return gathered


def first_of(gathered):
    differs = [len(set(same)) > 1 for same in zip(*[own.tolist() for own in gathered], strict=True)]
    return differs.index(True) if any(differs) else -1


def difference_of_whole_weights(parameters):
    gathered = [everybody(parameter.double().flatten()) for parameter in parameters]
    shapes = everybody(torch.tensor([fingerprint(parameter[:0]) for parameter in parameters]))
    alike = [all(torch.equal(own, same[0]) for own in same) for same in gathered]
    found = [first_of(shapes), alike.index(False) if not all(alike) else -1]
    return min((index for index in found if index >= 0), default=-1)


def difference_of_sums(parameters):
    return first_of(everybody(torch.stack([parameter.double().sum() for parameter in parameters])))


def difference_of_bytes_only(parameters):
    return first_of(everybody(torch.tensor([zlib.crc32(p.contiguous().numpy().tobytes()) for p in parameters])))


def difference_of_bytes_and_shapes(parameters):
    """The same bytes may be numbers of another type."""
    checksums = [zlib.crc32(f"{tuple(p.shape)}".encode() + p.contiguous().numpy().tobytes()) for p in parameters]
    return first_of(everybody(torch.tensor(checksums)))


def difference_known_to_some(parameters):
    """Compares with rank 0, where all have to be compared with all, and all have to know."""
    gathered = everybody(torch.tensor([fingerprint(parameter) for parameter in parameters]))
    return first_of([gathered[0], gathered[dist.get_rank()]])


def difference_in_the_last_place(parameters):
    gathered = everybody(torch.tensor([fingerprint(parameter) for parameter in parameters]))
    differs = [index for index, same in enumerate(zip(*gathered, strict=True)) if len(set(map(int, same))) > 1]
    return differs[-1] if differs else -1


def difference_by_minimum_and_maximum(parameters):
    """Right: numbers are the same where the smallest is the largest."""
    least, most = (torch.tensor([fingerprint(parameter) for parameter in parameters]) for _ in range(2))
    dist.all_reduce(least, dist.ReduceOp.MIN)
    dist.all_reduce(most, dist.ReduceOp.MAX)
    return first_of([least, most])


# --- sampler_indices ------------------------------------------------------------------------------------------


def shuffled(size, seed):
    return torch.randperm(size, generator=torch.Generator().manual_seed(seed)).tolist()


def sampler_indices(size, epoch, seed, rank, world):
    padded = math.ceil(size / world) * world
    return list(islice(cycle(shuffled(size, seed + epoch)), padded))[rank::world]


def sampler_without_set_epoch(size, epoch, seed, rank, world):
    return sampler_indices(size, 0, seed, rank, world)


def sampler_in_blocks(size, epoch, seed, rank, world):
    each = math.ceil(size / world)
    return list(islice(cycle(shuffled(size, seed + epoch)), each * world))[rank * each : (rank + 1) * each]


def sampler_without_padding(size, epoch, seed, rank, world):
    return shuffled(size, seed + epoch)[rank::world]


def sampler_that_drops(size, epoch, seed, rank, world):
    return shuffled(size, seed + epoch)[: size // world * world][rank::world]


def sampler_padded_once(size, epoch, seed, rank, world):
    order = shuffled(size, seed + epoch)
    return (order + order[: -size % world])[rank::world]


def sampler_padded_with_the_last(size, epoch, seed, rank, world):
    order = shuffled(size, seed + epoch)
    return (order + order[-1:] * (-size % world))[rank::world]


def sampler_from_rank_0(size, epoch, seed, rank, world):
    """Right, and needless: who has the seed has the order."""
    order = torch.tensor(shuffled(size, seed + epoch))
    dist.broadcast(order, src=0)
    return list(islice(cycle(order.tolist()), math.ceil(size / world) * world))[rank::world]


def sampler_seeded_by_rank(size, epoch, seed, rank, world):
    return sampler_indices(size, epoch, seed + rank, rank, world)


# --- exact_accuracy -------------------------------------------------------------------------------------------


def exact_accuracy(correct, size):
    rank, world = dist.get_rank(), dist.get_world_size()
    right = correct[: len(range(rank, size, world))].sum()
    dist.all_reduce(right)
    return right.item() / size


def accuracy_over_padding(correct, size):
    counts = torch.tensor([correct.sum(), len(correct)])
    dist.all_reduce(counts)
    return (counts[0] / counts[1]).item()


def accuracy_as_a_mean_of_accuracies(correct, size):
    rank, world = dist.get_rank(), dist.get_world_size()
    own = correct[: len(range(rank, size, world))].double()
    accuracy = own.mean() if len(own) else torch.tensor(0.0, dtype=torch.float64)
    dist.all_reduce(accuracy)
    return (accuracy / world).item()


def accuracy_of_this_rank(correct, size):
    return correct.double().mean().item()


def accuracy_above_one(correct, size):
    """Divides by the right number, and counts the repetitions."""
    right = correct.sum()
    dist.all_reduce(right)
    return right.item() / size


def accuracy_with_padding_on_the_last_rank(correct, size):
    """Right where at most one example is repeated, as it always is on two ranks."""
    rank, world = dist.get_rank(), dist.get_world_size()
    right = correct[: len(correct) - (-size % world if rank == world - 1 else 0)].sum()
    dist.all_reduce(right)
    return right.item() / size


def accuracy_of_gathered(correct, size):
    gathered = everybody(correct)
    return torch.stack(gathered, 1).flatten()[:size].double().mean().item()


def accuracy_of_all_examples(correct, size):
    right = torch.zeros(size, dtype=torch.float64)
    places = range(dist.get_rank(), size, dist.get_world_size())
    right[list(places)] = correct[: len(places)].double()
    dist.all_reduce(right)
    return right.mean().item()


def accuracy_as_a_tensor(correct, size):
    return torch.tensor(exact_accuracy(correct, size))


def accuracy_without_the_remainder(correct, size):
    right = correct[: size // dist.get_world_size()].sum()
    dist.all_reduce(right)
    return right.item() / size


def accuracy_as_a_whole_number(correct, size):
    return int(exact_accuracy(correct, size))


def accuracy_of_two_all_reduces(correct, size):
    own = correct[: len(range(dist.get_rank(), size, dist.get_world_size()))]
    right, count = own.sum(), torch.tensor(len(own))
    dist.all_reduce(right)
    dist.all_reduce(count)
    return right.item() / count.item()


def accuracy_by_two_sums(correct, size):
    """Right: two numbers of 8 bytes travel."""
    own = correct[: len(range(dist.get_rank(), size, dist.get_world_size()))]
    counts = torch.tensor([own.sum(), len(own)])
    dist.all_reduce(counts)
    return counts[0].item() / counts[1].item()


def accuracy_of_means_with_weights(correct, size):
    """The mean of nothing is no number, and stays none when it is multiplied by 0."""
    own = correct[: len(range(dist.get_rank(), size, dist.get_world_size()))].double()
    right = own.mean() * len(own)
    dist.all_reduce(right)
    return right.item() / size


# --- examples_of_step -----------------------------------------------------------------------------------------


def examples_of_step(step, batch, size, seed, rank, world):
    first = step * batch + rank * (batch // world)
    places = range(first, first + batch // world)
    return [shuffled(size, seed + place // size)[place % size] for place in places]


def examples_of_whole_batches(step, batch, size, seed, rank, world):
    """Drops what is left of an epoch, as a DataLoader with drop_last does."""
    each = max(1, size // batch)
    order = shuffled(size, seed + step // each)
    return order[step % each * batch :][rank * (batch // world) : (rank + 1) * (batch // world)]


def examples_by_turns(step, batch, size, seed, rank, world):
    places = range(step * batch + rank, (step + 1) * batch, world)
    return [shuffled(size, seed + place // size)[place % size] for place in places]


def examples_with_a_batch_for_each_rank(step, batch, size, seed, rank, world):
    first = (step * world + rank) * batch
    return [shuffled(size, seed + place // size)[place % size] for place in range(first, first + batch)]


def examples_of_one_epoch(step, batch, size, seed, rank, world):
    first = step * batch + rank * (batch // world)
    epoch = step * batch // size  # of the batch's first example
    return [shuffled(size, seed + epoch)[place % size] for place in range(first, first + batch // world)]


def examples_of_epoch_0(step, batch, size, seed, rank, world):
    first = step * batch + rank * (batch // world)
    return [shuffled(size, seed)[place % size] for place in range(first, first + batch // world)]


def examples_of_seed_0(step, batch, size, seed, rank, world):
    return examples_of_step(step, batch, size, 0, rank, world)


def examples_of_two_epochs(step, batch, size, seed, rank, world):
    """A batch may be longer than that."""
    epoch, first = divmod(step * batch, size)
    order = shuffled(size, seed + epoch) + shuffled(size, seed + epoch + 1)
    return order[first:][rank * (batch // world) : (rank + 1) * (batch // world)]


# --- uneven_steps ---------------------------------------------------------------------------------------------


def uneven_steps(gradients, elements):
    results, nothing = [], torch.zeros(elements + 1)
    while True:
        own = gradients[len(results)] if len(results) < len(gradients) else None
        total = nothing.clone() if own is None else torch.cat([own, torch.ones(1)])
        dist.all_reduce(total)
        if not total[-1]:
            return results
        results.append(total[:-1] / total[-1])


def uneven_until_the_own_end(gradients, elements):
    results = [gradient.clone() for gradient in gradients]
    for result in results:
        dist.all_reduce(result)
    return [result / dist.get_world_size() for result in results]


def uneven_over_all_ranks(gradients, elements):
    steps = torch.tensor(len(gradients))
    dist.all_reduce(steps, dist.ReduceOp.MAX)
    results = [gradient / dist.get_world_size() for gradient in gradients]
    results += [torch.zeros(elements) for _ in range(int(steps) - len(gradients))]
    for result in results:
        dist.all_reduce(result)
    return results


def uneven_until_the_first_end(gradients, elements):
    steps = torch.tensor(len(gradients))
    dist.all_reduce(steps, dist.ReduceOp.MIN)
    results = [gradient / dist.get_world_size() for gradient in gradients[: int(steps)]]
    for result in results:
        dist.all_reduce(result)
    return results


def uneven_as_long_as_rank_0(gradients, elements):
    steps, results = torch.tensor(len(gradients)), []
    dist.broadcast(steps, src=0)
    for step in range(int(steps)):
        own = gradients[step] if step < len(gradients) else None
        total = torch.zeros(elements + 1) if own is None else torch.cat([own, torch.ones(1)])
        dist.all_reduce(total)
        results.append(total[:-1] / total[-1])
    return results


def uneven_with_the_last_again(gradients, elements):
    steps = torch.tensor(len(gradients))
    dist.all_reduce(steps, dist.ReduceOp.MAX)
    last = gradients[-1:] or [torch.zeros(elements)]
    results = [gradient / dist.get_world_size() for gradient in gradients + last * (int(steps) - len(gradients))]
    for result in results:
        dist.all_reduce(result)
    return results


def uneven_asked_before_each_step(gradients, elements):
    """Right, but each rank tells all others its whole list, twice, so that nobody has to wait."""
    results = uneven_steps(gradients, elements)
    everybody(torch.zeros(2 * elements * len(results) * dist.get_world_size()))
    return results


def uneven_by_asking_first(gradients, elements):
    """Right: one more number says how many steps there are."""
    steps, results = torch.tensor(len(gradients)), []
    dist.all_reduce(steps, dist.ReduceOp.MAX)
    for step in range(int(steps)):
        own = gradients[step] if step < len(gradients) else None
        total = torch.zeros(elements + 1) if own is None else torch.cat([own, torch.ones(1)])
        dist.all_reduce(total)
        results.append(total[:-1] / total[-1])
    return results


# --- speedup_and_efficiency -----------------------------------------------------------------------------------


def speedup_and_efficiency(kind, ranks, alone, together):
    speedup = alone / together * (ranks if kind == "weak" else 1)
    return speedup, speedup / ranks


def speedup_always_strong(kind, ranks, alone, together):
    return speedup_and_efficiency("strong", ranks, alone, together)


def speedup_always_weak(kind, ranks, alone, together):
    return speedup_and_efficiency("weak", ranks, alone, together)


def speedup_of_the_step_alone(kind, ranks, alone, together):
    """The right efficiency, and the ratio of the times of a step for a speed-up."""
    return alone / together, speedup_and_efficiency(kind, ranks, alone, together)[1]


def speedup_upside_down(kind, ranks, alone, together):
    return speedup_and_efficiency(kind, ranks, together, alone)


# --- repaired_reducer -----------------------------------------------------------------------------------------


def repaired_reducer(steps, shapes, clear=lambda place: place.zero_(), each=False):
    flat, results = torch.zeros(sum(map(math.prod, shapes))), []
    for gradients in steps:
        places = flat.split([math.prod(shape) for shape in shapes])
        for place, gradient in zip(places, gradients, strict=True):
            if gradient is None:
                clear(place)
            else:
                place.copy_(gradient.flatten())
        for part in places if each else [flat]:
            dist.all_reduce(part)
        flat /= dist.get_world_size()
        results.append([place.view(shape).clone() for place, shape in zip(places, shapes, strict=True)])
    return results


def reducer_as_it_was(steps, shapes):
    reducer = FaultyReducer(shapes)
    return [reducer.average(gradients) for gradients in steps]


def reducer_anew_in_every_step(steps, shapes):
    return [FaultyReducer(shapes).average(gradients) for gradients in steps]


def reducer_that_asks_for_gradients(steps, shapes):
    return [average([gradient.clone() for gradient in gradients]) for gradients in steps]


def reducer_with_a_message_for_each(steps, shapes):
    return repaired_reducer(steps, shapes, each=True)


def reducer_that_returns_its_places(steps, shapes):
    """Views of the flat tensor, into which the next step writes."""
    flat = torch.zeros(sum(map(math.prod, shapes)))
    places = [p.view(shape) for p, shape in zip(flat.split([math.prod(s) for s in shapes]), shapes, strict=True)]
    results = []
    for gradients in steps:
        for place, gradient in zip(places, gradients, strict=True):
            place.copy_(torch.zeros_like(place) if gradient is None else gradient)
        dist.all_reduce(flat)
        flat /= dist.get_world_size()
        results.append(places)
    return results


def reducer_that_leaves_unused_out_of_the_mean(steps, shapes):
    results = []
    for gradients in steps:
        have = dist.get_world_size() - sum(gradient is None for gradient in gradients)
        full = [torch.zeros(shape) if g is None else g for g, shape in zip(gradients, shapes, strict=True)]
        results.append([x * dist.get_world_size() / have for x in average(full)])
    return results


# --- cheapest_in_time -----------------------------------------------------------------------------------------


def cheapest_in_time(steps, gradients, offers, hours, hidden=2 / 3, best=min, spans=lambda ranks, node: ranks > node):
    found = []
    for name, compute, node, inside, between, price in offers:
        for ranks in (2**power for power in range(11)):
            network = between if spans(ranks, node) else inside
            exposed = 2 * (ranks - 1) / ranks * gradients / network - hidden * compute / ranks
            took = steps * (compute / ranks + max(0, exposed)) / 3600
            if took <= hours:
                found.append((ranks * took * price, ranks, name))
    if not found:
        return None
    dollars, ranks, name = best(found, key=lambda one: (round(one[0], 9), one[1]))
    return name, ranks, dollars


def cheapest_however_long(steps, gradients, offers, hours):
    return cheapest_in_time(steps, gradients, offers, math.inf)


def cheapest_is_the_quickest(steps, gradients, offers, hours):
    def quickest(found, key):
        prices = {offer[0]: offer[5] for offer in offers}
        return min(found, key=lambda one: one[0] / one[1] / prices[one[2]])

    return cheapest_in_time(steps, gradients, offers, hours, best=quickest)


def cheapest_with_nothing_hidden(steps, gradients, offers, hours):
    return cheapest_in_time(steps, gradients, offers, hours, hidden=0)


def cheapest_with_everything_hidden(steps, gradients, offers, hours):
    return cheapest_in_time(steps, 0.0, offers, hours)


def cheapest_inside_nodes(steps, gradients, offers, hours):
    return cheapest_in_time(steps, gradients, offers, hours, spans=lambda ranks, node: False)


def cheapest_by_the_price_of_an_hour(steps, gradients, offers, hours):
    offers = sorted(offers, key=lambda offer: offer[5])[:1]
    return cheapest_in_time(steps, gradients, offers, hours)


# --- common_checkpoint ----------------------------------------------------------------------------------------


def common_checkpoint(steps):
    kept = torch.zeros(1000, dtype=torch.int32)
    kept[steps] = 1
    dist.all_reduce(kept, op=dist.ReduceOp.MIN)
    return int(kept.nonzero().max()) if kept.any() else -1


def newest_of_all(steps, op=dist.ReduceOp.MIN):
    newest = torch.tensor(max(steps, default=-1))
    dist.all_reduce(newest, op=op)
    return newest.item()


def newest_of_rank_0(steps):
    newest = torch.tensor(max(steps, default=-1))
    dist.broadcast(newest, src=0)
    return newest.item()


def newest_of_any(steps):
    return newest_of_all(steps, dist.ReduceOp.MAX)


def newest_by_objects(steps):
    everybody = [None] * dist.get_world_size()
    dist.all_gather_object(everybody, steps)
    return max(set(everybody[0]).intersection(*everybody[1:]), default=-1)


def newest_but_step_0(steps):
    return common_checkpoint(steps) or -1


# --- cheapest_saving ------------------------------------------------------------------------------------------


def cheapest_saving(offers, between_failures, restart, interval=None):
    found = []
    for name, stops, writes in offers:
        tau = (interval or at_least_as_long_as_it_writes)(stops, writes, between_failures)
        found.append((stops / tau + (tau / 2 + restart) / between_failures, name, tau))
    lost, name, tau = min(found)
    return name, tau, lost


def at_least_as_long_as_it_writes(stops, writes, between_failures):
    return max(math.sqrt(2 * stops * between_failures), writes)


def saving_by_young_alone(offers, between_failures, restart):
    return cheapest_saving(offers, between_failures, restart, lambda stops, writes, m: math.sqrt(2 * stops * m))


def saving_as_if_it_stopped_while_it_writes(offers, between_failures, restart):
    return cheapest_saving(offers, between_failures, restart, lambda stops, writes, m: math.sqrt(2 * writes * m))


def saving_without_restarts(offers, between_failures, restart):
    return cheapest_saving(offers, between_failures, 0.0)


def saving_that_stops_least(offers, between_failures, restart):
    return cheapest_saving([min(offers, key=operator.itemgetter(1))], between_failures, restart)


# exercise -> other answers that are right, and must be accepted
RIGHT = {
    "average_with_unused": [unused_by_a_maximum],
    "first_difference": [difference_by_minimum_and_maximum],
    "exact_accuracy": [accuracy_by_two_sums],
    "uneven_steps": [uneven_by_asking_first],
    "common_checkpoint": [newest_by_objects],
}

# exercise -> (wrong answer, words that the checker's verdict must contain; " ... " is for any words between)
WRONG = {
    "accumulated_gradient": [
        (accumulated_last_only, "3 micro-batches on each rank, rank 0: expected [[11, 22], [33, 44]], got [[6.5, 13]"),
        (accumulated_without_dividing, "rank 0: expected [[11, 22], [33, 44]], got [[33, 66], [99, 132]]"),
        (accumulated_without_no_sync, "expected all_reduce of 16 bytes, got all_reduce of 16 bytes, all_reduce of 16"),
        (accumulated_and_reduced_again, "rank 0: expected [[11, 22], [33, 44]], got [[20.1"),
        (accumulated_in_the_first, "wrote into its arguments"),
        (accumulated_by_reduce, "1 micro-batch on each rank, rank 0: expected the arguments left as they were"),
    ],
    "learning_rate": [
        (rate_from_zero, "learning_rate(0, 0.1, 256, 1024, 5), rank 0: expected 0.1, got 0"),
        (rate_a_step_early, "learning_rate(0, 0.1, 256, 1024, 5), rank 0: expected 0.1, got 0.16"),
        (rate_that_never_stops, "learning_rate(100, 0.1, 256, 1024, 5), rank 0: expected 0.4, got 6.1"),
        (rate_by_square_root, "learning_rate(2, 0.1, 256, 1024, 5), rank 0: expected 0.22, got 0.14"),
        (rate_without_asking_for_a_warmup, "expected a result on every rank, got ZeroDivisionError"),
    ],
    "average_gradients": [
        (
            averaged_one_by_one,
            "float32 alone, rank 0: expected all_reduce of 44 bytes, got all_reduce of 24 bytes, all_reduce of 4",
        ),
        (
            averaged_in_the_wider_type,
            "expected all_reduce of 40 bytes, all_reduce of 2 bytes, got all_reduce of 44 bytes",
        ),
        (averaged_as_a_sum, "float32 alone, rank 0: expected [[3, 6, 9], [12, 15, 18]] as item 0, got [[6, 12, 18]"),
        (
            averaged_in_order_of_types,
            "rank 0: expected a tensor of shape () and type bfloat16 as item 1, got a tensor of shape (4,)",
        ),
    ],
    "rebuilt_buckets": [
        (
            rebuilt_by_each_rank_alone,
            "[3, 2, 1, 0] on rank 0, caps 2 and 5, rank 1: expected [[3], [2, 1], [0]], got [[2], [1, 0]",
        ),
        (
            rebuilt_in_the_order_of_the_last_rank,
            "caps 2 and 5, rank 0: expected [[3], [2, 1], [0]], got [[2], [1, 0], [3]]",
        ),
        (rebuilt_with_one_cap, "caps 2 and 5, rank 0: expected [[3], [2, 1], [0]], got [[3, 2], [1, 0]]"),
        (
            rebuilt_below_the_caps,
            "order [1, 3, 0, 2] on rank 0, caps 2 and 5, rank 0: expected [[1, 3], [0], [2]], got [[1], [3]",
        ),
        (rebuilt_with_an_empty_bucket, "caps 2 and 5, rank 0: expected [[3], [2, 1], [0]], got [[3], [2, 1], [0], []]"),
    ],
    "common_checkpoint": [
        (newest_of_all, "ranks lack different ones, rank 0: expected 5, got 40"),
        (newest_of_rank_0, "the last rank lacks the newest one, rank 0: expected 10, got 15"),
        (newest_of_any, "the last rank lacks the newest one, rank 0: expected 10, got 15"),
        (newest_but_step_0, "the newest one of step 0, rank 0: expected 0, got -1"),
    ],
    "cheapest_saving": [
        (saving_by_young_alone, "10000.0, 100.0), rank 0: expected stop as item 0, got slow"),
        (saving_as_if_it_stopped_while_it_writes, "10000.0, 100.0), rank 0: expected quick as item 0, got stop"),
        (saving_without_restarts, "10000.0, 100.0), rank 0: expected 0.03 as item 2, got 0.02"),
        (saving_that_stops_least, "10000.0, 100.0), rank 0: expected stop as item 0, got slow"),
    ],
    "bf16_average": [
        (bf16_in_float16, "rank 0: expected [[3], [1.7014118e+38]], got [[3.0039062], [inf]]"),
        (bf16_sum_first, "rank 0: expected [[3], [1.7014118e+38]], got [[3], [inf]]"),
        (bf16_after_sending, "8 elements, rank 0: expected all_reduce of 16 bytes, got all_reduce of 32 bytes"),
        (bf16_returned, "a tensor of shape (8,) and type float32, got a tensor of shape (8,) and type bfloat16"),
        (bf16_for_the_calculation_only, "8 elements, rank 0: expected all_reduce of 16 bytes, got all_reduce of 32"),
    ],
    "average_with_unused": [
        (
            unused_left_out,
            "lacks gradient r, rank 0: expected a tensor of shape (2,) and type float32 as item 0 ... got None",
        ),
        (unused_where_zero, "gradient 0 is there, and is zero, rank 0: expected a tensor of shape (2,) ... got None"),
        (unused_not_in_the_mean, "rank r lacks gradient r, rank 0: expected [5, 10] as item 0, got [10, 20]"),
        (unused_by_its_own_bitmap, "rank 0: expected a tensor of shape (2,) and type float32 as item 0, got None"),
        (unused_are_zeros, "rank 0 alone has gradient 2, rank 0: expected None as item 1, got a tensor of shape (2, 2"),
        (unused_one_by_one, "expected all_reduce of 4 bytes, all_reduce of 32 bytes, got all_reduce of 4 bytes, all"),
    ],
    "first_difference": [
        (
            difference_of_whole_weights,
            "all alike, rank 0: expected at most 4096 bytes sent by each rank ... got 240024",
        ),
        (difference_of_sums, "two values of parameter 2 swapped on rank 1, rank 0: expected 2, got -1"),
        (difference_of_bytes_only, "parameter 0 in another shape on the last rank, rank 0: expected 0, got -1"),
        (difference_known_to_some, "one value of parameter 1 on the last rank, rank 0: expected 1, got -1"),
        (difference_in_the_last_place, "parameter 2 on rank 0, parameter 1 on rank 1, rank 0: expected 1, got 2"),
        (difference_of_bytes_and_shapes, "parameter 1 in another type on rank 0, rank 0: expected 1, got -1"),
    ],
    "sampler_indices": [
        (sampler_without_set_epoch, "sampler_indices(10, 3, 7, 3, 4), rank 0: expected [ ... got [4, 6, 0]"),
        (sampler_in_blocks, "sampler_indices(8, 0, 0, 1, 2), rank 0: expected [ ... got [2, 5, 1, 6]"),
        (sampler_without_padding, "sampler_indices(10, 3, 7, 3, 4), rank 0: expected [ ... got [1, 8]"),
        (sampler_that_drops, "sampler_indices(10, 3, 7, 3, 4), rank 0: expected [ ... got [1, 8]"),
        (sampler_padded_once, "sampler_indices(3, 1, 2, 7, 8), rank 0: expected [0], got []"),
        (sampler_from_rank_0, "sampler_indices(8, 0, 0, 1, 2), rank 0: expected nothing sent, got broadcast of 64"),
        (sampler_padded_with_the_last, "sampler_indices(10, 3, 7, 3, 4), rank 0: expected [ ... got [1, 8, 0]"),
        (sampler_seeded_by_rank, "sampler_indices(8, 0, 0, 1, 2), rank 0: expected [ ... got [4, 6, 3, 0]"),
    ],
    "exact_accuracy": [
        (accuracy_over_padding, "world size 2, 9 examples, rank 0: expected 0.33333333, got 0.4"),
        (accuracy_as_a_mean_of_accuracies, "world size 2, 9 examples, rank 0: expected 0.33333333, got 0.325"),
        (accuracy_of_this_rank, "world size 2, 8 examples, rank 0: expected 0.375, got 0.5"),
        (accuracy_above_one, "world size 2, 9 examples, rank 0: expected 0.33333333, got 0.44444444"),
        (accuracy_of_gathered, "expected all_reduce of at most 16 bytes, got all_gather of 8 bytes"),
        (accuracy_of_all_examples, "expected all_reduce of at most 16 bytes, got all_reduce of 64 bytes"),
        (accuracy_as_a_tensor, "expected float 0.375, got a tensor of shape () and type float32"),
        (accuracy_with_padding_on_the_last_rank, "world size 3, 10 examples, rank 0: expected 0.4, got 0.5"),
        (accuracy_of_means_with_weights, "world size 2, 1 example, rank 0: expected 1, got nan"),
        (accuracy_without_the_remainder, "1 example, rank 0: expected 1, got 0. ... depends on r"),
        (accuracy_as_a_whole_number, "8 examples, rank 0: expected 0.375, got 0. Three of eight"),
        (accuracy_of_two_all_reduces, "expected all_reduce of at most 16 bytes, ... one only"),
    ],
    "examples_of_step": [
        (examples_of_whole_batches, "examples_of_step(2, 4, 10, 0, 1, 2), rank 0: expected [ ... got [1, 2]"),
        (examples_by_turns, "examples_of_step(0, 4, 10, 0, 1, 2), rank 0: expected [ ... got [1, 5]"),
        (
            examples_with_a_batch_for_each_rank,
            "examples_of_step(0, 4, 10, 0, 1, 2), rank 0: expected [ ... got [3, 9, 0, 8]",
        ),
        (examples_of_one_epoch, "examples_of_step(2, 4, 10, 0, 1, 2), rank 0: expected [ ... got [4, 1]"),
        (examples_of_epoch_0, "examples_of_step(2, 4, 10, 0, 1, 2), rank 0: expected [ ... got [4, 1]"),
        (examples_of_seed_0, "examples_of_step(6, 6, 10, 3, 2, 3), rank 0: expected [5, 0], got [0, 4]"),
        (examples_of_two_epochs, "examples_of_step(1, 24, 10, 1, 3, 4), rank 0: expected [9, 6, 3, 5, 0, 2], got []"),
    ],
    "uneven_steps": [
        (uneven_until_the_own_end, "a deadlock, no answer for 5 s: rank 0 waiting in all_reduce, line"),
        (uneven_over_all_ranks, "3, 1 gradients on the ranks, rank 0: expected [2, 4, 6, 8, 10] as item 1, got [1, 2"),
        (
            uneven_until_the_first_end,
            "3, 1 gradients on the ranks, rank 0: expected [[5.5, 11, ... got [[5.5, 11, 16.5, 22, 27.5]]",
        ),
        (
            uneven_with_the_last_again,
            "3, 1 gradients on the ranks, rank 0: expected [2, 4, 6, 8, 10] as item 1 ... got [6, 12, 18, 24, 30]",
        ),
        (uneven_asked_before_each_step, "rank 0: expected at most 72 bytes sent by each rank ... got 232"),
        (uneven_as_long_as_rank_0, "0, 2 gradients on the ranks, rank 0: expected [[10, 20,  ... got []"),
    ],
    "speedup_and_efficiency": [
        (speedup_always_strong, "('weak', 4, 2.0, 2.5), rank 0: expected [3.2, 0.8], got [0.8, 0.2]"),
        (speedup_always_weak, "('strong', 4, 8.0, 2.5), rank 0: expected [3.2, 0.8], got [12.8, 3.2]"),
        (speedup_of_the_step_alone, "('weak', 4, 2.0, 2.5), rank 0: expected [3.2, 0.8], got [0.8, 0.8]"),
        (speedup_upside_down, "('strong', 4, 8.0, 2.5), rank 0: expected [3.2, 0.8], got [0.3125, 0.078125]"),
    ],
    "repaired_reducer": [
        (reducer_as_it_was, "size 2, gradient 1 used by nobody in step 1, rank 0: expected ... averaged again"),
        (reducer_that_asks_for_gradients, "one step, some unused, rank 0: expected ... counts as zeros"),
        (reducer_with_a_message_for_each, "expected all_reduce of 40 bytes, got all_reduce of 8 bytes, all_reduce"),
        (reducer_that_returns_its_places, "all used in two steps, rank 0: expected"),
        (reducer_that_leaves_unused_out_of_the_mean, "one step, some unused, rank 0: expected"),
    ],
    "cheapest_in_time": [
        (cheapest_however_long, "20.0), rank 0: expected 2 as item 1, got 1"),
        (cheapest_is_the_quickest, "30.0), rank 0: expected A as item 0, got B"),
        (cheapest_with_nothing_hidden, "20.0), rank 0: expected 24 as item 2, got 26"),
        (cheapest_with_everything_hidden, "10.0), rank 0: expected B as item 0, got A"),
        (cheapest_inside_nodes, "10.0), rank 0: expected B as item 0, got A"),
        (cheapest_by_the_price_of_an_hour, "10.0), rank 0: expected"),
    ],
}
