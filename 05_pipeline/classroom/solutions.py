"""Answers to the exercises of chapter 05, and after each the wrong answers that people really give.

The table WRONG at the end says for which reason the checker must refuse each wrong answer, and RIGHT which other
answers it must accept; the tests hold it to that. Nothing in the course imports this file except its test, so that
an instructor can leave it out.
"""

from collections import defaultdict
from fractions import Fraction
from itertools import pairwise

import torch
import torch.distributed as dist
import torch.distributed.pipelining as pp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from common.errors import UserError
from course.pipeline import schedules, simulator

# --- microbatches_for -----------------------------------------------------------------------------------------


def microbatches_for(ranks, stages_per_rank, percent):
    return max(1, -(-(ranks - 1) * (100 - percent) // (percent * stages_per_rank)))


def microbatches_by_overhead(ranks, stages_per_rank, percent):
    """The bubble as a share of the ideal time, not of the makespan."""
    return max(1, -(-(ranks - 1) * 100 // (percent * stages_per_rank)))


def microbatches_rounded_down(ranks, stages_per_rank, percent):
    return max(1, (ranks - 1) * (100 - percent) // (percent * stages_per_rank))


def microbatches_without_interleaving(ranks, stages_per_rank, percent):
    return microbatches_for(ranks, 1, percent)


def microbatches_with_a_rank_more(ranks, stages_per_rank, percent):
    return microbatches_for(ranks + 1, stages_per_rank, percent)


def microbatches_none(ranks, stages_per_rank, percent):
    return -(-(ranks - 1) * (100 - percent) // (percent * stages_per_rank))


def microbatches_at_least_one_per_rank(ranks, stages_per_rank, percent):
    return max(ranks, microbatches_for(ranks, stages_per_rank, percent))


# --- one_forward_one_backward ---------------------------------------------------------------------------------


def one_forward_one_backward(ranks, microbatches, ahead=lambda ranks, rank: 2 * (ranks - 1 - rank)):
    schedule = []
    for rank in range(ranks):
        warm_up = min(ahead(ranks, rank), microbatches)
        actions = [f"{rank}F{m}" for m in range(warm_up)]
        for m in range(microbatches):
            if warm_up + m < microbatches:
                actions.append(f"{rank}F{warm_up + m}")
            actions.append(f"{rank}B{m}")
        schedule.append(actions)
    return schedule


def all_forwards_first(ranks, microbatches):
    return one_forward_one_backward(ranks, microbatches, lambda ranks, rank: microbatches)


def ahead_by_the_rank(ranks, microbatches):
    """Warm-up counted from the wrong end."""
    return one_forward_one_backward(ranks, microbatches, lambda ranks, rank: rank)


def ahead_by_one_more(ranks, microbatches):
    return one_forward_one_backward(ranks, microbatches, lambda ranks, rank: 2 * (ranks - 1 - rank) + 1)


def ahead_like_the_first_rank(ranks, microbatches):
    return one_forward_one_backward(ranks, microbatches, lambda ranks, rank: 2 * (ranks - 1))


def ahead_for_quick_messages(ranks, microbatches):
    """1F1B as it is for messages that take no time."""
    return one_forward_one_backward(ranks, microbatches, lambda ranks, rank: ranks - 1 - rank)


def in_one_text(ranks, microbatches):
    """Right: a rank's actions may be written as one text."""
    return [" ".join(actions) for actions in one_forward_one_backward(ranks, microbatches)]


def no_warm_up(ranks, microbatches):
    return one_forward_one_backward(ranks, microbatches, lambda ranks, rank: 0)


def backward_before_forward(ranks, microbatches):
    """The steady state begins with a backward: the last rank has nothing yet."""
    schedule = one_forward_one_backward(ranks, microbatches)
    return [
        actions[: 2 * (ranks - 1 - rank)] + sorted(actions[2 * (ranks - 1 - rank) :], key=lambda a: (int(a[2:]), a[1]))
        for rank, actions in enumerate(schedule)
    ]


def last_microbatch_dropped(ranks, microbatches):
    return one_forward_one_backward(ranks, microbatches - 1)


def newest_first(ranks, microbatches):
    """Backwards in the order of a stack."""
    return [
        [f"{rank}F{m}" for m in range(microbatches)] + [f"{rank}B{m}" for m in reversed(range(microbatches))]
        for rank in range(ranks)
    ]


def not_cut_off(ranks, microbatches):
    """As many forwards ahead as if there were enough micro-batches."""
    schedule = one_forward_one_backward(ranks, max(2 * (ranks - 1), microbatches))
    return [[a for a in actions if a[1] == "F" or int(a[2:]) < microbatches] for actions in schedule]


# --- short_of_memory ------------------------------------------------------------------------------------------


def short_of_memory(ranks, microbatches, limit):
    forward, backward, schedule = [0] * ranks, [0] * ranks, [[] for _ in range(ranks)]
    while backward != [microbatches] * ranks:
        f, b = list(forward), list(backward)  # at the beginning of this unit of time
        for rank in range(ranks):
            can_b = b[rank] < f[rank] and (rank == ranks - 1 or b[rank + 1] > b[rank])
            can_f = f[rank] < microbatches and f[rank] - b[rank] < limit and (rank == 0 or f[rank - 1] > f[rank])
            if can_b:
                schedule[rank].append(f"{rank}B{b[rank]}")
                backward[rank] += 1
            elif can_f:
                schedule[rank].append(f"{rank}F{f[rank]}")
                forward[rank] += 1
    return schedule


def shorter_warm_up(ranks, microbatches, limit):
    return one_forward_one_backward(ranks, microbatches, lambda ranks, rank: min(limit, ranks - rank) - 1)


def groups_of_gpipe(ranks, microbatches, limit):
    """As many forwards as fit, then their backwards."""
    groups = [range(start, min(start + limit, microbatches)) for start in range(0, microbatches, limit)]
    return [[f"{rank}{kind}{m}" for group in groups for kind in "FB" for m in group] for rank in range(ranks)]


def memory_ignored(ranks, microbatches, limit):
    return ahead_for_quick_messages(ranks, microbatches)


def one_at_a_time(ranks, microbatches, limit):
    return groups_of_gpipe(ranks, microbatches, 1)


def limit_off_by_one(ranks, microbatches, limit):
    return short_of_memory(ranks, microbatches, limit + 1)


# --- neighbours -----------------------------------------------------------------------------------------------


def neighbours(activations, gradient):
    rank, like = dist.get_rank(), gradient if activations is None else activations
    messages, received = [], [None, None]
    for number, (tensor, sent_to, received_from) in enumerate(
        [(activations, rank + 1, rank - 1), (gradient, rank - 1, rank + 1)]
    ):
        if tensor is not None:
            messages.append(dist.P2POp(dist.isend, tensor, sent_to))
        if 0 <= received_from < dist.get_world_size():
            received[number] = torch.empty_like(like)
            messages.append(dist.P2POp(dist.irecv, received[number], received_from))
    for request in dist.batch_isend_irecv(messages):
        request.wait()
    return received


def received(like, peer):
    if not 0 <= peer < dist.get_world_size():
        return None
    tensor = torch.empty_like(like)
    dist.recv(tensor, peer)
    return tensor


def neighbours_with_gradients_first(activations, gradient):
    """Right: which of the two goes first is all the same."""
    rank = dist.get_rank()
    requests = [] if gradient is None else [dist.isend(gradient, rank - 1)]
    requests += [] if activations is None else [dist.isend(activations, rank + 1)]
    like = gradient if activations is None else activations
    after, before = received(like, rank + 1), received(like, rank - 1)
    for request in requests:
        request.wait()
    return before, after


def neighbours_that_send_first(activations, gradient):
    rank = dist.get_rank()
    if activations is not None:
        dist.send(activations, rank + 1)
    if gradient is not None:
        dist.send(gradient, rank - 1)
    like = gradient if activations is None else activations
    return received(like, rank - 1), received(like, rank + 1)


def neighbours_that_receive_first(activations, gradient):
    rank = dist.get_rank()
    like = gradient if activations is None else activations
    results = received(like, rank - 1), received(like, rank + 1)
    if activations is not None:
        dist.send(activations, rank + 1)
    if gradient is not None:
        dist.send(gradient, rank - 1)
    return results


def neighbours_by_gathering(activations, gradient):
    rank, size = dist.get_rank(), dist.get_world_size()
    like = gradient if activations is None else activations
    own = torch.stack([torch.zeros_like(like) if t is None else t for t in (activations, gradient)])
    everything = [torch.empty_like(own) for _ in range(size)]
    dist.all_gather(everything, own)
    return everything[rank - 1][0] if rank else None, everything[rank + 1][1] if rank < size - 1 else None


def neighbours_swapped(activations, gradient):
    return tuple(reversed(neighbours(activations, gradient)))


def neighbours_the_wrong_way(activations, gradient):
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    like = gradient if activations is None else activations
    before, after, operations = None, None, []
    if rank > 0:
        before = torch.empty_like(like)
        if activations is not None:
            operations.append(dist.P2POp(dist.isend, activations, rank - 1))
        operations.append(dist.P2POp(dist.irecv, before, rank - 1))
    if rank < last:
        after = torch.empty_like(like)
        if gradient is not None:
            operations.append(dist.P2POp(dist.isend, gradient, rank + 1))
        operations.append(dist.P2POp(dist.irecv, after, rank + 1))
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    return before, after


def neighbours_in_one_message(activations, gradient):
    """Both tensors to both sides: twice the bytes."""
    rank, size = dist.get_rank(), dist.get_world_size()
    like = gradient if activations is None else activations
    own = torch.stack([torch.zeros_like(like) if t is None else t for t in (activations, gradient)])
    peers = [peer for peer in (rank - 1, rank + 1) if 0 <= peer < size]
    requests = [dist.isend(own, peer) for peer in peers]
    before, after = received(own, rank - 1), received(own, rank + 1)
    for request in requests:
        request.wait()
    return None if before is None else before[0], None if after is None else after[1]


def neighbours_without_gradients(activations, gradient):
    rank = dist.get_rank()
    request = None if activations is None else dist.isend(activations, rank + 1)
    result = received(gradient, rank - 1) if rank else None
    if request:
        request.wait()
    return result, None if activations is None else torch.zeros_like(activations)


# --- repaired_step --------------------------------------------------------------------------------------------


def repaired_step(weight, bias, inputs, targets, batch, microbatches, fresh=True, mean=True, gradient_fresh=False):
    """A buffer for each micro-batch: autograd needs what was received until the backward pass. The arguments after
    `microbatches` are for the wrong answers below."""
    rank, last, each = dist.get_rank(), dist.get_world_size() - 1, batch // microbatches
    weight, bias = weight.clone().requires_grad_(), bias.clone().requires_grad_()
    activations, gradient = weight.new_empty(each, len(weight)), weight.new_empty(each, len(bias))
    stored = []
    for m in range(microbatches):
        if rank == 0:
            x = inputs[m * each : (m + 1) * each]
        else:
            dist.recv(activations, rank - 1)
            x = (activations.clone() if fresh else activations.detach()).requires_grad_()
        y = torch.tanh(x @ weight + bias)
        if rank == last:
            y = (y - targets[m * each : (m + 1) * each]).square().mean() / (microbatches if mean else 1)
        else:
            dist.send(y.detach(), rank + 1)
        stored.append((x, y))
    for x, y in stored:
        if gradient_fresh:
            gradient = gradient.clone()
        if rank < last:
            dist.recv(gradient, rank + 1)
        y.backward(gradient if rank < last else None)
        if rank > 0:
            dist.send(x.grad, rank - 1)
    return weight.grad, bias.grad


def repaired_nothing(*arguments):
    return repaired_step(*arguments, fresh=False)


def repaired_the_other_buffer(*arguments):
    return repaired_step(*arguments, fresh=False, gradient_fresh=True)


def repaired_and_no_longer_a_mean(*arguments):
    return repaired_step(*arguments, mean=False)


def repaired_with_one_micro_batch(weight, bias, inputs, targets, batch, microbatches):
    return repaired_step(weight, bias, inputs, targets, batch, 1)


# --- peak_megabytes -------------------------------------------------------------------------------------------


def peak_megabytes(actions, megabytes, freed_by="BW"):
    held = peak = 0
    for action in schedules.parse(" ".join(actions)):
        if action.kind == "F":
            held += megabytes[action.stage]
        elif action.kind in freed_by:
            held -= megabytes[action.stage]
        peak = max(peak, held)
    return peak


def peak_freed_by_the_first_half(actions, megabytes):
    return peak_megabytes(actions, megabytes, freed_by="BI")


def peak_freed_by_whole_backwards_only(actions, megabytes):
    return peak_megabytes(actions, megabytes, freed_by="B")


def peak_of_all_forwards(actions, megabytes):
    return sum(megabytes[int(action.partition("F")[0])] for action in actions if "F" in action)


def peak_in_activations(actions, megabytes):
    return peak_megabytes(actions, dict.fromkeys(megabytes, 1))


def peak_times_the_largest(actions, megabytes):
    return peak_in_activations(actions, megabytes) * max(megabytes.values())


# --- makespan -------------------------------------------------------------------------------------------------


def makespan(schedule, forward, backward, message, rank_matters=True, turn_matters=True, endless=None):
    left = [schedules.parse(" ".join(actions)) for actions in schedule]
    rank_of = {action.stage: rank for rank, actions in enumerate(left) for action in actions}
    last, ended, free, moved = max(rank_of), {}, [0] * len(left), True
    while moved:
        moved = False
        for rank, actions in enumerate(left):
            while actions:
                stage, kind, m = action = actions[0]
                if kind == "F":
                    source = (stage - 1, "F", m)
                else:
                    source = (stage + 1, "B", m) if stage < last else (stage, "F", m)
                arrived = 0
                if source[0] >= 0:
                    if source not in ended or kind == "B" and (stage, "F", m) not in ended:
                        break
                    away = rank_of[source[0]] != rank or turn_matters is False
                    if turn_matters is None:
                        away = source[0] != stage
                    arrived = ended[source] + message * away
                start = max(arrived, free[rank] if rank_matters else 0)
                free[rank] = ended[action] = start + (forward if kind == "F" else backward)
                del actions[0]
                moved = True
    return endless(free) if endless and any(left) else None if any(left) else max(free)


def makespan_of_the_busiest_rank(schedule, forward, backward, message):
    """Nobody waits."""
    return max(sum(forward if "F" in action else backward for action in actions) for actions in schedule)


def makespan_without_messages(schedule, forward, backward, message):
    return makespan(schedule, forward, backward, 0)


def makespan_of_tireless_ranks(schedule, forward, backward, message):
    """A rank does everything at once as soon as its input is there."""
    return makespan(schedule, forward, backward, message, rank_matters=False)


def makespan_with_messages_to_itself(schedule, forward, backward, message):
    return makespan(schedule, forward, backward, message, turn_matters=False)


def makespan_until_stuck(schedule, forward, backward, message):
    return makespan(schedule, forward, backward, message, endless=max)


def makespan_with_messages_between_stages(schedule, forward, backward, message):
    """Where a V turns, two stages are on one rank."""
    return makespan(schedule, forward, backward, message, turn_matters=None)


def makespan_by_formula(schedule, forward, backward, message):
    microbatches = 1 + max(action.microbatch for action in schedules.parse(" ".join(schedule[0])))
    return (microbatches + len(schedule) - 1) * (forward + backward)


# --- interleave -----------------------------------------------------------------------------------------------


def interleave(ranks, microbatches, stages_per_rank, lead=1, per_round=None, mirrored=True):
    per_round, total = per_round or ranks, stages_per_rank * microbatches
    schedule = []
    for rank in range(ranks):
        forwards, backwards = [], []
        for start in range(0, microbatches, per_round):
            for turn in range(stages_per_rank):
                back = stages_per_rank - 1 - turn if mirrored else turn
                for m in range(start, min(start + per_round, microbatches)):
                    forwards.append(f"{rank + ranks * turn}F{m}")
                    backwards.append(f"{rank + ranks * back}B{m}")
        ahead = min((stages_per_rank - 1) * per_round + lead * (ranks - 1 - rank), total)
        actions = forwards[:ahead]
        for number, backward in enumerate(backwards):
            actions += [*forwards[ahead + number : ahead + number + 1], backward]
        schedule.append(actions)
    return schedule


def interleave_far_ahead(ranks, microbatches, stages_per_rank):
    """Ahead as Megatron-LM and PyTorch are, for the sake of messages that take time."""
    return interleave(ranks, microbatches, stages_per_rank, lead=2)


def interleave_without_a_lead(ranks, microbatches, stages_per_rank):
    return interleave(ranks, microbatches, stages_per_rank, lead=0)


def interleave_breadth_first(ranks, microbatches, stages_per_rank):
    """All micro-batches through one stage before the next."""
    return interleave(ranks, microbatches, stages_per_rank, per_round=microbatches)


def interleave_with_backwards_from_the_first_stage(ranks, microbatches, stages_per_rank):
    return interleave(ranks, microbatches, stages_per_rank, mirrored=False)


def interleave_of_consecutive_stages(ranks, microbatches, stages_per_rank):
    """Stages 0 and 1 on rank 0: no loop at all."""
    plain = ahead_for_quick_messages(ranks, microbatches)
    return [
        [f"{int(a[0]) * stages_per_rank + s}{a[1:]}" for a in actions for s in range(stages_per_rank)]
        for actions in plain
    ]


def interleave_all_forwards_first(ranks, microbatches, stages_per_rank):
    return interleave(ranks, microbatches, stages_per_rank, lead=microbatches * stages_per_rank * ranks)


def interleave_one_microbatch_at_a_time(ranks, microbatches, stages_per_rank):
    return interleave(ranks, microbatches, stages_per_rank, per_round=1)


# --- mend -----------------------------------------------------------------------------------------------------


def mend(schedule, distance=1):
    for rank, actions in enumerate(schedule):
        for place in range(len(actions) - distance):
            swapped = list(actions)
            swapped[place], swapped[place + distance] = actions[place + distance], actions[place]
            tried = [*schedule[:rank], swapped, *schedule[rank + 1 :]]
            try:
                simulator.simulate([schedules.parse(" ".join(row)) for row in tried])
                return tried
            except simulator.IllegalSchedule:
                pass


def mend_from_the_last(schedule):
    """Right: whichever swap makes it legal will do."""
    for rank in reversed(range(len(schedule))):
        for place in reversed(range(len(schedule[rank]) - 1)):
            tried = [list(actions) for actions in schedule]
            tried[rank][place : place + 2] = tried[rank][place : place + 2][::-1]
            try:
                simulator.simulate([schedules.parse(" ".join(row)) for row in tried])
                return tried
            except simulator.IllegalSchedule:
                pass


def mend_by_a_swap_at_a_distance(schedule):
    return mend(schedule, distance=2)


def mend_nothing(schedule):
    return [list(actions) for actions in schedule]


def mend_by_starting_over(schedule):
    return ahead_for_quick_messages(len(schedule), 1 + max(int(action[2:]) for action in schedule[0]))


def mend_by_all_forwards_first(schedule):
    return [sorted(actions, key=lambda action: (action[1] != "F", int(action[2:]))) for actions in schedule]


def mend_the_first_rank(schedule):
    return [[schedule[0][1], schedule[0][0], *schedule[0][2:]], *(list(actions) for actions in schedule[1:])]


def mend_a_backward_before_its_forward(schedule):
    """A schedule may be wrong although every rank could do its own actions in this order."""
    mended = [list(actions) for actions in schedule]
    for actions in mended:
        for place, (first, second) in enumerate(pairwise(actions)):
            if "F" in second and first == second.replace("F", "B"):
                actions[place : place + 2] = second, first
                return mended
    return mended


def mend_by_leaving_out(schedule):
    return [[action for action in actions if action != actions[0]] for actions in schedule]


# --- split_backward -------------------------------------------------------------------------------------------


def split_backward(weights, x, grad_output):
    first = x.detach().requires_grad_()
    inputs, sums, y = [], [], first
    for weight in weights:
        inputs.append(y.detach())
        sums.append(y @ weight)
        y = torch.tanh(sums[-1])
    grad_x, *gradients = torch.autograd.grad(y, [first, *sums], grad_output)
    return grad_x, list(zip(inputs, gradients, strict=True))


def split_with_weight_gradients(weights, x, grad_output):
    grad_x, kept = split_backward(weights, x, grad_output)
    return grad_x, [inputs.T @ gradient for inputs, gradient in kept]


def split_after_the_tanh(weights, x, grad_output):
    """The gradients of the layers' outputs."""
    first = x.detach().requires_grad_()
    inputs, outputs, y = [], [], first
    for weight in weights:
        inputs.append(y.detach())
        y = torch.tanh(y @ weight)
        outputs.append(y)
    grad_x, *gradients = torch.autograd.grad(y, [first, *outputs], grad_output)
    return grad_x, list(zip(inputs, gradients, strict=True))


def split_last_layer_first(weights, x, grad_output):
    grad_x, kept = split_backward(weights, x, grad_output)
    return grad_x, kept[::-1]


def split_with_outputs_kept(weights, x, grad_output):
    grad_x, kept = split_backward(weights, x, grad_output)
    inputs = [inputs for inputs, _ in kept]
    outputs = [*inputs[1:], torch.tanh(inputs[-1] @ weights[-1])]
    return grad_x, [(output, gradient) for output, (_, gradient) in zip(outputs, kept, strict=True)]


def split_of_the_sum(weights, x, grad_output):
    """The gradient that came from the next stage is forgotten."""
    return split_backward(weights, x, torch.ones_like(grad_output))


def split_without_the_tanh(weights, x, grad_output):
    inputs, y = [], x
    for weight in weights:
        inputs.append(y)
        y = torch.tanh(y @ weight)
    gradients, gradient = [], grad_output
    for weight in reversed(weights):
        gradients.insert(0, gradient)
        gradient = gradient @ weight.T
    return gradient, list(zip(inputs, gradients, strict=True))


# --- accumulated_gradients ------------------------------------------------------------------------------------


class Layer(nn.Module):
    def __init__(self, weight, bias):
        super().__init__()
        self.weight, self.bias = nn.Parameter(weight.clone()), nn.Parameter(bias.clone())

    def forward(self, x):
        return torch.tanh(x @ self.weight + self.bias)


def accumulated_gradients(weight, bias, inputs, targets, microbatches, scale=False, divide=None, average="at the end"):
    """The last three arguments are for the wrong answers below."""
    mesh = init_device_mesh("cpu", (dist.get_world_size() // 2, 2), mesh_dim_names=("data", "pipeline"))
    number, layer, batches = mesh.get_local_rank("pipeline"), Layer(weight, bias), inputs or targets
    group, others = mesh["pipeline"].get_group(), mesh["data"].get_group()
    parts = microbatches * len(batches) if divide is None else divide(microbatches, len(batches))
    stage = pp.PipelineStage(layer, number, 2, torch.device("cpu"), group=group)

    def loss(outputs, part):
        return nn.functional.mse_loss(outputs, part) / parts

    schedule = pp.Schedule1F1B(stage, microbatches, loss_fn=loss, scale_grads=scale)
    for batch in batches:
        schedule.step(*[batch] * (number == 0), target=batch if number else None, return_outputs=False)
        if average == "each time" or average == "at the end" and batch is batches[-1]:
            for parameter in layer.parameters():
                dist.all_reduce(parameter.grad, group=others)
                parameter.grad /= mesh["data"].size()
    return layer.weight.grad, layer.bias.grad


def accumulated_as_pytorch_scales(*arguments):
    """scale_grads=True divides what the steps before have left, too."""
    return accumulated_gradients(*arguments, scale=True, divide=lambda microbatches, batches: batches)


def accumulated_as_if_of_one_batch(*arguments):
    return accumulated_gradients(*arguments, divide=lambda microbatches, batches: microbatches)


def accumulated_by_each_pipeline(*arguments):
    """Each pipeline trains for itself."""
    return accumulated_gradients(*arguments, average="never")


def accumulated_and_averaged_each_time(*arguments):
    return accumulated_gradients(*arguments, average="each time")


def accumulated_by_gpipe(weight, bias, inputs, targets, microbatches):
    """Right: any schedule will do, and what PyTorch divides once need not be divided by hand."""
    number, layer = dist.get_rank() % 2, Layer(weight, bias)
    groups = [dist.new_group([rank, rank + 1]) for rank in range(0, dist.get_world_size(), 2)]
    replicas = [dist.new_group([*range(stage, dist.get_world_size(), 2)]) for stage in range(2)]
    group = groups[dist.get_rank() // 2]
    stage = pp.PipelineStage(layer, number, 2, torch.device("cpu"), group=group)
    schedule = pp.ScheduleGPipe(stage, microbatches, loss_fn=nn.functional.mse_loss)
    total = [torch.zeros_like(weight), torch.zeros_like(bias)]
    for batch in inputs or targets:
        layer.zero_grad()
        schedule.step(*[batch] * (number == 0), target=batch if number else None, return_outputs=False)
        for gradient, parameter in zip(total, layer.parameters(), strict=True):
            gradient += parameter.grad / len(inputs or targets) / len(groups)
    for gradient in total:
        dist.all_reduce(gradient, group=replicas[number])
    return total


# --- schedule_and_microbatches --------------------------------------------------------------------------------


def schedule_and_microbatches(batch, ranks, overhead, example, message, limit, names=schedules.SCHEDULES, parts=True):
    """The last two arguments are for the wrong answers below."""
    best = None
    for name in names:
        for m in range(1, batch + 1):
            if batch % m:
                continue
            try:
                schedule = schedules.build(name, ranks, m)
            except UserError:
                continue
            stages, n = len(simulator.placement(schedule)) // ranks, batch // m
            # in units of which `stages` are a microsecond: whole numbers
            times = [overhead + n * each for each in example]
            line = simulator.simulate(schedule, simulator.Times(*times, communication=n * message * stages))
            stored, makespan = Fraction(max(line.peaks) * n, stages if parts else 1), Fraction(line.makespan) / stages
            if stored <= limit and (best is None or makespan < best[0]):
                best = makespan, name, m
    return best[1:]


def choice_whatever_it_stores(batch, ranks, overhead, example, message, limit):
    return schedule_and_microbatches(batch, ranks, overhead, example, message, batch)


def choice_without_messages(batch, ranks, overhead, example, message, limit):
    return schedule_and_microbatches(batch, ranks, overhead, example, 0, limit)


def choice_without_overhead(batch, ranks, overhead, example, message, limit):
    return schedule_and_microbatches(batch, ranks, 0, example, message, limit)


def choice_of_1f1b(batch, ranks, overhead, example, message, limit):
    return schedule_and_microbatches(batch, ranks, overhead, example, message, limit, names=["1f1b"])


def choice_as_if_halves_were_equal(batch, ranks, overhead, example, message, limit):
    equal = (Fraction(sum(example), 3),) * 3
    return schedule_and_microbatches(batch, ranks, overhead, equal, message, limit)


def choice_that_counts_halves_whole(batch, ranks, overhead, example, message, limit):
    return schedule_and_microbatches(batch, ranks, overhead, example, message, limit, parts=False)


# --- loss_factors ---------------------------------------------------------------------------------------------


def loss_factors(tokens):
    total = sum(map(sum, tokens))
    return [[n * len(tokens) / total for n in own] for own in tokens]


def factors_of_one(tokens):
    return [[1.0 for _ in own] for own in tokens]


def factors_by_microbatches(tokens):
    """As if all micro-batches had equally many tokens."""
    return [[1 / len(own) for _ in own] for own in tokens]


def factors_within_a_replica(tokens):
    return [[n / max(1, sum(own)) for n in own] for own in tokens]


def factors_without_the_average(tokens):
    total = sum(map(sum, tokens))
    return [[n / total for n in own] for own in tokens]


def factors_divided_by_replicas(tokens):
    total = sum(map(sum, tokens))
    return [[n / len(tokens) / total for n in own] for own in tokens]


def factors_the_other_way_round(tokens):
    columns = defaultdict(list)
    for own in loss_factors(tokens):
        for m, factor in enumerate(own):
            columns[m].append(factor)
    return list(columns.values())


# exercise -> other answers that are right, and must be accepted
RIGHT = {
    "one_forward_one_backward": [in_one_text],
    "neighbours": [neighbours_with_gradients_first],
    "mend": [mend_from_the_last],
    "accumulated_gradients": [accumulated_by_gpipe],
}

# exercise -> (wrong answer, words that the checker's verdict must contain; " ... " is for any words between)
WRONG = {
    "microbatches_for": [
        (microbatches_by_overhead, "microbatches_for(4, 1, 10), rank 0: expected 27, got 30"),
        (microbatches_rounded_down, "microbatches_for(4, 2, 10), rank 0: expected 14, got 13"),
        (microbatches_without_interleaving, "microbatches_for(4, 2, 10), rank 0: expected 14, got 27"),
        (microbatches_with_a_rank_more, "microbatches_for(4, 1, 10), rank 0: expected 27, got 36"),
        (microbatches_none, "microbatches_for(1, 1, 5), rank 0: expected 1, got 0"),
        (microbatches_at_least_one_per_rank, "microbatches_for(2, 1, 60), rank 0: expected 1, got 2"),
    ],
    "one_forward_one_backward": [
        (all_forwards_first, "expected at most [7, 5, 3, 1] activations stored on the ranks, got [8, 8, 8, 8]"),
        (ahead_for_quick_messages, "one_forward_one_backward(4, 8): expected a makespan of at most 28, got 38"),
        (ahead_by_the_rank, "got deadlock: rank 0 waits at 0B0 for 1B0 of rank 1; rank 1 waits at 1F1 for 0F1 of rank"),
        (ahead_by_one_more, "expected at most [7, 5, 3, 1] activations stored on the ranks, got [8, 6, 4, 2]"),
        (ahead_like_the_first_rank, "expected at most [7, 5, 3, 1] activations stored on the ranks, got [7, 7, 7, 7]"),
        (no_warm_up, "one_forward_one_backward(4, 8): expected a makespan of at most 28, got 112"),
        (backward_before_forward, "expected a legal schedule, got wrong order: rank 3 does 3B0 before 3F0"),
        (last_microbatch_dropped, "expected each action once on rank 0, got rank 0 does not do 0B7"),
        (newest_first, "expected at most [7, 5, 3, 1] activations stored on the ranks, got [8, 8, 8, 8]"),
        (not_cut_off, "expected these stages, kinds and micro-batches only on rank 0, got rank 0 should not do 0F3"),
    ],
    "short_of_memory": [
        (shorter_warm_up, "short_of_memory(4, 8, 2): expected a makespan of at most 34, got 46"),
        (groups_of_gpipe, "short_of_memory(4, 8, 2): expected a makespan of at most 34, got 40"),
        (memory_ignored, "expected at most [2, 2, 2, 2] activations stored on the ranks, got [4, 3, 2, 1]"),
        (one_at_a_time, "short_of_memory(4, 8, 2): expected a makespan of at most 34, got 64"),
        (limit_off_by_one, "expected at most [2, 2, 2, 2] activations stored on the ranks, got [3, 3, 3, 1]"),
    ],
    "neighbours": [
        (neighbours_that_send_first, "a deadlock, no answer for 5 s: rank 0 waiting in send"),
        (neighbours_that_receive_first, "a deadlock, no answer for 5 s: rank 0 and rank 1 waiting in recv"),
        (neighbours_by_gathering, "expected only sends and receives, got a call of all_gather"),
        (neighbours_swapped, "expected None as item 0, got a tensor of shape (400, 1000) and type float32"),
        (neighbours_in_one_message, "expected 1600000 bytes to rank 1, got 3200000 bytes to rank 1"),
        (neighbours_without_gradients, "got 0 (400000 of 400000 elements differ)"),
        (neighbours_the_wrong_way, "a deadlock, no answer for 5 s: ... in this direction"),
    ],
    "repaired_step": [
        (repaired_nothing, "batch 8, 4 micro-batches, rank 1: expected [[0.045 ... as item 0"),
        (repaired_the_other_buffer, "batch 8, 4 micro-batches, rank 1: expected [[0.045 ... as item 0"),
        (repaired_and_no_longer_a_mean, "batch 8, 4 micro-batches, rank 0: expected [[0.0654 ... got"),
        (repaired_with_one_micro_batch, "expected 64 bytes to rank 1, ... got 256 bytes to rank 1"),
    ],
    "peak_megabytes": [
        (peak_freed_by_the_first_half, "7}), rank 0: expected 21, got 14"),
        (peak_freed_by_whole_backwards_only, "4}), rank 0: expected 4, got 8"),
        (peak_of_all_forwards, "1}), rank 0: expected 3, got 4"),
        (peak_in_activations, "7}), rank 0: expected 21, got 3"),
        (peak_times_the_largest, "10, 2: 3}), rank 0: expected 23, got 30"),
    ],
    "makespan": [
        (makespan_of_the_busiest_rank, "makespan(..., 1, 1, 0), rank 0: expected 22, got 16"),
        (makespan_without_messages, "expected 32, got 12"),
        (makespan_of_tireless_ranks, "makespan(..., 1, 1, 0), rank 0: expected 22, got 8"),
        (makespan_with_messages_to_itself, "expected 32, got 42"),
        (makespan_until_stuck, "expected None, got int 2"),
        (makespan_by_formula, "expected 12, got 9"),
        (
            makespan_with_messages_between_stages,
            "['1F0', '2F0', '2B0', '1B0']], 1, 2, 10), rank 0: expected 52, got 72",
        ),
    ],
    "interleave": [
        (interleave_far_ahead, "expected at most [8, 7, 6, 5] activations stored on the ranks, got [11, 9, 7, 5]"),
        (interleave_without_a_lead, "interleave(4, 8, 2): expected a makespan of at most 38, got 104"),
        (interleave_breadth_first, "expected at most [8, 7, 6, 5] activations stored on the ranks, got [12, 11, 10, 9"),
        (interleave_with_backwards_from_the_first_stage, "got deadlock: rank 0 waits at 0B0 for 1B0 of rank 1; rank 1"),
        (interleave_of_consecutive_stages, "expected each action once on rank 0, got rank 0 does not do 4B0"),
        (interleave_all_forwards_first, "got deadlock: rank 0 waits at 4F5 for 3F5 of rank 3; rank 3 waits at 3B0 for"),
        (interleave_one_microbatch_at_a_time, "interleave(4, 8, 2): expected a makespan of at most 38, got 72"),
    ],
    "mend": [
        (mend_nothing, "mend(...): expected two neighbouring actions of one rank swapped, got 0 places are different"),
        (mend_by_starting_over, "expected two neighbouring actions of one rank swapped, got 27 places are different"),
        (mend_by_all_forwards_first, "got 3 places are different"),
        (mend_the_first_rank, "mend(...): expected a legal schedule, got wrong order: rank 1 does 1B0 before 1F0"),
        (mend_by_a_swap_at_a_distance, "two neighbouring actions of one rank swapped, got 2 places are different"),
        (mend_by_leaving_out, "expected two neighbouring actions of one rank swapped, got 8 places are different"),
        (
            mend_a_backward_before_its_forward,
            "mend(...): expected two neighbouring actions of one rank swapped, got 0 places are different",
        ),
    ],
    "split_backward": [
        (split_with_weight_gradients, "got a tensor of shape (3, 4) and type float64"),
        (split_after_the_tanh, "rank 0: expected 0.030 ... got 0.0977"),
        (split_last_layer_first, "got a tensor of shape (5, 4) and type float64"),
        (split_with_outputs_kept, "got a tensor of shape (5, 4) and type float64"),
        (split_of_the_sum, "rank 0: expected -0.053 ... got 0.626"),
        (split_without_the_tanh, "rank 0: expected -0.053 ... got 0.744"),
    ],
    "accumulated_gradients": [
        (accumulated_as_pytorch_scales, "3 batches of 4 micro-batches, 1 pipeline, rank 0: expected"),
        (accumulated_as_if_of_one_batch, "3 batches of 4 micro-batches, 1 pipeline, rank 0: expected"),
        (accumulated_by_each_pipeline, "1 batch of 2 micro-batches, 2 pipelines, rank 0: expected"),
        (accumulated_and_averaged_each_time, "bytes of gradients averaged, got all-reduce of"),
    ],
    "schedule_and_microbatches": [
        (choice_whatever_it_stores, "0, 4): expected a schedule that takes these numbers and keeps to the limit, got"),
        (choice_without_messages, "expected a step of 1747.5 microseconds, got ('interleaved-zb', 4): 6737.5"),
        (choice_without_overhead, "expected a step of 1755 microseconds, got ('interleaved-zb', 32): 5850"),
        (choice_of_1f1b, "expected a step of 1755 microseconds, got ('1f1b', 4): 2730"),
        (
            choice_as_if_halves_were_equal,
            "(8, 57, 1), 2, 8): expected a step of 2205 microseconds, got ('zbv', 12): 2310.5",
        ),
        (choice_that_counts_halves_whole, "expected a step of 1755 microseconds, got ('zb-h1', 4): 1950"),
    ],
    "loss_factors": [
        (factors_of_one, "expected [[0.5, 0.5], [0.5, 0.5]], got [[1, 1], [1, 1]]"),
        (factors_by_microbatches, "expected [[0.5, 0.125, 0.375]], got [[0.33333333, 0.33333333, 0.33333333]]"),
        (factors_within_a_replica, "expected [[0.25, 0.25], [1.25, 0.25]], got [[0.5, 0.5], [0.83333333, 0.16666667]]"),
        (factors_without_the_average, "expected [[0.5, 0.5], [0.5, 0.5]], got [[0.25, 0.25], [0.25, 0.25]]"),
        (factors_divided_by_replicas, "expected [[0.5, 0.5], [0.5, 0.5]], got [[0.125, 0.125], [0.125, 0.125]]"),
        (factors_the_other_way_round, "expected [[0.5, 0.125, 0.375]], got [[0.5], [0.125], [0.375]]"),
    ],
}
