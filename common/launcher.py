"""What the launcher has told this process: read before there are ranks (and without torch)."""

import os


def environment() -> tuple[int, int, int, int]:
    """(rank, world size, local rank, processes on this node) as the launcher set them; (0, 1, 0, 1) without one. Where
    it says nothing about nodes, there is one."""
    rank = int(os.environ.get("RANK", 0))
    size = int(os.environ.get("WORLD_SIZE", 1))
    return rank, size, int(os.environ.get("LOCAL_RANK", rank)), int(os.environ.get("LOCAL_WORLD_SIZE", size))
