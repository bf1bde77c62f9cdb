"""What a collective sends by the ring formula: without torch, so that a planner can ask it in no time."""


def wire_bytes(operation: str, payload: float, size: int) -> float:
    """Bytes that each of `size` ranks sends for a collective over a full payload of `payload` bytes.

    `payload` is the whole buffer: the vector of an all-reduce, broadcast or reduce, the *gathered* result of an
    all-gather or gather, the *unreduced* input of a reduce-scatter, everything one rank hands in to an
    all-to-all. Rooted operations are charged to the average rank: of a scatter, where the root alone sends, every rank
    is charged 1/size. Source: nccl-tests, doc/PERFORMANCE.md.
    """
    share = (size - 1) / size
    factor = {"all_reduce": 2 * share, "scatter": share / size, "gather": share / size, "send": 1.0, "recv": 0.0}
    factor |= {"barrier": 0.0, "monitored_barrier": 0.0}
    return payload * factor.get(operation, share)
