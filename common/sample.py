"""What a model of bytes writes."""

import torch
from torch import nn


@torch.no_grad()
def sample(
    model: nn.Module, context: int, length: int, prompt: str = "def ", temperature: float = 0.8, seed: int = 0
) -> str:
    """`prompt` and the `length` bytes that a GPT on the CPU writes after it, each drawn from its distribution of the
    next byte, or the likeliest one where `temperature` is 0; a dot for each byte that is no letter of ASCII. The same
    for the same weights and seed."""
    generator = torch.Generator().manual_seed(seed)
    tokens = list(prompt.encode())
    for _ in range(length):
        logits = model(torch.tensor([tokens[-context:]]))[0, -1]
        if temperature:
            tokens.append(int(torch.multinomial((logits / temperature).softmax(0), 1, generator=generator)))
        else:
            tokens.append(int(logits.argmax()))
    return "".join(chr(token) if 32 <= token < 127 or token == 10 else "·" for token in tokens)
