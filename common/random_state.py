"""Where random numbers are, to go on from there: after a restart, or when a forward pass is done again."""

import torch


def random_state(device: torch.device) -> list[torch.Tensor]:
    """Where PyTorch's random numbers are on this rank: of the CPU and, if it is another one, of the device."""
    states = [torch.get_rng_state()]
    return states if device.type == "cpu" else [*states, torch.get_device_module(device).get_rng_state(device)]


def set_random_state(states: list[torch.Tensor], device: torch.device) -> None:
    """Go on from there, as far as this rank has the same kinds of devices."""
    torch.set_rng_state(states[0])
    if device.type != "cpu" and len(states) > 1:
        torch.get_device_module(device).set_rng_state(states[1], device)
