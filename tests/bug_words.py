"""With which words each bug of chapters 01 to 03 is refused, and what its explanation must say.

A bug that is refused is not yet the bug that its explanation describes: another mistake in the same place is refused,
too. So here is how far off each is, found once and looked at. Among the words " ... " is for any others.
"""

import re

FIRST = "torch.int64 []: element 0 is"  # one element on four ranks: 540, and 1595 in all
SAYS = {
    "01_intro": {
        "lost_remainder": (f"result: rank 0 of 4, {FIRST} 540, should be 1595",
                           "does not divide numel belong to no chunk ... 1024 elements on 2 and 4 ranks never notices"),
        "too_few_chunks": ("IndexError: tuple index out of range", "at most*: 5 elements for 4 ranks become 2 + 2 + 1"),
        "stale_chunk": (f"result: rank 0 of 4, {FIRST} 540, should be 1595", "the complete one is the next"),
        "own_data_lost": (f"result: rank 0 of 4, {FIRST} 4320, should be 1595", "over this rank's own chunk before"),
        "once_too_often": ("messages: rank 0 of 4, torch.int64 []: 7 sent, expected 6",
                           "The all-gather goes one step too far ... result is right, so only a count of the messages"),
        "whole_tensor": ("sent, received (32.0, 16.0), expected (24, 16)", "The tensor is not cut: it goes round"),
        "not_a_ring": ("sent to ranks [1, 2, 3], not [1]", "Each chunk goes straight to the rank that adds it up"),
        "send_then_receive": ("Timed out waiting 3000ms for", "All ranks send and wait until somebody"),
        "local_rank": ("Timed out waiting 3000ms for",
                       "LOCAL_RANK counts the processes of one node. On one node it is the rank; on the second node"),
        "rank_in_the_world": ("exchange(outgoing, right, part, left", "In a group that is not everybody, a rank has"),
        "powers_of_two_only": ("of 3: ValueError: Group rank 3 is not part of group",
                               "With 3 ranks, rank 2 looks for a partner with number 3. On 2 and 4 ranks all is well"),
        "arithmetic_distance": (f"result: rank 0 of 4, {FIRST} 3190, should be 1595", "two ranks; of four ranks, some"),
    },
    "02_data_parallel": {
        "first_replica_only": ("step 1 ... (ratio 0.9083", "Only the first replica's gradient comes back"),
        "overwritten": ("step 1 ... (ratio 0.7236", "written over that of the one before, where it should be added"),
        "averaged": ("step 1 ... (ratio 0.5)", "averaged, as DistributedDataParallel does. But its ranks have a loss"),
        "plain_deepcopy": ("step 1 ... (ratio 0)", "Autograd leaves the gradients with them, and they are thrown away"),
        "kept_replicas": ("step 2 ... (ratio 0.9978", "all but the first, which shares the model's memory, compute"),
        "strided_slices": ("step 1 ... (ratio 1.0035", "dealt out like cards, and gathered device by device"),
        "scattered_time": ("step 1 ... (ratio 1.0165", "Sequences are cut, not the batch, as happens with inputs of"),
        "gathered_along_time": ("step 1 ... (ratio 0.9782", "joined along time"),
        "same_slice": ("step 1 ... (ratio 1.0027", "Every replica computes the first slice"),
        "divided_by_devices": ("step 1 ... (ratio 0.5)", "divided by the number of devices, 'because the gradients"),
        "not_divided": ("step 1 ... (ratio 3)", "with accumulation M, gradients are M times too large"),
        "impatient": ("step 1 ... (ratio 0.9998", "steps after every micro-batch, by a gradient that is not complete"),
    },
    "03_ddp": {
        "too_large": ("step 1 ... (ratio 2)", "SGD's learning rate is N times what was asked for"),
        "too_small": ("step 1 ... (ratio 0.5)", "divided by the number of ranks twice"),
        "wrong_tensor": ("step 1 ... (ratio 17.99", "the optimizer is handed the weights for a gradient"),
        "never_reduced": ("step 1 ... (ratio 0.7148", "A copy is reduced, and thrown away. Every rank trains a model"),
        "only_the_last": ("step 1 ... (ratio 0.6521", "without being sent are dropped: only the last micro-batch"),
        "clipped_too_early": ("step 1 ... (ratio 0.7264", "by the norm of its own gradient, which is larger than that"),
        "own_weights": ("step 1 ... (ratio 1.0049", "Ranks seeded differently start from different weights"),
        "drifting_buffers": ("running_mean on rank 1 differs by 0.468", "are no parameters and have no gradient"),
        "not_divided": ("step 1 ... (ratio 3)", "with accumulation M, gradients are M times too large"),
        "impatient": ("step 1 ... (ratio 1.0169", "after the first micro-batch, and after every other, by the"),
        "leftovers": ("step 2 ... (ratio 1.0602", "Gradients of the step before are still there, and are added to"),
        "local_loss": ("step 1 on rank 0 ... (ratio 1.023)", "Every rank reports the loss of its own last micro-batch"),
        "same_slice": ("step 1 on rank 0 ... (ratio 1.0103", "N times the work, for one rank's gradient"),
        "alone_on_rank_0": ("rank 0 ... reduce", "a collective needs all ranks"),
        "no_set_epoch": ("stream ... from step 0 on, micro-batch 0 of step 2 on rank 0 is", "the order of the first"),
        "a_batch_more": ("ranks got [5, 4] batches, expected 4 each", "Where the data ends in the middle of a global"),
    },
}  # fmt: skip


def said(chapter: str, name: str, bug, refusal: str) -> None:
    """Assert that a bug is refused with the words above, and explained with them. Other chapters have none here."""
    words, why = SAYS.get(chapter, {}).get(name, ("", ""))
    assert has(words, refusal), f"{name} should be refused with {words!r}, and is with: {refusal}"
    assert has(why, bug.why), f"{name}: its explanation should say {why!r}, and says: {bug.why}"


def has(words: str, text: str) -> bool:
    return bool(re.search(".*".join(map(re.escape, words.split(" ... "))), text, re.DOTALL))
