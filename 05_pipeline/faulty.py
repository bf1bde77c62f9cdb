"""A pipeline that trains wrongly. The exercise `repaired_step` says what has been seen; the mistake is to be found."""

import torch
import torch.distributed as dist


def faulty_step(weight, bias, inputs, targets, batch, microbatches):
    """The gradients of this rank's weight and bias; arguments as in the exercise `repaired_step`."""
    rank, last, each = dist.get_rank(), dist.get_world_size() - 1, batch // microbatches
    weight, bias = weight.clone().requires_grad_(), bias.clone().requires_grad_()
    activations, gradient = weight.new_empty(each, len(weight)), weight.new_empty(each, len(bias))
    stored = []
    for m in range(microbatches):
        if rank == 0:
            x = inputs[m * each : (m + 1) * each]
        else:
            dist.recv(activations, rank - 1)
            x = activations.detach().requires_grad_()
        y = torch.tanh(x @ weight + bias)
        if rank == last:
            y = (y - targets[m * each : (m + 1) * each]).square().mean() / microbatches
        else:
            dist.send(y.detach(), rank + 1)
        stored.append((x, y))
    for x, y in stored:
        if rank < last:
            dist.recv(gradient, rank + 1)
        y.backward(gradient if rank < last else None)
        if rank > 0:
            dist.send(x.grad, rank - 1)
    return weight.grad, bias.grad
