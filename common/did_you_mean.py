"""Which of the names that there are somebody meant who typed another one."""

import difflib
from collections.abc import Iterable

# What other programs call an option: for "did you mean".
ELSEWHERE = {
    "lr": ("learning_rate",),
    "steps": ("max_steps", "iterations", "num_steps", "max_iters"),
    "epochs": ("num_train_epochs", "num_epochs", "max_epochs"),
    "validate_batch_size": ("per_device_eval_batch_size", "eval_batch_size"),
    "validate_every": ("eval_steps", "eval_every"),
    "keep_best": ("load_best_model_at_end", "save_best"),
    "keep": ("save_total_limit",),
    "width": ("hidden_size", "d_model", "n_embd", "embedding_size", "dim"),
    "layers": ("n_layers", "n_layer", "num_layers", "num_hidden_layers", "depth"),
    "heads": ("n_heads", "n_head", "num_heads", "num_attention_heads"),
    "context": ("block_size", "sequence_length", "seq_len", "seq_length", "max_length"),
    "accumulation_steps": ("gradient_accumulation_steps", "grad_accum", "grad_acc_steps"),
    "batch_size": ("global_batch_size", "bs", "train_batch_size"),
    "run_dir": ("output_dir", "out_dir", "save_dir", "log_dir"),
    "precision": ("dtype", "bf16", "fp16", "amp", "mixed_precision"),
    "microbatches": ("num_microbatches", "micro_batches", "n_microbatches"),
    "recompute": ("activation_checkpointing", "gradient_checkpointing"),
}


def did_you_mean(name: str, known: Iterable[str], otherwise: str = "", cutoff: float = 0.6) -> str:
    """ "did you mean 'ddp'?" with the nearest of the names that are known; `otherwise` where none is near.

    `cutoff` is the least similarity, from 0 to 1, as difflib.get_close_matches has it.
    """
    known = list(known)
    near = difflib.get_close_matches(name, known, 1, cutoff) or difflib.get_close_matches(
        name.lower(), known, 1, cutoff
    )
    return f"did you mean '{near[0]}'?" if near else otherwise


def nearest_option(name: str, known: Iterable[str]) -> str | None:
    """The option that an unknown name most likely means: by what other programs call it, or by its letters."""
    known = list(known)
    elsewhere = [option for option, names in ELSEWHERE.items() if name.lower() in names and option in known]
    return next(iter(elsewhere + difflib.get_close_matches(name, known, n=1)), None)
