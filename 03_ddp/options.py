"""What both versions of data parallelism share: the axis of ranks that they run on, and their own options."""

from dataclasses import dataclass

from common.errors import UserError
from common.options import option
from common.recompute import KINDS
from common.strategy import Strategy
from course.ddp.loading import LOADING


class DataParallel(Strategy):
    """Every rank holds the whole model and reads its own slice of each batch."""

    preset = {"data": -1}

    @dataclass
    class Options:
        loading: str = option("shard", "who reads, decodes and sends the examples", tuple(LOADING))
        recompute: str = option("none", "what the GPT's blocks compute again for the backward pass", KINDS)

    @classmethod
    def require(cls, config, axes):
        super().require(config, axes)
        if config.task == "images" and "stream" in config.options.loading:
            raise UserError(
                f"--loading {config.options.loading} reads a stream of records, and --task images is one table in "
                f"memory; use --loading shard or dispatch"
            )
