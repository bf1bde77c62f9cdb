"""Numbers and names of the course that are needed where importing torch would take too long, too."""

MEBIBYTE, GIB = 2**20, 2**30
VOCABULARY = 256  # of text: its bytes
PRECISIONS = ("fp32", "bf16", "fp16")  # of the forward pass, as --precision has them
RECOMPUTE = ("none", "selective", "full")  # what is computed again: less memory and more time from one to the next
MOST_WRITTEN = 100_000  # bytes that a model may be asked to write: some minutes
BEFORE_PROFILE = 10  # steps before those that --profile records: the first ones allocate, compile and connect
MOST_LAYERS, MOST_WIDTH = 10_000, 1_000_000  # of a GPT
MOST_RANKS = 1_000_000  # of what is only computed with: no cluster has more
