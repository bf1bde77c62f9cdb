"""Errors whose text is meant for the person who typed the command."""

import os
import sys
import time
from contextlib import contextmanager


class UserError(Exception):
    """One line that names what is wrong and what to do."""


@contextmanager
def one_line_errors():
    """Turn a UserError into one line on stderr and exit code 2: once per node where all ranks have the same error."""
    try:
        yield
    except UserError as error:
        if int(os.environ.get("LOCAL_RANK", 0)) != 0:
            # Most likely rank 0 of this node says the same at this moment, and torchrun ends the others as
            # soon as it exits. Whoever is still here afterwards had an error of its own.
            time.sleep(3)
        print(f"error: {error}", file=sys.stderr, flush=True)
        sys.exit(2)
