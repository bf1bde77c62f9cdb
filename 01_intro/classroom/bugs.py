"""All-reduces with one mistake each, of the kind people really make. Can you find it?

    python classroom/bugs.py                 the names
    python classroom/bugs.py NAME            the code with the mistake in it: by_hand.py, but for one place
    python classroom/bugs.py NAME --answer   the place, and the check that refuses it

The checks are those of check_all_reduce.py.
"""

from common.lab.bugs import Bug, Bugs

BUGS = Bugs(
    __file__,
    {
        "lost_remainder": Bug(
            "ring",
            right="tensor.view(-1).tensor_split(size)",
            wrong="tensor.view(-1)[: tensor.numel() // size * size].tensor_split(size)",
            refused_by="result",
            why="The elements left over when size does not divide numel belong to no chunk and are never added up. "
            "A test with 1024 elements on 2 and 4 ranks never notices.",
        ),
        "too_few_chunks": Bug(
            "ring",
            right="tensor.view(-1).tensor_split(size)",
            wrong="tensor.view(-1).chunk(size)",
            refused_by="error",
            why="torch.chunk(n) makes n chunks *at most*: 5 elements for 4 ranks become 2 + 2 + 1.",
        ),
        "stale_chunk": Bug(
            "ring",
            right="outgoing, incoming = chunks[(rank + 1 - step) % size], chunks[(rank - step) % size]",
            wrong="outgoing, incoming = chunks[(rank - step) % size], chunks[(rank - step - 1) % size]",
            refused_by="result",
            why="The all-gather starts with the same chunk as the reduce-scatter, but the complete one is the next: "
            "partial sums are handed round. Messages and bytes are right to the last one.",
        ),
        "own_data_lost": Bug(
            "ring",
            right="part = buffer[: incoming.numel()]",
            wrong="part = incoming",
            refused_by="result",
            why="What arrives is written over this rank's own chunk before the two were added.",
        ),
        "once_too_often": Bug(
            "ring",
            right="for step in range(size - 1):\n        outgoing, incoming = chunks[(rank + 1",
            wrong="for step in range(size):\n        outgoing, incoming = chunks[(rank + 1",
            refused_by="messages",
            why="The all-gather goes one step too far: each rank is sent a chunk that it has. The result is right, so "
            "only a count of the messages finds it.",
        ),
        "whole_tensor": Bug(
            "ring",
            right="chunks = tensor.view(-1).tensor_split(size)",
            wrong="chunks = [tensor.view(-1), *[tensor.view(-1)[:0]] * (size - 1)]",
            refused_by="bytes",
            why="The tensor is not cut: it goes round whole, and while one rank sends it all others wait. The result "
            "is right and so is the number of messages.",
        ),
        "not_a_ring": Bug(
            "ring",
            right="""outgoing, incoming = chunks[(rank - step) % size], chunks[(rank - step - 1) % size]
        part = buffer[: incoming.numel()]
        exchange(outgoing, right, part, left, group)""",
            wrong="""outgoing, incoming = chunks[(rank - step) % size], chunks[(rank + 1) % size]
        part = buffer[: incoming.numel()]
        exchange(outgoing, (rank - step - 1) % size, part, (rank + step + 1) % size, group)""",
            refused_by="pattern",
            why="Each chunk goes straight to the rank that adds it up. The sum and the messages are those of a ring, "
            "and so are the bytes of even chunks. But every rank talks to every other: where links form a ring, "
            "these messages share wires.",
        ),
        "send_then_receive": Bug(
            "ring",
            inside="exchange",
            right="for work in dist.batch_isend_irecv(operations):\n        work.wait()",
            wrong="for operation in operations:\n        operation.op(operation.tensor, operation.peer, group).wait()",
            refused_by="timeout",
            why="All ranks send and wait until somebody receives; nobody does.",
        ),
        "local_rank": Bug(
            "ring",
            right="rank, size = dist.get_rank(group), dist.get_world_size(group)",
            wrong='rank, size = int(os.environ["LOCAL_RANK"]), dist.get_world_size(group)',
            refused_by="timeout",
            why="LOCAL_RANK counts the processes of one node. On one node it is the rank; on the second node there is "
            "another rank 0.",
        ),
        "rank_in_the_world": Bug(
            "ring",
            right="dist.get_rank(group), dist.get_world_size(group)",
            wrong="dist.get_rank(), dist.get_world_size(group)",
            refused_by="error",
            why="In a group that is not everybody, a rank has another number than in the world.",
        ),
        "powers_of_two_only": Bug(
            "recursive_doubling",
            right="power = 1 << (size.bit_length() - 1)",
            wrong="power = size",
            refused_by="error",
            ranks=3,
            why="With 3 ranks, rank 2 looks for a partner with number 3. On 2 and 4 ranks all is well.",
        ),
        "arithmetic_distance": Bug(
            "recursive_doubling",
            right="distance *= 2",
            wrong="distance += 1",
            refused_by="result",
            why="Distances 1, 2, 3 are right for two ranks; of four ranks, some are added twice.",
        ),
    },
)

if __name__ == "__main__":
    BUGS.command_line()
