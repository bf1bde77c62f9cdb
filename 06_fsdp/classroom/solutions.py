"""Answers to the exercises of chapter 06, and after each the wrong answers that people really give.

The table WRONG at the end says for which reason the checker must refuse each wrong answer, and RIGHT which other
answers it must accept; the tests hold it to that. Nothing in the course imports this file except its test, so that
an instructor can leave it out.
"""

import math

import torch
import torch.distributed as dist
from torch.distributed.tensor import init_device_mesh

from course.fsdp.faulty import faulty_step
from planner import hardware, models
from planner.estimate import estimate
from planner.layout import make_layout


def rank_and_size():
    return dist.get_rank(), dist.get_world_size()


def flattened(tensors):
    vector = torch.cat([tensor.reshape(-1) for tensor in tensors])
    return torch.cat([vector, vector.new_zeros(-len(vector) % dist.get_world_size())])


def own(vector):
    rank, size = rank_and_size()
    return vector.chunk(size)[rank].clone()


def reduced(vector, group=None, size=None):
    """The sum over ranks of this rank's shard of a vector."""
    shard = vector.new_empty(len(vector) // (size or dist.get_world_size()))
    dist.reduce_scatter_single(shard, vector, group=group)
    return shard


# --- own_pieces -----------------------------------------------------------------------------------------------


def own_pieces(sizes, rank, world):
    each = -(-sum(sizes) // world)
    pieces, start = [], 0
    for index, size in enumerate(sizes):
        first, end = max(rank * each, start) - start, min((rank + 1) * each, start + size) - start
        if first < end:
            pieces.append([index, first, end])
        start += size
    return pieces


def pieces_of_the_vector(sizes, rank, world):
    starts = [sum(sizes[:index]) for index in range(len(sizes))]
    return [[i, starts[i] + first, starts[i] + end] for i, first, end in own_pieces(sizes, rank, world)]


def pieces_with_the_last_one(sizes, rank, world):
    return [[i, first, end - 1] for i, first, end in own_pieces(sizes, rank, world)]


def pieces_with_empty_ones(sizes, rank, world):
    found = {i: [i, first, end] for i, first, end in own_pieces(sizes, rank, world)}
    return [found.get(i, [i, 0, 0]) for i in range(len(sizes))]


def pieces_of_whole_parameters(sizes, rank, world):
    return [[i, 0, sizes[i]] for i, _, _ in own_pieces(sizes, rank, world)]


def pieces_rounded_down(sizes, rank, world):
    each = sum(sizes) // world
    return own_pieces([*sizes, each * world - sum(sizes)], rank, world)


# --- sharded_step ---------------------------------------------------------------------------------------------


def sharded_step(vector, gradient, moment, square, step, decay=0.01, divide=True):
    g = reduced(gradient)
    if divide:
        g = g / dist.get_world_size()
    moment, square = 0.9 * moment + 0.1 * g, 0.999 * square + 0.001 * g**2
    m, s = moment / (1 - 0.9**step), square / (1 - 0.999**step)
    shard = own(vector)
    shard = shard - 0.1 * decay * shard - 0.1 * m / (s.sqrt() + 1e-8)
    whole = torch.empty_like(vector)
    dist.all_gather_single(whole, shard)
    return whole, moment, square


def step_with_the_sum(vector, gradient, moment, square, step):
    """Adam's parameters hardly show it; its moments do."""
    return sharded_step(vector, gradient, moment, square, step, divide=False)


def step_without_decay(vector, gradient, moment, square, step):
    return sharded_step(vector, gradient, moment, square, step, decay=0)


def step_from_zero(vector, gradient, moment, square, step):
    return sharded_step(vector, gradient, moment, square, step + 1)


def step_always_the_first(vector, gradient, moment, square, step):
    return sharded_step(vector, gradient, moment, square, 1)


def step_and_keep_the_others_old(vector, gradient, moment, square, step):
    rank, size = rank_and_size()
    whole, moment, square = sharded_step(vector, gradient, moment, square, step)
    mixed = vector.clone()
    mixed.chunk(size)[rank].copy_(own(whole))
    return mixed, moment, square


def step_after_an_all_reduce(vector, gradient, moment, square, step):
    total = gradient.clone()
    dist.all_reduce(total)
    g = own(total) / dist.get_world_size()
    moment, square = 0.9 * moment + 0.1 * g, 0.999 * square + 0.001 * g**2
    m, s = moment / (1 - 0.9**step), square / (1 - 0.999**step)
    shard = own(vector) * (1 - 0.001) - 0.1 * m / (s.sqrt() + 1e-8)
    whole = torch.empty_like(vector)
    dist.all_gather_single(whole, shard)
    return whole, moment, square


def step_that_decays_afterwards(vector, gradient, moment, square, step):
    whole, moment, square = sharded_step(vector, gradient, moment, square, step, decay=0)
    return whole * (1 - 0.1 * 0.01), moment, square


def step_without_correction(vector, gradient, moment, square, step):
    return sharded_step(vector, gradient, moment, square, math.inf)


def step_that_returns_the_corrected(vector, gradient, moment, square, step):
    whole, moment, square = sharded_step(vector, gradient, moment, square, step)
    return whole, moment / (1 - 0.9**step), square / (1 - 0.999**step)


def step_of_the_shard_alone(vector, gradient, moment, square, step):
    whole, moment, square = sharded_step(vector, gradient, moment, square, step)
    return own(whole), moment, square


# --- global_norm ----------------------------------------------------------------------------------------------


def own_square(shards, lengths, skip_padding=True, once=True):
    rank, size = rank_and_size()
    square, seen = torch.zeros(()), set()
    for shard, length in zip(shards, lengths, strict=True):
        if once and id(shard) in seen:
            continue
        seen.add(id(shard))
        real = max(0, length - rank * len(shard)) if skip_padding else len(shard)
        square += shard[:real].square().sum()
    return square


def global_norm(shards, lengths):
    square = own_square(shards, lengths)
    dist.all_reduce(square)
    return square.sqrt().item()


def norm_in_float64(shards, lengths):
    """Right: the number that travels may have 8 bytes."""
    square = own_square(shards, lengths).double()
    dist.all_reduce(square)
    return square.sqrt().item()


def norm_of_this_rank(shards, lengths):
    return own_square(shards, lengths).sqrt().item()


def norm_as_a_sum_of_norms(shards, lengths):
    norm = own_square(shards, lengths).sqrt()
    dist.all_reduce(norm)
    return norm.item()


def norm_with_padding(shards, lengths):
    square = own_square(shards, lengths, skip_padding=False)
    dist.all_reduce(square)
    return square.sqrt().item()


def norm_with_the_shared_unit_twice(shards, lengths):
    square = own_square(shards, lengths, once=False)
    dist.all_reduce(square)
    return square.sqrt().item()


def norm_unit_by_unit(shards, lengths):
    total, seen = 0.0, set()
    for shard, length in zip(shards, lengths, strict=True):
        square = own_square([shard], [length])
        dist.all_reduce(square)
        total += square.item() * (id(shard) not in seen)
        seen.add(id(shard))
    return math.sqrt(total)


# --- accumulated_shard ----------------------------------------------------------------------------------------


def accumulated_shard(micro_gradients, keep_whole):
    total = len(micro_gradients) * dist.get_world_size()
    if keep_whole:
        return reduced(torch.stack(micro_gradients).sum(0)) / total
    shard = reduced(micro_gradients[0])
    for gradient in micro_gradients[1:]:
        shard = shard + reduced(gradient)
    return shard / total


def accumulated_always_at_the_end(micro_gradients, keep_whole):
    return accumulated_shard(micro_gradients, True)


def accumulated_always_one_by_one(micro_gradients, keep_whole):
    return accumulated_shard(micro_gradients, False)


def accumulated_and_overwritten(micro_gradients, keep_whole):
    for gradient in micro_gradients:
        shard = reduced(gradient) / dist.get_world_size()
    return shard


def accumulated_as_a_sum(micro_gradients, keep_whole):
    return accumulated_shard(micro_gradients, keep_whole) * len(micro_gradients)


def accumulated_and_reduced_again(micro_gradients, keep_whole):
    """The sum so far goes through the reduce-scatter with every micro-batch: the first ones count several times."""
    total, so_far = 0, torch.zeros_like(micro_gradients[0])
    for gradient in micro_gradients:
        so_far = so_far + gradient
        total = total + reduced(so_far)
    return total / (len(micro_gradients) * dist.get_world_size())


# --- kept_bytes -----------------------------------------------------------------------------------------------


def kept_bytes(strategy, parameters, ranks, mixed):
    sizes = [2, 2, 12] if mixed else [4, 4, 8]
    cut = {"ddp": 0, "zero1": 1, "zero2": 2, "fsdp": 3}[strategy]
    return [size * parameters / (ranks if place >= 3 - cut else 1) for place, size in enumerate(sizes)]


def kept_without_float32_parameters(strategy, parameters, ranks, mixed):
    parts = kept_bytes(strategy, parameters, ranks, mixed)
    return [*parts[:2], parts[2] * 8 / 12] if mixed else parts


def kept_cut_from_the_front(strategy, parameters, ranks, mixed):
    sizes = [2, 2, 12] if mixed else [4, 4, 8]
    cut = {"ddp": 0, "zero1": 1, "zero2": 2, "fsdp": 3}[strategy]
    return [size * parameters / (ranks if place < cut else 1) for place, size in enumerate(sizes)]


def kept_all_cut(strategy, parameters, ranks, mixed):
    return kept_bytes("fsdp", parameters, ranks, mixed)


def kept_one_moment(strategy, parameters, ranks, mixed):
    parts = kept_bytes(strategy, parameters, ranks, mixed)
    return parts if mixed else [*parts[:2], parts[2] / 2]


def kept_with_gradients_whole(strategy, parameters, ranks, mixed):
    return kept_bytes("zero1" if strategy == "zero2" else strategy, parameters, ranks, mixed)


def kept_with_parameters_whole(strategy, parameters, ranks, mixed):
    return kept_bytes("zero2" if strategy == "fsdp" else strategy, parameters, ranks, mixed)


def kept_with_a_master_copy_on_every_rank(strategy, parameters, ranks, mixed):
    """As if only the two averages were sharded, and float32 parameters were not."""
    parts = kept_bytes(strategy, parameters, ranks, mixed)
    return [*parts[:2], parts[2] * 8 / 12 + 4 * parameters] if mixed and strategy != "ddp" else parts


# --- sent_in_a_step -------------------------------------------------------------------------------------------


def sent_in_a_step(strategy, parameters, ranks, accumulation):
    times = {"ddp": 2, "zero1": 2, "zero2": accumulation + 1, "fsdp": 3 * accumulation}[strategy]
    return times * 4 * parameters * (ranks - 1) / ranks


def sent_in_one_micro_batch(strategy, parameters, ranks, accumulation):
    return sent_in_a_step(strategy, parameters, ranks, 1)


def sent_in_elements(strategy, parameters, ranks, accumulation):
    return sent_in_a_step(strategy, parameters, ranks, accumulation) / 4


def sent_without_the_share(strategy, parameters, ranks, accumulation):
    return sent_in_a_step(strategy, parameters, ranks, accumulation) * ranks / (ranks - 1) if ranks > 1 else 0


def sent_and_accumulated_by_all(strategy, parameters, ranks, accumulation):
    return sent_in_a_step(strategy, parameters, ranks, 1) * accumulation


def sent_with_parameters_gathered_once(strategy, parameters, ranks, accumulation):
    sent = sent_in_a_step(strategy, parameters, ranks, accumulation)
    return sent * 2 / 3 if strategy == "fsdp" else sent


def sent_by_zero1_in_each_micro_batch(strategy, parameters, ranks, accumulation):
    return sent_in_a_step("zero2" if strategy == "zero1" else strategy, parameters, ranks, accumulation)


def sent_with_parameters_kept_between(strategy, parameters, ranks, accumulation):
    """As if parameters were gathered for the first micro-batch and kept for the others."""
    if strategy != "fsdp":
        return sent_in_a_step(strategy, parameters, ranks, accumulation)
    return (2 + accumulation) * 4 * parameters * (ranks - 1) / ranks


# --- gathered_peak --------------------------------------------------------------------------------------------


def gathered_peak(units, ahead, reshard):
    moments = []
    for u, size in enumerate(units):
        before = 0 if not reshard else u
        moments.append(sum(units[before : u + ahead + 1]))
        behind = max(0, u - ahead) if reshard else 0
        moments.append(sum(units[behind : u + 1]) + size)
    return max(moments)


def peak_of_the_forward_pass(units, ahead, reshard):
    return max(sum(units[u if reshard else 0 : u + ahead + 1]) for u in range(len(units)))


def peak_without_gradients(units, ahead, reshard):
    return max(sum(units[max(0, u - ahead) if reshard else 0 : u + 1]) for u in range(len(units)))


def peak_of_the_largest(units, ahead, reshard):
    return 2 * max(units)


def peak_of_everything(units, ahead, reshard):
    return 2 * sum(units)


def peak_always_resharded(units, ahead, reshard):
    return gathered_peak(units, ahead, True)


def peak_always_one_ahead(units, ahead, reshard):
    return gathered_peak(units, 1, reshard)


def peak_with_one_ahead_at_most(units, ahead, reshard):
    return gathered_peak(units, min(ahead, 1), reshard)


# --- full_state -----------------------------------------------------------------------------------------------


def full_state(shards, shapes, turn=lambda parts: parts):
    rank, size = rank_and_size()
    whole = []
    for shard, shape in zip(shards, shapes, strict=True):
        if rank:
            if len(shard):
                dist.send(shard, 0)
            continue
        each, parts = -(-shape[0] // size), [shard]
        for source in range(1, size):
            rows = min(each, shape[0] - source * each)
            if rows > 0:
                parts.append(torch.empty(rows, *shape[1:], dtype=shard.dtype))
                dist.recv(parts[-1], source)
        whole.append(torch.cat(turn(parts)))
    return None if rank else whole


def state_of_rank_0_alone(shards, shapes):
    return [shard.clone() for shard in shards] if dist.get_rank() == 0 else None


def state_in_the_wrong_order(shards, shapes):
    return full_state(shards, shapes, turn=lambda parts: parts[::-1])


def state_on_every_rank(shards, shapes):
    whole = full_state(shards, shapes)
    return whole or [shard.new_zeros(shape) for shard, shape in zip(shards, shapes, strict=True)]


def state_gathered_everywhere(shards, shapes):
    """Every rank holds the whole for a moment, which it may have no room for."""
    rank, size = rank_and_size()
    whole = []
    for shard, shape in zip(shards, shapes, strict=True):
        each = -(-shape[0] // size)
        padded = torch.cat([shard, shard.new_zeros(each - len(shard), *shape[1:])])
        vector = shard.new_empty(each * size, *shape[1:])
        dist.all_gather_single(vector, padded)
        whole.append(vector[: shape[0]].clone())
    return None if rank else whole


def state_with_equal_shards(shards, shapes):
    """Takes it that all ranks have as many rows as rank 0: the last ones have fewer, or none to send."""
    rank, size = rank_and_size()
    whole = []
    for shard in shards:
        if rank:
            dist.send(shard, 0)
            continue
        parts = [shard, *(torch.empty_like(shard) for _ in range(size - 1))]
        for source in range(1, size):
            dist.recv(parts[source], source)
        whole.append(torch.cat(parts))
    return None if rank else whole


# --- checkpoint_sources ---------------------------------------------------------------------------------------


def rows_of(rows, sizes, rank):
    shard, tensor = divmod(rank, sizes[1])
    own = rows // (sizes[0] * sizes[1])
    first = tensor * (rows // sizes[1]) + shard * own
    return range(first, first + own)


def checkpoint_sources(rows, saved, loaded, rank):
    needed = set(rows_of(rows, loaded, rank))
    return [source for source in range(saved[0] * saved[1]) if needed & set(rows_of(rows, saved, source))]


def sources_in_the_order_of_ranks(rows, saved, loaded, rank):
    need, have = rows // (loaded[0] * loaded[1]), rows // (saved[0] * saved[1])
    return list(range(rank * need // have, ((rank + 1) * need - 1) // have + 1))


def source_of_the_first_row(rows, saved, loaded, rank):
    return checkpoint_sources(rows, saved, loaded, rank)[:1]


def sources_in_the_order_of_rows(rows, saved, loaded, rank):
    sources = checkpoint_sources(rows, saved, loaded, rank)
    return sorted(sources, key=lambda source: rows_of(rows, saved, source)[0])


def sources_with_shard_fastest(rows, saved, loaded, rank):
    tensor, shard = divmod(rank, loaded[0])
    return checkpoint_sources(rows, saved, loaded, shard * loaded[1] + tensor)


# --- hybrid_gradient ------------------------------------------------------------------------------------------


def hybrid_gradient(gradient, replicas, rows=0, columns=1, across=True, divisor=None):
    columns_of_mesh = dist.get_world_size() // replicas
    mesh = init_device_mesh("cpu", (replicas, columns_of_mesh))
    shard = reduced(gradient, mesh.get_group(columns), columns_of_mesh)
    if across:
        dist.all_reduce(shard, group=mesh.get_group(rows))
    return shard / (divisor or dist.get_world_size())


def hybrid_inside_alone(gradient, replicas):
    return hybrid_gradient(gradient, replicas, across=False, divisor=2)


def hybrid_groups_swapped(gradient, replicas):
    return hybrid_gradient(gradient, replicas, rows=1, columns=0)


def hybrid_mean_of_a_row(gradient, replicas):
    return hybrid_gradient(gradient, replicas, divisor=2)


def hybrid_over_all_ranks(gradient, replicas):
    total = gradient.clone()
    dist.all_reduce(total)
    columns = dist.get_world_size() // replicas
    return (total / dist.get_world_size()).chunk(columns)[dist.get_rank() % columns].clone()


def hybrid_across_first(gradient, replicas):
    """The same result, with twice the bytes between nodes, where the links are slow."""
    mesh = init_device_mesh("cpu", (replicas, dist.get_world_size() // replicas))
    total = gradient.clone()
    dist.all_reduce(total, group=mesh.get_group(0))
    return reduced(total, mesh.get_group(1), mesh.size(1)) / dist.get_world_size()


# --- scaled_step ----------------------------------------------------------------------------------------------


def scaled_step(shard, scale, good, interval):
    overflow = torch.tensor(float(not shard.isfinite().all()))
    dist.all_reduce(overflow)
    return stepped(shard, scale, good, interval, overflow > 0)


def stepped(shard, scale, good, interval, overflow):
    if overflow:
        return None, scale / 2, 0
    return (shard / scale, scale * 2, 0) if good + 1 == interval else (shard / scale, scale, good + 1)


def scaled_by_a_maximum(shard, scale, good, interval):
    """Right: whether anybody overflowed is a maximum, too."""
    overflow = (~shard.isfinite()).any().long()
    dist.all_reduce(overflow, dist.ReduceOp.MAX)
    return stepped(shard, scale, good, interval, overflow > 0)


def scaled_by_each_rank_alone(shard, scale, good, interval):
    return stepped(shard, scale, good, interval, not shard.isfinite().all())


def scaled_by_the_sum_of_elements(shard, scale, good, interval):
    """The sum of finite numbers may not be finite."""
    total = shard.sum()
    dist.all_reduce(total)
    return stepped(shard, scale, good, interval, not total.isfinite())


def scaled_with_nan_forgotten(shard, scale, good, interval):
    """What is not a number is not infinite either."""
    overflow = shard.isinf().any().float()
    dist.all_reduce(overflow)
    return stepped(shard, scale, good, interval, overflow > 0)


def scaled_by_the_largest_element(shard, scale, good, interval):
    """Minus infinity is not the largest."""
    overflow = torch.tensor(float(not shard.max().isfinite()))
    dist.all_reduce(overflow)
    return stepped(shard, scale, good, interval, overflow > 0)


def scaled_and_not_counted(shard, scale, good, interval):
    gradient, scale, then = scaled_step(shard, scale, good, interval)
    return gradient, scale, max(0, then - 1)


def scaled_and_never_grown(shard, scale, good, interval):
    """Counting this step, `good` has reached the interval: now the scale is doubled."""
    gradient, scale, _ = scaled_step(shard, scale, good, math.inf)
    return gradient, scale, 0 if gradient is None else good + 1


def scaled_and_grown_at_once(shard, scale, good, interval):
    """The doubled scale is for the next step; this gradient was scaled by the old one."""
    gradient, scale, good = scaled_step(shard, scale, good, interval)
    return None if gradient is None else shard / scale, scale, good


def scaled_and_not_started_again(shard, scale, good, interval):
    """After a step that is skipped, `good` begins again at 0."""
    gradient, scale, then = scaled_step(shard, scale, good, interval)
    return gradient, scale, good if gradient is None else then


# --- recomputed -----------------------------------------------------------------------------------------------


def recomputed(blocks, every, activations, boundary, seconds):
    if every == 0:
        return blocks * activations, 3 * blocks * seconds
    return blocks // every * boundary + every * activations - boundary, 4 * blocks * seconds


def recomputed_with_an_input_twice(blocks, every, activations, boundary, seconds):
    memory, time = recomputed(blocks, every, activations, boundary, seconds)
    return memory + boundary * (every > 0), time


def recomputed_for_nothing(blocks, every, activations, boundary, seconds):
    return recomputed(blocks, every, activations, boundary, seconds)[0], 3 * blocks * seconds


def recomputed_with_inputs_alone(blocks, every, activations, boundary, seconds):
    memory, time = recomputed(blocks, every, activations, boundary, seconds)
    return blocks // every * boundary if every else memory, time


def recomputed_with_an_input_of_every_block(blocks, every, activations, boundary, seconds):
    """In a segment only the first block's input is kept."""
    memory, time = recomputed(blocks, every, activations, boundary, seconds)
    return memory + (blocks - blocks // every) * boundary if every else memory, time


def recomputed_everything_twice(blocks, every, activations, boundary, seconds):
    return recomputed(blocks, every, activations, boundary, seconds)[0], (6 if every else 3) * blocks * seconds


def recomputed_as_many_segments(blocks, every, activations, boundary, seconds):
    return recomputed(blocks, blocks // every if every else 0, activations, boundary, seconds)


# --- micro_batch_for ------------------------------------------------------------------------------------------


def micro_batch_for(budget, kept, example, batch, ranks):
    each = batch // ranks
    for micro in range(each, 0, -1):
        if each % micro == 0 and kept + micro * example <= budget:
            return micro, each // micro
    return 0, 0


def micro_batch_that_does_not_divide(budget, kept, example, batch, ranks):
    fits = max(0, budget - kept) // example
    micro = min(fits, batch // ranks)
    return (micro, -(-batch // ranks // micro)) if micro else (0, 0)


def micro_batch_of_all_ranks(budget, kept, example, batch, ranks):
    return micro_batch_for(budget, kept, example, batch, 1)


def micro_batch_with_nothing_kept(budget, kept, example, batch, ranks):
    return micro_batch_for(budget, 0, example, batch, ranks)


def micro_batch_with_a_byte_to_spare(budget, kept, example, batch, ranks):
    return micro_batch_for(budget - 1, kept, example, batch, ranks)


def micro_batch_of_one_at_least(budget, kept, example, batch, ranks):
    return micro_batch_for(max(budget, kept + example), kept, example, batch, ranks)


def micro_batch_a_power_of_two(budget, kept, example, batch, ranks):
    each = batch // ranks
    sizes = [2**k for k in range(20) if each % 2**k == 0 and kept + 2**k * example <= budget]
    return (sizes[-1], each // sizes[-1]) if sizes else (0, 0)


# --- fewest_ranks ---------------------------------------------------------------------------------------------


def fewest_ranks(strategy, parameters, activations, budget):
    for power in range(40):
        if sum(kept_bytes(strategy, parameters, 2**power, True)) + activations <= budget:
            return 2**power
    return 0


def ranks_with_everything_cut(strategy, parameters, activations, budget):
    return fewest_ranks("fsdp", parameters, activations, budget)


def ranks_without_activations(strategy, parameters, activations, budget):
    return fewest_ranks(strategy, parameters, 0, budget)


def ranks_with_gradients_whole(strategy, parameters, activations, budget):
    return fewest_ranks("zero1" if strategy == "zero2" else strategy, parameters, activations, budget)


def ranks_that_cut_activations_too(strategy, parameters, activations, budget):
    for power in range(40):
        if sum(kept_bytes(strategy, parameters, 2**power, True)) + activations / 2**power <= budget:
            return 2**power
    return 0


def ranks_with_a_byte_to_spare(strategy, parameters, activations, budget):
    return fewest_ranks(strategy, parameters, activations, budget - 1)


def ranks_by_division(strategy, parameters, activations, budget):
    """Right for stage 3 alone, and not a power of two."""
    return -(-16 * parameters // (budget - activations)) if budget > activations else 0


# --- fit_on_four_cards ----------------------------------------------------------------------------------------


def fit_on_four_cards():
    return 3, 1, 8, "full", True


def cards_with_smaller_micro_batches():
    """Right: quick enough, and lighter."""
    return 3, 1, 4, "full", True


def cards_without_offload():
    return 3, 1, 1, "full", False


def cards_with_tensor_parallelism():
    return 0, 4, 4, "none", True


def cards_with_two_copies_in_the_machine():
    """Offloaded, but not sharded: each pair of cards has an optimizer of its own in the machine's memory."""
    return 0, 2, 1, "none", True


def cards_with_small_micro_batches():
    return 3, 1, 1, "none", True


def cards_filled_to_the_brim():
    return 2, 2, 2, "none", True


def cards_with_three_ranks():
    return 3, 3, 1, "full", True


# --- best_offer -----------------------------------------------------------------------------------------------


def best_offer(model, offers, sequence, fits=("yes",)):
    prices = []
    for gpu, gpus, dollars in offers:
        shape, cluster = models.find(model), hardware.cluster(gpu, gpus)
        layout = make_layout(
            shape, cluster, {"shard": gpus}, batch_size=gpus, sequence=sequence, zero_stage=3, recompute="full"
        )
        found = estimate(shape, cluster, layout)
        if found.fits in fits:
            prices.append((dollars * gpus / 3600 / found.tokens_per_second * 1e9, gpu))
    return min(prices)[::-1] if prices else None


def offer_that_does_not_fit(model, offers, sequence):
    return best_offer(model, offers, sequence, ("yes", "tight", "no"))


def offer_that_fits_tightly(model, offers, sequence):
    return best_offer(model, offers, sequence, ("yes", "tight"))


def offer_by_the_hour(model, offers, sequence):
    if best_offer(model, offers, sequence) is None:
        return None
    cheapest = min(offers, key=lambda offer: offer[1] * offer[2])
    return best_offer(model, [cheapest], sequence, ("yes", "tight", "no"))


def offer_for_one_gpu(model, offers, sequence):
    best = best_offer(model, offers, sequence)
    return best and (best[0], best[1] / next(gpus for gpu, gpus, _ in offers if gpu == best[0]))


def offer_if_there_is_one(model, offers, sequence):
    best = best_offer(model, offers, sequence)
    return best[0], best[1]


# --- repaired_decay -------------------------------------------------------------------------------------------


def repaired_decay(parameters, gradients, decays, rate, decay, mask_of=lambda p, on: torch.full_like(p, on), mean=True):
    rank, size = rank_and_size()
    length, mask = sum(p.numel() for p in parameters), map(mask_of, parameters, map(float, decays))
    vector, gradient, mask = (flattened(tensors) for tensors in (parameters, gradients, [*mask]))  # and padded
    shard, on = vector.chunk(size)[rank].clone(), mask.chunk(size)[rank]
    own = torch.empty_like(shard)
    dist.reduce_scatter_single(own, gradient)
    shard -= rate * (own / (size if mean else 1) + decay * on * shard)
    dist.all_gather_single(vector, shard)
    pieces = vector[:length].split([p.numel() for p in parameters])
    return [piece.view_as(p) for piece, p in zip(pieces, parameters, strict=True)]


def decay_as_it_was(*arguments):
    return faulty_step(*arguments)


def decay_of_everything(*arguments):
    return repaired_decay(*arguments, mask_of=lambda p, on: torch.ones_like(p))


def decay_of_nothing(*arguments):
    return repaired_decay(*arguments, mask_of=lambda p, on: torch.zeros_like(p))


def decay_of_summed_gradients(*arguments):
    return repaired_decay(*arguments, mean=False)


def decay_on_every_rank(parameters, gradients, decays, rate, decay):
    """Right, and no longer sharded."""
    average = torch.cat([gradient.flatten() for gradient in gradients])
    dist.all_reduce(average)
    pieces = (average / dist.get_world_size()).split([p.numel() for p in parameters])
    return [p - rate * (g.view_as(p) + decay * on * p) for p, g, on in zip(parameters, pieces, decays, strict=True)]


# exercise -> other answers that are right, and must be accepted
RIGHT = {
    "global_norm": [norm_in_float64],
    "scaled_step": [scaled_by_a_maximum],
    "fit_on_four_cards": [cards_with_smaller_micro_batches],
}

# exercise -> (wrong answer, words that the checker's verdict must contain; " ... " is for any words between)
WRONG = {
    "own_pieces": [
        (
            pieces_of_the_vector,
            "own_pieces([3, 4, 1], 0, 2), rank 0: expected [[0, 0, 3], [1, 0, 1]], got [[0, 0, 3], ",
        ),
        (
            pieces_with_the_last_one,
            "own_pieces([3, 4, 1], 0, 2), rank 0: expected [[0, 0, 3], [1, 0, 1]], got [[0, 0, ",
        ),
        (
            pieces_with_empty_ones,
            "own_pieces([3, 4, 1], 0, 2), rank 0: expected [[0, 0, 3], [1, 0, 1]], got [[0, 0, 3]",
        ),
        (
            pieces_of_whole_parameters,
            "own_pieces([3, 4, 1], 0, 2), rank 0: expected [[0, 0, 3], [1, 0, 1]], got [[0, 0",
        ),
        (pieces_rounded_down, "own_pieces([5, 4], 3, 4), rank 0: expected [], got [[1, 1, 3]]"),
    ],
    "sharded_step": [
        (step_with_the_sum, "rank 0: expected [-0.10460285, -0.018566794] as item 1, got [-0.2092057"),
        (step_without_decay, "0.52069601] as item 0, got [0.7613"),
        (step_from_zero, "0.52069601] as item 0, got [0.7351"),
        (step_and_keep_the_others_old, "0.52069601] as item 0, got [0.76069082, 0.36665717, 0.0616"),
        (
            step_after_an_all_reduce,
            "expected reduce_scatter of 32 bytes, all_gather of 32 bytes, got all_reduce of 32 b",
        ),
        (step_always_the_first, "3 elements for each rank, step 10, rank 0: expected [0.6620118 ... got [0.6634"),
        (step_that_decays_afterwards, "0.52069601] as item 0, got [0.76059 ... before the step"),
        (step_without_correction, "0.52069601] as item 0, got [0.97691849 ... divided by 1 - 0.9**step"),
        (step_that_returns_the_corrected, "as item 1, got [-1.0460285 ... without the correction"),
        (step_of_the_shard_alone, "as item 0, got a tensor of shape (2,) ... makes the whole vector again"),
    ],
    "global_norm": [
        (norm_of_this_rank, "two units that need no padding, rank 0: expected 6.6332496, got 4.69041"),
        (norm_as_a_sum_of_norms, "two units that need no padding, rank 0: expected 6.6332496, got 9.3808"),
        (norm_with_padding, "two units with padding, rank 0: expected 6.244998, got 141.559"),
        (norm_with_the_shared_unit_twice, "a unit that two modules share, rank 0: expected 6.164414, got 7.61577"),
        (norm_unit_by_unit, "expected all_reduce of at most 8 bytes, got all_reduce of 4 bytes, all_reduce of 4 bytes"),
    ],
    "accumulated_shard": [
        (
            accumulated_always_at_the_end,
            "3 micro-batches, keep_whole False, rank 0: expected reduce_scatter of 16 bytes, ... got reduce_scatter",
        ),
        (
            accumulated_always_one_by_one,
            "keep_whole True, rank 0: expected reduce_scatter of 16 bytes, got reduce_scatt",
        ),
        (accumulated_and_overwritten, "3 micro-batches, keep_whole True, rank 0: expected [11, 22], got [16.5, 33]"),
        (accumulated_as_a_sum, "3 micro-batches, keep_whole True, rank 0: expected [11, 22], got [33, 66]"),
        (
            accumulated_and_reduced_again,
            "3 micro-batches, keep_whole True, rank 0: expected [11, 22], got [18.333334, ",
        ),
    ],
    "kept_bytes": [
        (kept_without_float32_parameters, "rank 0: expected [1.5e+10, 1.5e+10, 9e+10], got [1.5e+10, 1.5e+10, 6e+10]"),
        (kept_cut_from_the_front, "rank 0: expected [4000, 4000, 2000], got [1000, 4000, 8000]"),
        (kept_all_cut, "rank 0: expected [4000, 4000, 8000], got [1000, 1000, 2000]"),
        (kept_one_moment, "rank 0: expected [4000, 4000, 8000], got [4000, 4000, 4000]"),
        (
            kept_with_gradients_whole,
            "kept_bytes('zero2', 1000, 4, False), rank 0: expected [4000, 1000, 2000], got [4000, 4000,",
        ),
        (
            kept_with_parameters_whole,
            "kept_bytes('fsdp', 1000, 4, False), rank 0: expected [1000, 1000, 2000], got [4000, 1000, 2000]",
        ),
        (
            kept_with_a_master_copy_on_every_rank,
            "kept_bytes('zero1', 7500000000, 64, True), rank 0: expected ... got [1.5e+10, 1.5e+10, 3.093",
        ),
    ],
    "sent_in_a_step": [
        (sent_in_one_micro_batch, "sent_in_a_step('zero2', 1000, 4, 3), rank 0: expected 12000, got 6000"),
        (sent_in_elements, "sent_in_a_step('ddp', 1000, 2, 1), rank 0: expected 4000, got 1000"),
        (sent_without_the_share, "sent_in_a_step('ddp', 1000, 2, 1), rank 0: expected 4000, got 8000"),
        (sent_and_accumulated_by_all, "sent_in_a_step('ddp', 1000, 4, 3), rank 0: expected 6000, got 18000"),
        (sent_with_parameters_gathered_once, "sent_in_a_step('fsdp', 1000, 4, 1), rank 0: expected 9000, got 6000"),
        (sent_by_zero1_in_each_micro_batch, "sent_in_a_step('zero1', 1000, 4, 3), rank 0: expected 6000, got 12000"),
        (sent_with_parameters_kept_between, "sent_in_a_step('fsdp', 1000, 4, 3), rank 0: expected 27000, got 15000"),
    ],
    "gathered_peak": [
        (peak_of_the_forward_pass, "gathered_peak([2, 4, 1], 1, True), rank 0: expected 10, got 6"),
        (peak_without_gradients, "gathered_peak([2, 4, 1], 1, True), rank 0: expected 10, got 6"),
        (peak_of_the_largest, "gathered_peak([2, 4, 1], 1, True), rank 0: expected 10, got 8"),
        (peak_of_everything, "gathered_peak([2, 4, 1], 1, True), rank 0: expected 10, got 14"),
        (peak_always_resharded, "gathered_peak([1, 1, 1, 1, 1, 3], 1, False), rank 0: expected 11, got 7"),
        (peak_always_one_ahead, "gathered_peak([2, 4, 1], 0, True), rank 0: expected 8, got 10"),
        (peak_with_one_ahead_at_most, "gathered_peak([10, 1, 12], 2, True), rank 0: expected 35, got 25"),
    ],
    "full_state": [
        (
            state_of_rank_0_alone,
            "rows that N divides, rank 0: expected a tensor of shape (4, 3) ... got a tensor of shape (2, 3)",
        ),
        (
            state_in_the_wrong_order,
            "world size 2, rows that N divides, rank 0: expected [[1, 2, 3], ... got [[7, 8, 9], [10, 11, 12]",
        ),
        (state_on_every_rank, "rank 1: expected None, got list"),
        (state_gathered_everywhere, "expected only sends and receives, got a call of all_gather"),
        (state_with_equal_shards, "world size 2, 5 rows, and 2 ... got receives of ["),
    ],
    "checkpoint_sources": [
        (sources_in_the_order_of_ranks, "checkpoint_sources(8, (2, 2), (4, 1), 1), rank 0: expected [2], got [1]"),
        (source_of_the_first_row, "checkpoint_sources(8, (2, 2), (2, 1), 0), rank 0: expected [0, 2], got [0]"),
        (
            sources_in_the_order_of_rows,
            "checkpoint_sources(8, (2, 2), (1, 1), 0), rank 0: expected [0, 1, 2, 3], got [0, 2, 1, 3]",
        ),
        (sources_with_shard_fastest, "checkpoint_sources(8, (2, 2), (2, 2), 1), rank 0: expected [1], got [2]"),
    ],
    "hybrid_gradient": [
        (hybrid_inside_alone, "world size 4, 2 elements, 2 replicas, rank 0: expected [277.75], got [5.5]"),
        (hybrid_groups_swapped, "world size 4, 2 elements, 2 replicas, rank 1: expected [555.5], got [277.75]"),
        (hybrid_mean_of_a_row, "world size 4, 2 elements, 2 replicas, rank 0: expected [277.75], got [555.5]"),
        (hybrid_over_all_ranks, "4 bytes among 2 ranks, got all_reduce of 8 bytes among 4 ranks"),
        (hybrid_across_first, "got all_reduce of 8 bytes among 2 ranks, reduce_scatter of 8 bytes among 2 ranks"),
    ],
    "scaled_step": [
        (
            scaled_by_each_rank_alone,
            "an element of rank 1 is infinite, rank 0: expected None as item 0 ... got a tensor of shape (3,)",
        ),
        (
            scaled_by_the_sum_of_elements,
            "elements of 3e38, rank 0: expected a tensor of shape (4,) and type float32 ... got None",
        ),
        (
            scaled_with_nan_forgotten,
            "is not a number, rank 0: expected None as item 0 ... got a tensor of shape (3,)",
        ),
        (scaled_and_never_grown, "good 9, interval 10, rank 0: expected 2048 as item 1, got 1024"),
        (
            scaled_and_grown_at_once,
            "good 9, interval 10, rank 0: expected [0.0009765625, 0.001953125, 0.0029296875] as ... got [0.0004",
        ),
        (scaled_and_not_started_again, "is infinite, rank 0: expected 0 as item 2, got 9"),
        (
            scaled_by_the_largest_element,
            "an element of rank 1 is minus infinity, rank 0: expected None as item 0, got a tensor of shape (3,)",
        ),
        (scaled_and_not_counted, "all finite, scale 1024, good 3, interval 10, rank 0: expected 4 as item 2, got 3"),
    ],
    "recomputed": [
        (recomputed_with_an_input_twice, "recomputed(12, 1, 100, 10, 1.0), rank 0: expected [210, 48], got [220, 48]"),
        (recomputed_for_nothing, "recomputed(12, 1, 100, 10, 1.0), rank 0: expected [210, 48], got [210, 36]"),
        (recomputed_with_inputs_alone, "recomputed(12, 1, 100, 10, 1.0), rank 0: expected [210, 48], got [120, 48]"),
        (recomputed_everything_twice, "recomputed(12, 1, 100, 10, 1.0), rank 0: expected [210, 48], got [210, 72]"),
        (recomputed_as_many_segments, "recomputed(12, 1, 100, 10, 1.0), rank 0: expected [210, 48], got [1200, 48]"),
        (
            recomputed_with_an_input_of_every_block,
            "recomputed(12, 4, 100, 10, 1.0), rank 0: expected [420, 48], got [510, 48]",
        ),
    ],
    "micro_batch_for": [
        (
            micro_batch_that_does_not_divide,
            "micro_batch_for(1000, 200, 100, 24, 2), rank 0: expected [6, 2], got [8, 2",
        ),
        (micro_batch_of_all_ranks, "micro_batch_for(1000, 200, 100, 24, 2), rank 0: expected [6, 2], got [8, 3]"),
        (micro_batch_with_nothing_kept, "micro_batch_for(1000, 950, 100, 8, 4), rank 0: expected [0, 0], got [2, 1]"),
        (
            micro_batch_with_a_byte_to_spare,
            "micro_batch_for(1000, 200, 100, 32, 1), rank 0: expected [8, 4], got [4, 8",
        ),
        (micro_batch_of_one_at_least, "micro_batch_for(1000, 950, 100, 8, 4), rank 0: expected [0, 0], got [1, 2]"),
        (micro_batch_a_power_of_two, "micro_batch_for(1000, 200, 100, 24, 2), rank 0: expected [6, 2], got [4, 3]"),
    ],
    "fewest_ranks": [
        (ranks_with_everything_cut, "fewest_ranks('ddp', 7500000000, 0, 80000000000), rank 0: expected 0, got 2"),
        (
            ranks_without_activations,
            "fewest_ranks('zero1', 7500000000, 10000000000, 80000000000), rank 0: expected 4, got 2",
        ),
        (
            ranks_that_cut_activations_too,
            "fewest_ranks('zero1', 7500000000, 10000000000, 80000000000), rank 0: expected 4, got 2",
        ),
        (ranks_with_a_byte_to_spare, "fewest_ranks('ddp', 750000000, 0, 12000000000), rank 0: expected 1, got 0"),
        (ranks_by_division, "fewest_ranks('ddp', 7500000000, 0, 80000000000), rank 0: expected 0, got 2"),
        (
            ranks_with_gradients_whole,
            "fewest_ranks('zero2', 7500000000, 50000000000, 80000000000), rank 0: expected 8, got 0",
        ),
    ],
    "fit_on_four_cards": [
        (cards_without_offload, "got fits: no ("),
        (cards_with_tensor_parallelism, "got fits: tight (20 GiB), 194 GiB"),
        (cards_with_two_copies_in_the_machine, "expected fits: yes, at most 256 GiB ... 388 GiB of the machine's own"),
        (cards_with_small_micro_batches, "got fits: yes (17 GiB)"),
        (cards_filled_to_the_brim, "got fits: no (28 GiB)"),
        (cards_with_three_ranks, "expected a layout that the planner takes ... got --mesh"),
    ],
    "best_offer": [
        (offer_that_does_not_fit, "expected h100-80gb as item 0, got a100-40gb"),
        (offer_that_fits_tightly, "expected a100-80gb as item 0, got l4"),
        (offer_by_the_hour, "expected h100-80gb as item 0, got rtx-4090"),
        (offer_for_one_gpu, "as item 1, got"),
        (
            offer_if_there_is_one,
            "expected a result on every rank, got TypeError",
        ),
    ],
    "repaired_decay": [
        (decay_as_it_was, "world size 2, 7 and 6 elements, ... cut at different places"),
        (decay_of_everything, "nothing to pad, rank 0: expected ... as item 1, got"),
        (decay_of_nothing, "nothing to pad, rank 0: expected ... as item 0, got"),
        (decay_of_summed_gradients, "world size 2, nothing to pad, rank 0: expected"),
        (
            decay_on_every_rank,
            "expected reduce_scatter of 48 bytes, all_gather of 48 bytes, got all_reduce of 48",
        ),
    ],
}
