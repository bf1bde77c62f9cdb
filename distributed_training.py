"""The front door: --strategy or --mesh picks a chapter's script, which gets all other options.

    python distributed_training.py
    torchrun --nproc_per_node=2 distributed_training.py --distributed
    torchrun --nproc_per_node=2 --nnodes=2 --node_rank=0 --master_addr=HOST --master_port=29500 \\
        distributed_training.py --distributed
"""

from course.start import read_command

if __name__ == "__main__":
    start = read_command()
    start()
