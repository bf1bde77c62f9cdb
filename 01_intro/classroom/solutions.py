"""Answers to the exercises of chapter 01, and after each the wrong answers that people really give.

The table WRONG at the end says for which reason the checker must refuse each wrong answer, and RIGHT which other
answers it must accept; the tests hold it to that. Nothing in the course imports this file except its test, so that
an instructor can leave it out.
"""

import math

import torch
import torch.distributed as dist

from course.intro.faulty import faulty_training


def exchange(outgoing: torch.Tensor, to: int, incoming: torch.Tensor, source: int) -> None:
    """Send and receive at once. Batched, so that NCCL does not deadlock on it either."""
    operations = [dist.P2POp(dist.isend, outgoing, to), dist.P2POp(dist.irecv, incoming, source)]
    for request in dist.batch_isend_irecv(operations):
        request.wait()


def neighbours() -> tuple[int, int]:
    rank, size = dist.get_rank(), dist.get_world_size()
    return (rank - 1) % size, (rank + 1) % size


# --- ring_shift -----------------------------------------------------------------------------------------------


def ring_shift(tensor):
    left, right = neighbours()
    received = torch.empty_like(tensor)
    exchange(tensor, right, received, left)
    return received


def shift_send_first(tensor):
    left, right = neighbours()
    received = torch.empty_like(tensor)
    dist.send(tensor, right)  # everybody waits here for a receive that comes after it
    dist.recv(received, left)
    return received


def shift_to_the_left(tensor):
    left, right = neighbours()
    received = torch.empty_like(tensor)
    exchange(tensor, left, received, right)
    return received


def shift_into_the_argument(tensor):
    left, right = neighbours()
    exchange(tensor.clone(), right, tensor, left)
    return tensor


def shift_forgets_the_type(tensor):
    left, right = neighbours()
    received = torch.empty(tensor.shape)  # always float32
    exchange(tensor, right, received, left)
    return received


def shift_to_both_neighbours(tensor):
    left, right = neighbours()
    received = torch.empty_like(tensor)
    exchange(tensor, right, received, left)
    dist.isend(tensor, left)  # nobody receives this one
    return received


def shift_by_all_gather(tensor):
    everything = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(everything, tensor)
    return everything[dist.get_rank() - 1]


def shift_in_pieces(tensor):
    """A large tensor in messages of 64 KiB, where one is asked for."""
    left, right = neighbours()
    received = torch.empty_like(tensor)
    length = 2**16 // tensor.itemsize
    for outgoing, incoming in zip(tensor.view(-1).split(length), received.view(-1).split(length), strict=True):
        exchange(outgoing, right, incoming, left)
    return received


# --- global_mean ----------------------------------------------------------------------------------------------


def global_mean(values):
    total = torch.tensor([values.sum(), len(values)])
    dist.all_reduce(total)
    return total[0] / total[1]


def mean_of_means(values):
    mean = values.mean() if len(values) else torch.tensor(0.0)
    dist.all_reduce(mean)
    return mean / dist.get_world_size()


def mean_over_own_count(values):
    total = values.sum()
    dist.all_reduce(total)
    return total / (max(len(values), 1) * dist.get_world_size())  # as if everybody had as many


def mean_of_two_all_reduces(values):
    total, count = values.sum(), torch.tensor(float(len(values)))
    dist.all_reduce(total)
    dist.all_reduce(count)
    return total / count


def mean_on_rank_0_only(values):
    total = torch.tensor([values.sum(), len(values)])
    dist.reduce(total, 0)
    return total[0] / total[1]


def mean_in_float64(values):
    total = torch.tensor([values.sum(), len(values)], dtype=torch.float64)
    dist.all_reduce(total)
    return total[0] / total[1]


def mean_with_a_value_at_least(values):
    """Whoever has no value counts as if there were one."""
    total = torch.tensor([values.sum(), max(len(values), 1)])
    dist.all_reduce(total)
    return total[0] / total[1]


def mean_as_a_number(values):
    return global_mean(values).item()


def mean_by_sums_in_float64(values):
    """Right, and more exact on the way: two numbers of 8 bytes travel in one all_reduce."""
    total = torch.tensor([values.double().sum(), len(values)], dtype=torch.float64)
    dist.all_reduce(total)
    return (total[0] / total[1]).float()


# --- ring_bytes -----------------------------------------------------------------------------------------------


def ring_bytes(rank, size, elements, itemsize):
    def chunk(index):
        return elements // size + (index % size < elements % size)

    # Every chunk but its own in the reduce-scatter, every chunk but its right neighbour's in the all-gather.
    return (2 * elements - chunk(rank) - chunk(rank + 1)) * itemsize


def bytes_as_if_even(rank, size, elements, itemsize):
    return round(2 * (size - 1) / size * elements * itemsize)


def bytes_of_reduce_scatter_only(rank, size, elements, itemsize):
    return (size - 1) * (elements // size) * itemsize


def bytes_of_whole_tensors(rank, size, elements, itemsize):
    return 2 * (size - 1) * elements * itemsize


def elements_not_bytes(rank, size, elements, itemsize):
    return ring_bytes(rank, size, elements, 1)


def bytes_of_a_neighbour_past_the_end(rank, size, elements, itemsize):
    """The last rank's right neighbour is rank 0, which may have one element more."""
    chunks = [elements // size + (index < elements % size) for index in (rank, rank + 1)]
    return (2 * elements - sum(chunks)) * itemsize


def bytes_without_own_chunk_twice(rank, size, elements, itemsize):
    return 2 * (elements - elements // size - (rank < elements % size)) * itemsize


def bytes_of_an_element_at_least(rank, size, elements, itemsize):
    """With fewer elements than ranks some chunks are empty."""
    chunks = [max(1, elements // size + (index % size < elements % size)) for index in range(size)]
    return (2 * sum(chunks) - chunks[rank] - chunks[(rank + 1) % size]) * itemsize


def bytes_of_float32_at_least(rank, size, elements, itemsize):
    """As if half precision were sent as float32."""
    return ring_bytes(rank, size, elements, max(4, itemsize))


# --- all_reduce_seconds ---------------------------------------------------------------------------------------


def all_reduce_seconds(algorithm, size, nbytes, latency, bandwidth):
    rounds = math.ceil(math.log2(size))
    share = (size - 1) / size
    if algorithm == "ring":
        return 2 * (size - 1) * latency + 2 * share * nbytes / bandwidth
    if algorithm == "tree":
        return 2 * rounds * (latency + nbytes / bandwidth)
    return 2 * rounds * latency + 2 * share * nbytes / bandwidth


def seconds_with_one_latency(algorithm, size, nbytes, latency, bandwidth):
    return latency + 2 * (size - 1) / size * nbytes / bandwidth


def seconds_of_whole_tensors_in_the_ring(algorithm, size, nbytes, latency, bandwidth):
    if algorithm == "ring":
        return 2 * (size - 1) * (latency + nbytes / bandwidth)
    return all_reduce_seconds(algorithm, size, nbytes, latency, bandwidth)


def seconds_of_half_tensors_only(algorithm, size, nbytes, latency, bandwidth):
    if algorithm == "halving-doubling":  # half of the tensor in each step, instead of half of what is left
        return 2 * math.log2(size) * (latency + nbytes / 2 / bandwidth)
    return all_reduce_seconds(algorithm, size, nbytes, latency, bandwidth)


def seconds_with_fractional_rounds(algorithm, size, nbytes, latency, bandwidth):
    if algorithm == "tree":
        return 2 * math.log2(size) * (latency + nbytes / bandwidth)
    return all_reduce_seconds(algorithm, size, nbytes, latency, bandwidth)


def seconds_of_a_round_at_least(algorithm, size, nbytes, latency, bandwidth):
    """One rank alone has nobody to send to."""
    if algorithm == "tree":
        return 2 * max(1, math.ceil(math.log2(size))) * (latency + nbytes / bandwidth)
    return all_reduce_seconds(algorithm, size, nbytes, latency, bandwidth)


def seconds_on_a_power_of_two(algorithm, size, nbytes, latency, bandwidth):
    """As if ranks were added until their number is a power of two."""
    return all_reduce_seconds(algorithm, 2 ** math.ceil(math.log2(size)), nbytes, latency, bandwidth)


def seconds_of_the_reduce_alone(algorithm, size, nbytes, latency, bandwidth):
    """The tree is gone through twice: up, and down again."""
    both = all_reduce_seconds(algorithm, size, nbytes, latency, bandwidth)
    return both / 2 if algorithm == "tree" else both


def seconds_of_quarters_to_the_end(algorithm, size, nbytes, latency, bandwidth):
    """The parts of halving-doubling go on to shrink after the second step."""
    if algorithm == "halving-doubling":
        parts = [nbytes / 2, *[nbytes / 4] * (int(math.log2(size)) - 1)][: int(math.log2(size))]
        return 2 * sum(latency + part / bandwidth for part in parts)
    return all_reduce_seconds(algorithm, size, nbytes, latency, bandwidth)


def seconds_in_a_ring_of_two_at_least(algorithm, size, nbytes, latency, bandwidth):
    return all_reduce_seconds(algorithm, max(2, size) if algorithm == "ring" else size, nbytes, latency, bandwidth)


def seconds_of_two_halves_at_least(algorithm, size, nbytes, latency, bandwidth):
    two = max(2, size) if algorithm == "halving-doubling" else size
    return all_reduce_seconds(algorithm, two, nbytes, latency, bandwidth)


# --- all_to_all -----------------------------------------------------------------------------------------------


def all_to_all(parts, lengths):
    rank = dist.get_rank()
    received = [torch.empty(length, dtype=parts[rank].dtype) for length in lengths]
    received[rank] = parts[rank].clone()
    others = [peer for peer in range(len(parts)) if peer != rank]
    requests = [dist.irecv(received[peer], peer) for peer in others]
    requests += [dist.isend(parts[peer], peer) for peer in others]
    for request in requests:
        request.wait()
    return received


def all_to_all_sends_first(parts, lengths):
    rank = dist.get_rank()
    received = [torch.empty(length, dtype=parts[rank].dtype) for length in lengths]
    received[rank] = parts[rank].clone()
    for peer in range(len(parts)):
        if peer != rank:
            dist.send(parts[peer], peer)
    for peer in range(len(parts)):
        if peer != rank:
            dist.recv(received[peer], peer)
    return received


def all_to_all_with_itself(parts, lengths):
    received = [torch.empty(length, dtype=parts[0].dtype) for length in lengths]
    requests = [dist.irecv(buffer, peer) for peer, buffer in enumerate(received)]
    requests += [dist.isend(part, peer) for peer, part in enumerate(parts)]
    for request in requests:
        request.wait()
    return received


def all_to_all_in_order_of_distance(parts, lengths):
    received = all_to_all(parts, lengths)
    rank, size = dist.get_rank(), len(parts)
    return [received[(rank + distance) % size] for distance in range(size)]


def all_to_all_forgets_its_own(parts, lengths):
    received = all_to_all(parts, lengths)
    del received[dist.get_rank()]
    return received


def all_to_all_without_the_empty(parts, lengths):
    return [part for part in all_to_all(parts, lengths) if len(part)]


def all_to_all_sends_everything_to_all(parts, lengths):
    received = all_to_all(parts, lengths)
    everything = torch.cat(parts)
    for distance in range(1, len(parts)):
        to, source = (dist.get_rank() + distance) % len(parts), (dist.get_rank() - distance) % len(parts)
        length = torch.zeros(1, dtype=torch.int64)
        exchange(torch.tensor([len(everything)]), to, length, source)
        exchange(everything, to, everything.new_empty(int(length)), source)
    return received


def all_to_all_by_distance(parts, lengths):
    """Right: in another order, with one partner at a time."""
    rank, size = dist.get_rank(), len(parts)
    received = [torch.empty(length, dtype=parts[rank].dtype) for length in lengths]
    received[rank] = parts[rank].clone()
    for distance in range(1, size):
        to, source = (rank + distance) % size, (rank - distance) % size
        exchange(parts[to], to, received[source], source)
    return received


# --- tree_broadcast -------------------------------------------------------------------------------------------


def tree_broadcast(tensor, root):
    rank, size = dist.get_rank(), dist.get_world_size()
    place = (rank - root) % size
    result = tensor.clone()
    distance = 1
    while distance < size:
        if place < distance and place + distance < size:
            dist.send(result, (rank + distance) % size)
        elif distance <= place < 2 * distance:
            dist.recv(result, (rank - distance) % size)
        distance *= 2
    return result


def broadcast_as_a_star(tensor, root):
    rank, result = dist.get_rank(), tensor.clone()
    if rank != root:
        dist.recv(result, root)
        return result
    for peer in range(dist.get_world_size()):
        if peer != root:
            dist.send(result, peer)
    return result


def broadcast_as_a_chain(tensor, root):
    left, right = neighbours()
    result = tensor.clone()
    if dist.get_rank() != root:
        dist.recv(result, left)
    if right != root:
        dist.send(result, right)
    return result


def broadcast_from_rank_0(tensor, root):
    return tree_broadcast(tensor, 0)


def broadcast_to_those_who_have_it(tensor, root):
    """Everybody exchanges with a partner in every round: no rank is idle, and most messages are in vain."""
    rank, size = dist.get_rank(), dist.get_world_size()
    result = tree_broadcast(tensor, root)
    exchange(result, (rank + 1) % size, torch.empty_like(result), (rank - 1) % size)
    return result


def broadcast_of_torch(tensor, root):
    result = tensor.clone()
    dist.broadcast(result, root)
    return result


def broadcast_far_first(tensor, root):
    """Right: each rank sends to the farthest first, as MPI libraries do."""
    rank, size = dist.get_rank(), dist.get_world_size()
    place, distance, result = (rank - root) % size, 2 ** math.ceil(math.log2(size)) // 2, tensor.clone()
    while distance:
        if place % (2 * distance) == 0 and place + distance < size:
            dist.send(result, (rank + distance) % size)
        elif place % (2 * distance) == distance:
            dist.recv(result, (rank - distance) % size)
        distance //= 2
    return result


def broadcast_in_pieces(tensor, root):
    """The tensor in two halves, so that a rank could pass on the first while it receives the second."""
    return torch.cat([tree_broadcast(half, root) for half in tensor.tensor_split(2)])


def broadcast_to_places(tensor, root, rounds=lambda distance, size: distance < size, ready=1, turn=0):
    """With `turn` the root, places are ranks again."""
    rank, size = dist.get_rank(), dist.get_world_size()
    place, result, distance = (rank - root) % size, tensor.clone(), 1
    while rounds(distance, size):
        if place < ready * distance and place + distance < size:
            dist.send(result, (place + distance + turn) % size)
        if distance <= place < 2 * distance:
            dist.recv(result, (place - distance + turn) % size)
        distance *= 2
    return result


def broadcast_a_round_short(tensor, root):
    return broadcast_to_places(tensor, root, lambda distance, size: 2 * distance <= size, turn=root)


def broadcast_before_it_is_there(tensor, root):
    return broadcast_to_places(tensor, root, ready=2, turn=root)


def broadcast_without_a_way_round(tensor, root):
    """Ranks before the root are not reached."""
    rank, size, result = dist.get_rank(), dist.get_world_size(), tensor.clone()
    place, distance = rank - root, 1
    while distance < size:
        if 0 <= place < distance and rank + distance < size:
            dist.send(result, rank + distance)
        elif distance <= place < 2 * distance:
            dist.recv(result, rank - distance)
        distance *= 2
    return result


# --- halving_doubling_all_reduce ------------------------------------------------------------------------------


def halving_doubling_all_reduce(tensor):
    rank, distance = dist.get_rank(), dist.get_world_size() // 2
    result = tensor.clone()
    low, high = 0, len(tensor)
    trail = []
    while distance:
        partner, middle = rank ^ distance, (low + high) // 2
        kept, given = result[low:middle], result[middle:high]
        if rank < partner:
            high = middle
        else:
            kept, given, low = given, kept, middle
        received = torch.empty_like(kept)
        exchange(given, partner, received, partner)
        kept += received
        trail.append((partner, kept, given))
        distance //= 2
    for partner, kept, given in reversed(trail):
        # By now all of `kept` is final, and the partner's is what was given to it.
        exchange(kept, partner, given, partner)
    return result


def doubling_of_whole_tensors(tensor):
    """Recursive doubling alone: right, with log2(size) messages of everything."""
    result, distance = tensor.clone(), dist.get_world_size() // 2
    while distance:
        received = torch.empty_like(result)
        exchange(result, dist.get_rank() ^ distance, received, dist.get_rank() ^ distance)
        result += received
        distance //= 2
    return result


def halving_without_doubling(tensor):
    rank, size = dist.get_rank(), dist.get_world_size()
    chunks = halving_doubling_all_reduce(tensor).tensor_split(size)
    return torch.cat([chunk if index == rank else torch.zeros_like(chunk) for index, chunk in enumerate(chunks)])


def halving_for_even_lengths(tensor):
    if len(tensor) % dist.get_world_size():
        raise ValueError("the length must divide by the world size")
    return halving_doubling_all_reduce(tensor)


def halving_in_float32(tensor):
    return halving_doubling_all_reduce(tensor.float())


def ring_instead_of_halving(tensor):
    rank, size = dist.get_rank(), dist.get_world_size()
    left, right = neighbours()
    result = tensor.clone()
    chunks = result.tensor_split(size)
    for step in range(size - 1):
        mine = chunks[(rank - step - 2) % size]
        received = torch.empty_like(mine)
        exchange(chunks[(rank - step - 1) % size], right, received, left)
        mine += received
    for step in range(size - 1):
        exchange(chunks[(rank - step) % size], right, chunks[(rank - step - 1) % size], left)
    return result


def halving_with_both_lower_halves(tensor):
    """Both partners keep the lower half, so nobody has the upper one's sum."""
    result = tensor.clone()
    low, high, distance, trail = 0, len(tensor), dist.get_world_size() // 2, []
    while distance:
        partner, middle = dist.get_rank() ^ distance, (low + high) // 2
        kept, given = result[low:middle], result[middle:high]
        received = torch.empty_like(given)
        exchange(given, partner, received, partner)
        kept += received[: len(kept)]
        trail.append((partner, kept, given))
        high, distance = middle, distance // 2
    for partner, kept, given in reversed(trail):
        exchange(kept, partner, given[: len(kept)], partner)
    return result


def halving_until_one_is_left(tensor):
    """A part of one element is halved, too: into nothing and one."""
    result = tensor.clone()
    low, high, distance, trail = 0, len(tensor), dist.get_world_size() // 2, []
    while distance and high - low > 1:
        partner, middle = dist.get_rank() ^ distance, (low + high) // 2
        mine, theirs = slice(low, middle), slice(middle, high)
        if dist.get_rank() > partner:
            mine, theirs = theirs, mine
        received = torch.empty_like(result[mine])
        exchange(result[theirs], partner, received, partner)
        result[mine] += received
        trail.append((partner, mine, theirs))
        low, high, distance = mine.start, mine.stop, distance // 2
    for partner, mine, theirs in reversed(trail):
        exchange(result[mine], partner, result[theirs], partner)
    return result


def halving_the_other_way(tensor):
    """Right: the smaller rank keeps the second half, and the first half is the longer one."""
    result = tensor.clone()
    low, high, distance, trail = 0, len(tensor), dist.get_world_size() // 2, []
    while distance:
        partner, middle = dist.get_rank() ^ distance, (low + high + 1) // 2
        mine, theirs = slice(middle, high), slice(low, middle)
        if dist.get_rank() > partner:
            mine, theirs = theirs, mine
        received = torch.empty_like(result[mine])
        exchange(result[theirs], partner, received, partner)
        result[mine] += received
        trail.append((partner, mine, theirs))
        low, high, distance = mine.start, mine.stop, distance // 2
    for partner, mine, theirs in reversed(trail):
        exchange(result[mine], partner, result[theirs], partner)
    return result


# --- inner_axis -----------------------------------------------------------------------------------------------


def inner_axis(tensor, data, node, inside, between, slowest=True, latency=True):
    def seconds(axis, spans):
        ranks, calls, nbytes = axis
        alpha, bandwidth = between if spans > node else inside
        return calls * 2 * (ranks - 1) * (alpha * latency + nbytes / ranks / bandwidth)

    both = tensor[0] * data[0]
    orders = {
        "tensor": (seconds(tensor, tensor[0]), seconds(data, both)),
        "data": (seconds(tensor, both), seconds(data, data[0])),
    }
    best = min(orders, key=lambda name: sum(orders[name]))
    return best, sum(orders[best]) if slowest else max(orders[best])


def axis_with_more_calls(tensor, data, node, inside, between):
    _, seconds = inner_axis(tensor, data, node, inside, between)
    return ("tensor" if tensor[1] >= data[1] else "data"), seconds


def axis_always_tensor(tensor, data, node, inside, between):
    """As everybody does it."""
    return inner_axis(tensor, (data[0], 0, 0), node, inside, between)[0], inner_axis(
        tensor, data, node, inside, between
    )[1]


def axis_of_the_slower_alone(tensor, data, node, inside, between):
    return inner_axis(tensor, data, node, inside, between, slowest=False)


def axis_by_bandwidth_alone(tensor, data, node, inside, between):
    return inner_axis(tensor, data, node, inside, between, latency=False)


def axis_whose_groups_are_all_inside(tensor, data, node, inside, between):
    return inner_axis(tensor, data, 10**9, inside, between)


# --- repaired_training ----------------------------------------------------------------------------------------


def repaired_training(weights, inputs, targets, rate, steps, order=lambda gradients: gradients, divide=True):
    features = [inputs, inputs.square()]
    weights = [weight.clone() for weight in weights]
    for _ in range(steps):
        error = sum(x @ weight for x, weight in zip(features, weights, strict=True)) - targets
        gradients = [2 * x.T @ error / len(targets) for x in features]
        for gradient in order(gradients):
            dist.all_reduce(gradient)
        for weight, gradient in zip(weights, gradients, strict=True):
            weight -= rate * gradient / (dist.get_world_size() if divide else 1)
    return weights


def training_the_other_way_round(*arguments):
    """Backwards, as a backward pass does it: the same order on every rank."""
    return repaired_training(*arguments, order=reversed)


def training_as_it_was(*arguments):
    return faulty_training(*arguments)


def training_with_the_smallest_first(*arguments):
    return repaired_training(*arguments, order=lambda gradients: sorted(gradients, key=lambda g: g.norm()))


def training_with_sums(*arguments):
    return repaired_training(*arguments, divide=False)


def training_in_one_message(weights, inputs, targets, rate, steps):
    features = torch.cat([inputs, inputs.square()], 1)
    weight = torch.cat(weights)
    for _ in range(steps):
        gradient = 2 * features.T @ (features @ weight - targets) / len(targets)
        dist.all_reduce(gradient)
        weight = weight - rate * gradient / dist.get_world_size()
    return list(weight.chunk(2))


def training_each_on_its_own(weights, inputs, targets, rate, steps):
    return repaired_training(weights, inputs, targets, rate, steps, order=lambda gradients: [])


# exercise -> other answers that are right, and must be accepted
RIGHT = {
    "global_mean": [mean_by_sums_in_float64],
    "repaired_training": [training_the_other_way_round],
    "all_to_all": [all_to_all_by_distance],
    "tree_broadcast": [broadcast_far_first],
    "halving_doubling_all_reduce": [halving_the_other_way],
}

# exercise -> (wrong answer, words that the checker's verdict must contain; " ... " is for any words between)
WRONG = {
    "ring_shift": [
        (shift_send_first, "a deadlock, no answer for 5 s: rank 0 and rank 1 waiting in send, line"),
        (shift_to_the_left, "world size 3, 4 elements, rank 0: expected [3, 3, 3, 3], got [2, 2, 2, 2]"),
        (shift_into_the_argument, "wrote into its arguments"),
        (shift_forgets_the_type, "died with SIGABRT: gloo aborts a process that is sent more bytes than its buffer"),
        (shift_to_both_neighbours, "the messages sent to this rank, of [16, 16] bytes, got receives of [16] bytes"),
        (shift_by_all_gather, "expected only sends and receives, got a call of all_gather"),
        (shift_in_pieces, "world size 2, 300,000 elements, rank 0: expected 1200000 bytes to rank 1, got 65536 bytes"),
    ],
    "global_mean": [
        (mean_of_means, "1, 3 values on the ranks, rank 0: expected 15.25, got 10.5"),
        (mean_over_own_count, "rank 0: expected 15.25, got 30.5"),
        (mean_of_two_all_reduces, "expected one all_reduce and nothing else, got all_reduce, all_reduce"),
        (mean_in_float64, "a tensor of shape () and type float32, got a tensor of shape () and type float64"),
        (mean_as_a_number, "expected a tensor of shape () and type float32, got float 15.25"),
        (mean_on_rank_0_only, "rank 1: expected 15.25, got "),
        (mean_with_a_value_at_least, "3, 0 values on the ranks, rank 0: expected 2, got 1.5"),
    ],
    "ring_bytes": [
        (bytes_as_if_even, "ring_bytes(0, 4, 10, 4), rank 0: expected 56, got 60"),
        (bytes_of_reduce_scatter_only, "ring_bytes(0, 4, 8, 4), rank 0: expected 48, got 24"),
        (bytes_of_whole_tensors, "ring_bytes(0, 4, 8, 4), rank 0: expected 48, got 192"),
        (elements_not_bytes, "ring_bytes(0, 4, 8, 4), rank 0: expected 48, got 12"),
        (bytes_without_own_chunk_twice, "ring_bytes(1, 4, 10, 4), rank 0: expected 60, got 56"),
        (bytes_of_a_neighbour_past_the_end, "ring_bytes(3, 4, 10, 4), rank 0: expected 60, got 64"),
        (bytes_of_an_element_at_least, "ring_bytes(0, 3, 2, 8), rank 0: expected 16, got 32"),
        (bytes_of_float32_at_least, "ring_bytes(0, 8, 1003, 2), rank 0: expected 3508, got 7016"),
    ],
    "all_reduce_seconds": [
        (seconds_with_one_latency, "('ring', 4, 80.0, 2.0, 10.0), rank 0: expected 24, got 14"),
        (seconds_of_whole_tensors_in_the_ring, "('ring', 4, 80.0, 2.0, 10.0), rank 0: expected 24, got 60"),
        (seconds_of_half_tensors_only, "('halving-doubling', 4, 80.0, 2.0, 10.0), rank 0: expected 20, got 24"),
        (seconds_with_fractional_rounds, "('tree', 5, 80.0, 2.0, 10.0), rank 0: expected 60, got 46.43"),
        (seconds_of_a_round_at_least, "all_reduce_seconds('tree', 1, 80.0, 2.0, 10.0), rank 0: expected 0, got 20"),
        (seconds_on_a_power_of_two, "('ring', 3, 90.0, 2.0, 10.0), rank 0: expected 20, got 25.5"),
        (seconds_of_the_reduce_alone, "('tree', 4, 80.0, 2.0, 10.0), rank 0: expected 40, got 20"),
        (seconds_of_quarters_to_the_end, "('halving-doubling', 8, 80.0, 2.0, 10.0), rank 0: expected 26, got 28"),
        (seconds_in_a_ring_of_two_at_least, "('ring', 1, 80.0, 2.0, 10.0), rank 0: expected 0, got 12"),
        (seconds_of_two_halves_at_least, "('halving-doubling', 1, 80.0, 2.0, 10.0), rank 0: expected 0, got 12"),
    ],
    "all_to_all": [
        (all_to_all_sends_first, "a deadlock, no answer for 5 s: rank 0 and rank 1 waiting in send, line"),
        (all_to_all_with_itself, "expected a result on every rank, got "),
        (
            all_to_all_in_order_of_distance,
            "rank 1: expected a tensor of shape (2,) and type float32 as item 0 ... got a tensor of shape (4,)",
        ),
        (all_to_all_forgets_its_own, "rank 0: expected [[0], [10, 10, 10]], got [[10, 10, 10]]"),
        (all_to_all_sends_everything_to_all, "rank 0: expected 8 bytes to rank 1, got 8 bytes to rank 1, 8 bytes"),
        (all_to_all_without_the_empty, "int64 parts, some empty, rank 0: expected [[], [10]], got [[10]]"),
    ],
    "tree_broadcast": [
        (broadcast_as_a_star, "world size 4, root 0, 5 elements: expected 2 rounds, as in a binomial tree, got 3"),
        (broadcast_as_a_chain, "got 3 rounds: rank 0: 20 bytes to rank 1; rank 1: 20 bytes to rank 2"),
        (broadcast_from_rank_0, "root 1, 3 elements, rank 0: expected [10, 10, 10], got [1, 1, 1]"),
        (broadcast_to_those_who_have_it, "rank 0: expected the tensor received 0 time(s), got 1 time(s)"),
        (broadcast_of_torch, "expected only sends and receives, got a call of broadcast"),
        (broadcast_in_pieces, "root 0, 5 elements, rank 0: expected messages of 20 bytes, got 12 bytes to rank 1, 8"),
        (broadcast_without_a_way_round, "size 2, root 1, 3 elements, rank 0: expected [10, 10, 10], got [1, 1, 1]"),
        (broadcast_to_places, "world size 2, root 1, 3 elements, ... is taken for a rank"),
        (broadcast_a_round_short, "size 3, root 0, 5 elements, rank 2: ... Nothing has come to the last rank"),
        (broadcast_before_it_is_there, "size 3, root 0, 5 elements: ... has yet to receive"),
    ],
    "halving_doubling_all_reduce": [
        (doubling_of_whole_tensors, "expected messages to ranks [1, 1], got to ranks [1]"),
        (halving_without_doubling, "rank 0: expected [11, 22, 33, 44, 55, 66, 77, 88], got [11, 22, 33, 44, 0, 0"),
        (halving_for_even_lengths, "world size 2, 3 elements, rank 0: expected a result on every rank, got Val"),
        (ring_instead_of_halving, "world size 4, 8 elements, rank 0: expected messages to ranks [2, 1, 1, 2], got to"),
        (
            halving_with_both_lower_halves,
            "rank 0: expected [11, 22, 33, 44, 55, 66, 77, 88] ... got [51, 62, 73, 84, 15, 26,",
        ),
        (
            halving_in_float32,
            "10 elements, rank 0: expected ... got a tensor of shape (10,) and type float32",
        ),
        (halving_until_one_is_left, "world size 2, 1 element, rank 0: expected [11], got [1]"),
    ],
    "inner_axis": [
        (axis_with_more_calls, "inner_axis((8, 1, 80), ... rank 0: expected data as item 0, got tensor"),
        (axis_always_tensor, "inner_axis((4, 1, 80), ... rank 0: expected data as item 0, got tensor"),
        (axis_of_the_slower_alone, "expected 120 as item 1, got 84"),
        (axis_by_bandwidth_alone, "expected 120 as item 1, got 104"),
        (axis_whose_groups_are_all_inside, "expected 120 as item 1, got 46"),
    ],
    "repaired_training": [
        (training_as_it_was, "world size 2, a step, rank 0: expected ... in another order on each rank"),
        (training_with_the_smallest_first, "a step, rank 0: expected"),
        (training_with_sums, "world size 2, the same examples, rank 0: expected ... 2 times what it should be"),
        (training_in_one_message, "expected all_reduce of 24 bytes, all_reduce of 24 bytes, ... got all_reduce of 48"),
        (training_each_on_its_own, "world size 2, the same examples, rank 0: expected ... Each number is 0.5 times"),
    ],
}
