"""A training that goes wrong on several ranks. The exercise `repaired_training` says what has been seen; the mistake is
to be found."""

import torch.distributed as dist


def faulty_training(weights, inputs, targets, rate, steps):
    """The weights after some steps; arguments as in the exercise `repaired_training`."""
    features = [inputs, inputs.square()]
    weights = [weight.clone() for weight in weights]
    for _ in range(steps):
        error = sum(x @ weight for x, weight in zip(features, weights, strict=True)) - targets
        gradients = [2 * x.T @ error / len(targets) for x in features]
        for gradient in sorted(gradients, key=lambda gradient: -gradient.norm()):  # what matters most goes first
            dist.all_reduce(gradient)
        for weight, gradient in zip(weights, gradients, strict=True):
            weight -= rate * gradient / dist.get_world_size()
    return weights
