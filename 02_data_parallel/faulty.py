"""A data-parallel training that goes wrong. The exercise `repaired_replicas` says what has been seen; the mistake is to
be found."""


def faulty_training(weight, inputs, targets, devices, rate, steps):
    """The weight after some steps; arguments as in the exercise `repaired_replicas`."""
    weight = weight.clone()
    slices = list(zip(inputs.chunk(devices), targets.chunk(devices), strict=True))
    # Device 0 uses the weight itself, every other device a copy in its own memory.
    replicas = [weight if device == 0 else weight.clone() for device in range(len(slices))]
    for _ in range(steps):
        gradients = [
            2 * x.T @ (x @ replica - target) / len(inputs)
            for replica, (x, target) in zip(replicas, slices, strict=True)
        ]
        weight -= rate * sum(gradients)
    return weight
