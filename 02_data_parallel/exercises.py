"""Exercises of chapter 02: what nn.DataParallel does, and what it costs.

Replace each `raise NotImplementedError` by your answer, then run the last cell of the notebook or

    python -m common.check 02_data_parallel                all exercises
    python -m common.check 02_data_parallel slice_sizes    one of them

What holds for all of them:

* Return a new result and leave the arguments as they were.
* One process does all the work: send nothing. (The checker calls you in two processes, which know nothing of each
  other.)
* "Slices" are what `tensor.chunk(devices)` gives: consecutive, equal but for a shorter last one, and sometimes fewer
  than devices. A device that gets no slice takes no part: it has no replica.

Dots say how difficult an exercise is and how important its idea is for the later chapters.
"""

import torch


def slice_sizes(batch: int, devices: int) -> list[int]:
    """Return how many examples each of `devices` devices gets of a batch of `batch` examples, in order.

    One number for each device, 0 for those that get none. `batch` is at least 1. Calculate: make no tensor of
    `batch` elements, which may be billions.

    Difficulty ●○○○○   Importance ●●●○○   up to 10 minutes   1 point
    """
    raise NotImplementedError


def mean_of_slices(means: list[float | None], counts: list[int]) -> float:
    """Return the mean loss over all examples, from the mean of each slice and its number of examples.

    A device that got no examples has the count 0, and no mean: None stands in its place.

    Difficulty ●○○○○   Importance ●●●●●   up to 10 minutes   1 point
    """
    raise NotImplementedError


def add_up(gradients: list[list[torch.Tensor | None]]) -> list[torch.Tensor | None]:
    """Return the gradients of the real parameters from those of their copies.

    `gradients[device][number]` is what the copy of parameter `number` on `device` got, or None if its replica did
    not use it. Where no replica used a parameter, its gradient is None; zeros would let weight decay move it. All
    tensors are in one memory here. Add in the order of the devices, and do not write into any of them.

    Difficulty ●●○○○   Importance ●●●●○   up to 15 minutes   2 points
    """
    raise NotImplementedError


def gradients_of_copies(
    weight: torch.Tensor, inputs: torch.Tensor, targets: torch.Tensor, devices: int
) -> list[torch.Tensor]:
    """Return the gradient of each replica's copy of `weight`, for those devices that get a slice.

    The model is `inputs @ weight`, with inputs [batch, n] and weight [n]; the loss is the mean of the squared
    differences from targets [batch], over the *whole* batch. `weight` does not require a gradient, and must not when
    you return. The sum of your tensors is what one process has: the checker compares each of them.

    Difficulty ●●●○○   Importance ●●●●●   up to 20 minutes   3 points
    """
    raise NotImplementedError


def repaired_replicas(
    weight: torch.Tensor, inputs: torch.Tensor, targets: torch.Tensor, devices: int, rate: float, steps: int
) -> torch.Tensor:
    """Return what `faulty_training` in faulty.py should return: the weight after `steps` steps of SGD.

    Model and loss are those of `gradients_of_copies`, and each step sees the whole batch.

    It was held against the same training without devices. With one device everything was right, and the first step was
    right with any number of them. From the second step on the gradient was wrong; the part of it that came from the
    first slice was right, given the weight. The loss fell, went on falling below what the right training had reached by
    then, and in a longer run it rose again, the sooner the more devices there were.

    Find the mistake before you write.

    Difficulty ●●○○○   Importance ●●●●○   up to 15 minutes   2 points
    """
    raise NotImplementedError


def running_mean(batches: list[torch.Tensor], devices: int, momentum: float) -> torch.Tensor:
    """Return the running mean that a BatchNorm under DataParallel has after one forward pass over each batch.

    Batches are [examples, channels], the result is [channels], float32. It starts at zero; after each batch it is
    (1 - momentum) times what it was plus momentum times the mean of what BatchNorm saw; and only what the first
    replica writes remains.

    Difficulty ●●○○○   Importance ●●○○○   up to 15 minutes   2 points
    """
    raise NotImplementedError


def bytes_held(device: int, devices: int, parameters: int, outputs: int, activations: int) -> int:
    """Return the bytes on `device` just before the backward pass begins.

    `parameters` is the number of bytes of the model's parameters, `outputs` that of the outputs of the whole batch,
    `activations` what one replica keeps for its backward pass, its own outputs not included. Count:

    * the parameters, the real ones or a copy, and the activations, on every device;
    * on device 0 also the two moments of AdamW, each as large as the parameters, the gathered outputs, and the
      log-probabilities of the loss, which are as large as those.

    The real gradients are None at this moment. Once gathered, a replica's own outputs are freed.

    Difficulty ●●○○○   Importance ●●●●○   up to 15 minutes   2 points
    """
    raise NotImplementedError


def bytes_copied(devices: int, trainable: int, frozen: int, inputs: int, outputs: int) -> int:
    """Return how many bytes one training step of by_hand.py copies from device to device, all devices together.

    All four sizes are in bytes: of the parameters that are trained, of those that are frozen (which are copied, too,
    and get no gradient), of the whole batch of inputs, which lies on device 0, and of its outputs, which are gathered
    there. The batch divides evenly. Inputs need no gradient. The first replica shares the memory of the model, and
    device 0 copies nothing to itself.

    Difficulty ●●●○○   Importance ●●●●○   up to 20 minutes   2 points
    """
    raise NotImplementedError


def best_devices(operations: int, start: float, compute: float, limit: int) -> int:
    """Return with how many devices, 1 to `limit`, a forward pass is fastest; the smaller number where two are equal.

    A replica's forward pass has `operations` operations, however small its slice is. Each must be started by the
    interpreter, which takes `start` seconds of the one lock that all threads share. An operation on the whole batch
    takes `compute` seconds of a device; on n devices each has a slice, which takes compute / n. Devices work while
    the interpreter starts further operations, so the pass takes as long as the busier of the two: the interpreter,
    or one of the devices.

    Difficulty ●●○○○   Importance ●●●○○   up to 15 minutes   2 points
    """
    raise NotImplementedError
