"""Answers to the exercises of chapter 02, and after each the wrong answers that people really give.

The table WRONG at the end says for which reason the checker must refuse each wrong answer, and RIGHT which other
answers it must accept; the tests hold it to that. Nothing in the course imports this file except its test, so that
an instructor can leave it out.
"""

import functools
import operator

import torch
import torch.distributed as dist

from course.data_parallel.faulty import faulty_training

# --- slice_sizes ----------------------------------------------------------------------------------------------


def slice_sizes(batch, devices):
    length = -(-batch // devices)
    return [max(0, min(length, batch - place * length)) for place in range(devices)]


def sizes_as_even_as_can_be(batch, devices):
    return [batch // devices + (place < batch % devices) for place in range(devices)]


def sizes_without_the_remainder(batch, devices):
    return [batch // devices] * devices


def sizes_of_slices_only(batch, devices):
    return [size for size in slice_sizes(batch, devices) if size]


def sizes_below_zero(batch, devices):
    length = -(-batch // devices)
    return [min(length, batch - place * length) for place in range(devices)]


def sizes_with_one_too_many(batch, devices):
    """Rounded up where nothing is to round."""
    length = batch // devices + 1
    return [max(0, min(length, batch - place * length)) for place in range(devices)]


def sizes_in_float32(batch, devices):
    """Where there are billions, float32 knows not every number."""
    length = int(torch.tensor(batch / devices).ceil())
    return [max(0, min(length, batch - place * length)) for place in range(devices)]


# --- mean_of_slices -------------------------------------------------------------------------------------------


def mean_of_slices(means, counts):
    return sum(mean * count for mean, count in zip(means, counts, strict=True) if count) / sum(counts)


def mean_of_means(means, counts):
    there = [mean or 0.0 for mean in means]
    return sum(there) / len(there)


def mean_of_what_is_there(means, counts):
    return sum(mean for mean in means if mean is not None) / sum(count > 0 for count in counts)


def mean_without_looking(means, counts):
    return sum(mean * count for mean, count in zip(means, counts, strict=True)) / sum(counts)


def sum_of_losses(means, counts):
    return sum(mean * count for mean, count in zip(means, counts, strict=True) if count)


def mean_over_the_ranks(means, counts):
    result = torch.tensor(mean_of_slices(means, counts))
    dist.all_reduce(result)
    return result.item() / dist.get_world_size()


# --- add_up ---------------------------------------------------------------------------------------------------


def add_up(gradients):
    result = []
    for copies in zip(*gradients, strict=True):
        there = [gradient for gradient in copies if gradient is not None]
        result.append(functools.reduce(operator.add, there) if there else None)
    return result


def add_up_in_place(gradients):
    result = list(gradients[0])
    for device in gradients[1:]:
        for number, gradient in enumerate(device):
            if gradient is not None:
                result[number] = gradient if result[number] is None else result[number].add_(gradient)
    return result


def add_up_averages(gradients):
    return [None if total is None else total / len(gradients) for total in add_up(gradients)]


def add_up_zeros(gradients):
    shape = next(g.shape for device in gradients for g in device if g is not None)
    return [torch.zeros(shape) if total is None else total for total in add_up(gradients)]


def add_up_overwrites(gradients):
    return list(gradients[-1])


def add_up_skips_what_one_lacks(gradients):
    return [None if None in copies else sum(copies) for copies in zip(*gradients, strict=True)]


def add_up_by_device(gradients):
    return [sum(device) for device in gradients]


def add_up_by_pairs(gradients):
    """Where their number is odd, the last one has no partner."""
    result = []
    for copies in zip(*gradients, strict=True):
        there = [gradient for gradient in copies if gradient is not None]
        pairs = [one + other for one, other in zip(there[::2], there[1::2], strict=False)]
        result.append(functools.reduce(operator.add, pairs) if pairs else None)
    return result


# --- gradients_of_copies --------------------------------------------------------------------------------------


def gradients_of_copies(weight, inputs, targets, devices):
    slices = inputs.chunk(devices)
    copies = [weight.clone().requires_grad_() for _ in slices]
    outputs = torch.cat([part @ mine for part, mine in zip(slices, copies, strict=True)])
    return list(torch.autograd.grad((outputs - targets).square().mean(), copies))


def gradients_of_own_means(weight, inputs, targets, devices):
    gradients = []
    for part, wanted in zip(inputs.chunk(devices), targets.chunk(devices), strict=True):
        mine = weight.clone().requires_grad_()
        gradients += torch.autograd.grad((part @ mine - wanted).square().mean(), mine)
    return gradients


def gradients_as_if_even(weight, inputs, targets, devices):
    return [gradient / devices for gradient in gradients_of_own_means(weight, inputs, targets, devices)]


def gradient_of_the_sum(weight, inputs, targets, devices):
    return [sum(gradients_of_copies(weight, inputs, targets, devices))] * devices


def gradients_by_switching_the_weight_on(weight, inputs, targets, devices):
    weight.requires_grad_()
    return [torch.autograd.grad((inputs @ weight - targets).square().mean(), weight)[0]] * devices


def gradients_of_detached_copies(weight, inputs, targets, devices):
    copies = [weight.clone() for _ in range(devices)]
    outputs = torch.cat([part @ mine for part, mine in zip(inputs.chunk(devices), copies, strict=False)])
    return list(torch.autograd.grad((outputs - targets).square().mean(), copies))


def gradients_of_copies_left_over(weight, inputs, targets, devices):
    """There may be fewer slices than devices, and then some copies were never used."""
    copies = [weight.clone().requires_grad_() for _ in range(devices)]
    outputs = torch.cat([part @ mine for part, mine in zip(inputs.chunk(devices), copies, strict=False)])
    return list(torch.autograd.grad((outputs - targets).square().mean(), copies))


def gradients_by_backward(weight, inputs, targets, devices):
    """Right: each copy keeps its gradient."""
    slices = inputs.chunk(devices)
    copies = [weight.clone().requires_grad_() for _ in slices]
    outputs = torch.cat([part @ mine for part, mine in zip(slices, copies, strict=True)])
    torch.nn.functional.mse_loss(outputs, targets).backward()
    return [mine.grad for mine in copies]


def gradients_of_the_weight_itself(weight, inputs, targets, devices):
    """The first replica is the model's own, and requires a gradient from now on."""
    slices = inputs.chunk(devices)
    copies = [weight.requires_grad_(), *(weight.detach().clone().requires_grad_() for _ in slices[1:])]
    outputs = torch.cat([part @ mine for part, mine in zip(slices, copies, strict=True)])
    return list(torch.autograd.grad((outputs - targets).square().mean(), copies))


# --- running_mean ---------------------------------------------------------------------------------------------


def running_mean(batches, devices, momentum):
    running = torch.zeros(batches[0].shape[1])
    for batch in batches:
        running = (1 - momentum) * running + momentum * batch.chunk(devices)[0].mean(0)
    return running


def running_mean_of_whole_batches(batches, devices, momentum):
    return running_mean(batches, 1, momentum)


def running_mean_of_all_slices(batches, devices, momentum):
    running = torch.zeros(batches[0].shape[1])
    for batch in batches:
        for part in batch.chunk(devices):
            running = (1 - momentum) * running + momentum * part.mean(0)
    return running


def running_mean_the_other_way(batches, devices, momentum):
    return running_mean(batches, devices, 1 - momentum)


def running_mean_that_starts_with_the_first(batches, devices, momentum):
    running = batches[0].chunk(devices)[0].mean(0)
    for batch in batches[1:]:
        running = (1 - momentum) * running + momentum * batch.chunk(devices)[0].mean(0)
    return running


# --- bytes_held -----------------------------------------------------------------------------------------------


def bytes_held(device, devices, parameters, outputs, activations):
    held = parameters + activations
    return held + 2 * parameters + 2 * outputs if device == 0 else held


def held_with_a_copy_of_its_own(device, devices, parameters, outputs, activations):
    return bytes_held(device, devices, parameters, outputs, activations) + (parameters if device == 0 else 0)


def held_with_moments_everywhere(device, devices, parameters, outputs, activations):
    return 3 * parameters + activations + (2 * outputs if device == 0 else 0)


def held_with_one_share_of_outputs(device, devices, parameters, outputs, activations):
    return bytes_held(device, devices, parameters, outputs // devices, activations)


def held_without_log_probabilities(device, devices, parameters, outputs, activations):
    return bytes_held(device, devices, parameters, outputs, activations) - (outputs if device == 0 else 0)


def held_alone_without_gathering(device, devices, parameters, outputs, activations):
    """One device gathers, too, and the gathered outputs are there as well as their log-probabilities."""
    return bytes_held(device, devices, parameters, outputs, activations) - (outputs if devices == 1 else 0)


# --- bytes_copied ---------------------------------------------------------------------------------------------


def bytes_copied(devices, trainable, frozen, inputs, outputs):
    away = (inputs + 2 * outputs) * (devices - 1) // devices
    return (devices - 1) * (2 * trainable + frozen) + away


def copied_one_way(devices, trainable, frozen, inputs, outputs):
    return (devices - 1) * (trainable + frozen) + (inputs + outputs) * (devices - 1) // devices


def copied_with_gradients_of_the_frozen(devices, trainable, frozen, inputs, outputs):
    return bytes_copied(devices, trainable + frozen, 0, inputs, outputs)


def copied_without_the_outputs_gradient(devices, trainable, frozen, inputs, outputs):
    return bytes_copied(devices, trainable, frozen, inputs, outputs) - outputs * (devices - 1) // devices


def copied_to_itself_too(devices, trainable, frozen, inputs, outputs):
    return devices * (2 * trainable + frozen) + inputs + 2 * outputs


def copied_by_all_reduce(devices, trainable, frozen, inputs, outputs):
    return 2 * (devices - 1) * trainable


def copied_alone_too(devices, trainable, frozen, inputs, outputs):
    return bytes_copied(max(2, devices), trainable, frozen, inputs, outputs)


# --- best_devices ---------------------------------------------------------------------------------------------


def best_devices(operations, start, compute, limit):
    return min(range(1, limit + 1), key=lambda n: operations * max(n * start, compute / n))


def best_is_all(operations, start, compute, limit):
    return limit


def best_power_of_two(operations, start, compute, limit):
    powers = [2**power for power in range(limit.bit_length())]
    return min(powers, key=lambda n: operations * max(n * start, compute / n))


def best_without_the_lock(operations, start, compute, limit):
    return min(range(1, limit + 1), key=lambda n: operations * max(start, compute / n))


def best_never_alone(operations, start, compute, limit):
    return max(2, best_devices(operations, start, compute, limit))


def best_one_after_the_other(operations, start, compute, limit):
    return min(range(1, limit + 1), key=lambda n: operations * (start + compute) / n)


def best_of_the_square_root(operations, start, compute, limit):
    return min(limit, max(1, int((compute / start) ** 0.5)))


def best_but_the_larger(operations, start, compute, limit):
    return min(range(limit, 0, -1), key=lambda n: operations * max(n * start, compute / n))


def best_with_a_start_of_one_second(operations, start, compute, limit):
    return best_devices(operations, 1.0, compute, limit)


# --- repaired_replicas ----------------------------------------------------------------------------------------


def repaired_replicas(weight, inputs, targets, devices, rate, steps, mean=False):
    for _ in range(steps):
        slices = list(zip(inputs.chunk(devices), targets.chunk(devices), strict=True))
        replicas = [weight.clone() for _ in slices]
        gradients = [
            2 * x.T @ (x @ replica - target) / (len(x) if mean else len(inputs))
            for replica, (x, target) in zip(replicas, slices, strict=True)
        ]
        weight = weight - rate * sum(gradients) / (len(slices) if mean else 1)
    return weight


def replicas_as_they_were(*arguments):
    return faulty_training(*arguments)


def replicas_that_are_the_weight(weight, inputs, targets, devices, rate, steps):
    """Right: there is one memory here."""
    return repaired_replicas(weight, inputs, targets, 1, rate, steps)


def replicas_written_in_place(weight, inputs, targets, devices, rate, steps):
    weight.copy_(repaired_replicas(weight, inputs, targets, devices, rate, steps))
    return weight


def replicas_that_step_on_their_own(weight, inputs, targets, devices, rate, steps):
    """Each trains on its slice, and the weights are averaged in the end."""
    slices = zip(inputs.chunk(devices), targets.chunk(devices), strict=True)
    ends = [repaired_replicas(weight, x, target, 1, rate, steps) for x, target in slices]
    return sum(ends) / len(ends)


def replicas_with_means_of_slices(*arguments):
    return repaired_replicas(*arguments, mean=True)


def replicas_for_one_step(weight, inputs, targets, devices, rate, steps):
    return repaired_replicas(weight, inputs, targets, devices, rate, 1)


# exercise -> other answers that are right, and must be accepted

# exercise -> other answers that are right, and must be accepted
RIGHT = {"repaired_replicas": [replicas_that_are_the_weight]}

# exercise -> (wrong answer, words that the checker's verdict must contain; " ... " is for any words between)
WRONG = {
    "slice_sizes": [
        (sizes_as_even_as_can_be, "slice_sizes(9, 4), rank 0: expected [3, 3, 3, 0], got [3, 2, 2, 2]"),
        (sizes_without_the_remainder, "slice_sizes(8, 3), rank 0: expected [3, 3, 2], got [2, 2, 2]"),
        (sizes_of_slices_only, "slice_sizes(9, 4), rank 0: expected [3, 3, 3, 0], got [3, 3, 3]"),
        (sizes_below_zero, "slice_sizes(2, 4), rank 0: expected [1, 1, 0, 0], got [1, 1, 0, -1]"),
        (sizes_with_one_too_many, "slice_sizes(8, 4), rank 0: expected [2, 2, 2, 2], got [3, 3, 2, 0]"),
        (sizes_in_float32, "rank 0: expected [5000000001, 5000000000], got [5000000000, 5000000000]"),
    ],
    "mean_of_slices": [
        (mean_of_means, "slices of [5, 4], rank 0: expected 5, got 5.25"),
        (mean_of_what_is_there, "slices of [5, 4], rank 0: expected 5, got 5.25"),
        (mean_without_looking, "slices of [2, 1, 0], rank 0: expected a result on every rank, got TypeError"),
        (sum_of_losses, "slices of [2, 2], rank 0: expected 2, got 8"),
        (mean_over_the_ranks, "expected nothing sent ... got all_reduce of 4 bytes"),
    ],
    "add_up": [
        (add_up_in_place, "wrote into its arguments"),
        (add_up_averages, "two devices, rank 0: expected [11, 11] as item 0, got [5.5, 5.5]"),
        (add_up_zeros, "a parameter that nobody used, rank 0: expected None as item 1, got a tensor"),
        (add_up_overwrites, "two devices, rank 0: expected [11, 11] as item 0, got [10, 10]"),
        (
            add_up_skips_what_one_lacks,
            "a parameter that one replica did not use, rank 0: expected a tensor ... got None",
        ),
        (
            add_up_by_device,
            "a parameter that one replica did not use, rank 0: expected a result on every rank ... got TypeError",
        ),
        (add_up_by_pairs, "one device, rank 0: expected a tensor of shape (2,) and type float32 as item 0, got None"),
    ],
    "gradients_of_copies": [
        (gradients_of_own_means, "4 examples on 2 device(s), rank 0: expected ... got [3, -2]"),
        (gradients_as_if_even, "8 examples on 3 device(s), rank 0: expected ... got [-0.4444"),
        (gradient_of_the_sum, "4 examples on 2 device(s), rank 0: expected ... got [-2, -12.5]"),
        (gradients_by_switching_the_weight_on, "4 examples on 2 device(s), rank 0: expected ... got [-2, -12.5]"),
        (gradients_of_detached_copies, "RuntimeError: element 0 of tensors does not require grad"),
        (
            gradients_of_copies_left_over,
            "4 examples on 3 device(s), rank 0: expected a result on every rank, got RuntimeError",
        ),
        (gradients_of_the_weight_itself, "4 examples on 2 device(s), rank 0: expected the arguments left as they were"),
    ],
    "running_mean": [
        (
            running_mean_of_whole_batches,
            "on 2 device(s), momentum 0.5, rank 0: expected [2.25, 0.5] ... got [23.9583",
        ),
        (running_mean_of_all_slices, "on 2 device(s), momentum 0.5, rank 0: expected [2.25, 0.5] ... got [53.5625"),
        (running_mean_the_other_way, "on 2 device(s), momentum 1.0, rank 0: expected [4, 0], got [0, 0]"),
        (running_mean_that_starts_with_the_first, "rank 0: expected [2.25, 0.5], got [2.5, 1]"),
    ],
    "bytes_held": [
        (held_with_a_copy_of_its_own, "bytes_held(0, 4, 100, 1000, 40), rank 0: expected 2340, got 2440"),
        (held_with_moments_everywhere, "bytes_held(1, 4, 100, 1000, 40), rank 0: expected 140, got 340"),
        (held_with_one_share_of_outputs, "bytes_held(0, 4, 100, 1000, 40), rank 0: expected 2340, got 840"),
        (held_without_log_probabilities, "bytes_held(0, 4, 100, 1000, 40), rank 0: expected 2340, got 1340"),
        (held_alone_without_gathering, "bytes_held(0, 1, 7, 20, 3), rank 0: expected 64, got 44"),
    ],
    "bytes_copied": [
        (copied_one_way, "bytes_copied(4, 100, 0, 8, 4000), rank 0: expected 6606, got 3306"),
        (copied_with_gradients_of_the_frozen, "bytes_copied(4, 100, 30, 8, 4000), rank 0: expected 6696, got 6786"),
        (copied_without_the_outputs_gradient, "bytes_copied(4, 100, 0, 8, 4000), rank 0: expected 6606, got 3606"),
        (copied_to_itself_too, "bytes_copied(4, 100, 0, 8, 4000), rank 0: expected 6606, got 8808"),
        (copied_by_all_reduce, "bytes_copied(4, 100, 0, 8, 4000), rank 0: expected 6606, got 600"),
        (copied_alone_too, "bytes_copied(1, 100, 30, 8, 4000), rank 0: expected 0, got 4234"),
    ],
    "best_devices": [
        (best_is_all, "best_devices(100, 1.0, 16.0, 8), rank 0: expected 4, got 8"),
        (best_without_the_lock, "best_devices(100, 1.0, 16.0, 8), rank 0: expected 4, got 8"),
        (best_one_after_the_other, "best_devices(100, 1.0, 16.0, 8), rank 0: expected 4, got 8"),
        (best_of_the_square_root, "best_devices(10, 1.0, 7.0, 8), rank 0: expected 3, got 2"),
        (best_but_the_larger, "best_devices(10, 1.0, 6.0, 8), rank 0: expected 2, got 3"),
        (best_power_of_two, "best_devices(100, 1.0, 16.0, 3), rank 0: expected 3, got 2"),
        (best_never_alone, "best_devices(100, 1.0, 0.5, 8), rank 0: expected 1, got 2"),
        (best_with_a_start_of_one_second, "best_devices(10, 4.0, 16.0, 8), rank 0: expected 2, got 4"),
    ],
    "repaired_replicas": [
        (
            replicas_as_they_were,
            "2 device(s), 2 step(s), rank 0: expected ... compute with the weight of the first step",
        ),
        (replicas_written_in_place, "1 device(s), 3 step(s), rank 0: ... wrote into its arguments"),
        (replicas_that_step_on_their_own, "2 device(s), 1 step(s), rank 0: expected"),
        (replicas_with_means_of_slices, "2 device(s), 1 step(s), rank 0: expected ... 4 and 3 examples"),
        (replicas_for_one_step, "1 device(s), 3 step(s), rank 0: expected"),
    ],
}
