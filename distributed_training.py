"""The front door: --strategy picks a chapter's script, which gets all other options.

    python distributed_training.py
    torchrun --nproc_per_node=2 distributed_training.py --distributed
    torchrun --nproc_per_node=2 --nnodes=2 --node_rank=0 --master_addr=HOST --master_port=29500 \\
        distributed_training.py --distributed
"""

from common.strategies import find, module

from common.config import parse
from common.errors import one_line_errors

if __name__ == "__main__":
    with one_line_errors():
        config = parse()
        module(find(config.strategy, config.by_hand).chapter, "distributed_training").main(config)
