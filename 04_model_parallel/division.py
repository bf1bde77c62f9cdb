"""What tensor parallelism asks of a GPT, by hand and with DTensor: numbers that the ranks divide."""

from common.errors import UserError
from common.model import VOCABULARY
from common.strategy import Strategy


class DividedModel(Strategy):
    """Every rank holds a part of every large weight, and all ranks read the same batch.

    sequence: whether each rank has its part of the sequence only between attention and MLP
    """

    preset = {"tensor": -1}
    from_meta = True
    tasks = ("text",)
    sequence = False

    @classmethod
    def require(cls, config, axes):
        super().require(config, axes)
        require_tensor(config, axes["tensor"], cls.sequence)


def require_tensor(config, size: int, sequence: bool = False) -> None:
    """Raise UserError for a GPT of these settings that cannot be cut into `size` equal parts."""
    numbers = {"--heads": config.heads, "--width": config.width, "the vocabulary of": VOCABULARY}
    require_multiples(size, numbers | ({"--context": config.context} if sequence else {}))


def require_divisible(model, size: int, sequence: bool = False) -> None:
    """Raise UserError for a GPT that cannot be cut into `size` equal parts."""
    vocabulary, width = model.embedding.tokens.weight.shape
    numbers = {"heads": model.blocks[0].attention.heads, "width": width, "vocabulary": vocabulary}
    require_multiples(size, numbers | ({"context": len(model.embedding.positions.weight)} if sequence else {}))


def require_multiples(size: int, numbers: dict[str, int]) -> None:
    """Raise UserError for the first of `numbers`, which are given by name, that `size` does not divide."""
    for name, number in numbers.items():
        if number % size:
            raise UserError(
                f"{name} {number} cannot be cut into {size} equal parts; start a number of ranks that divides it"
            )
