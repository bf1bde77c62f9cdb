"""The planner: which layout, how much memory, how long a step takes, and how that is known.

python -m planner plan --model llama-7b --gpus 8 --gpu h100-80gb --batch-size 512 --sequence 4096
"""
