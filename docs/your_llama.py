"""A Llama of Transformers, a tokenizer and data of your own, for the course's script (docs/your-task.md).

All of it is made here, from a configuration and from Python's own text: nothing is downloaded.

    pip install -r requirements-engines.txt
    python docs/your_llama.py make
    torchrun --nproc_per_node=2 distributed_training.py --distributed --task docs/your_llama.py --validate-every 20
    python -m common.runs export RUN --safetensors --out weights.safetensors
    python docs/your_llama.py save weights.safetensors my-llama
    python -m planner measure docs/your_llama.py:micro_batch --gpu h100-80gb --gpus 8
"""

import json
import sys
import sysconfig
from pathlib import Path

from common import installed

if __name__ == "__main__":
    installed.at_start(("transformers", "datasets"), "requirements-engines.txt")

import common.vision  # noqa: F401  first: transformers imports torchvision
from common import quiet_engines  # noqa: F401  engines say much that means nothing
from common.errors import UserError, one_line_errors
from common.own import load_weights

# isort: split
import torch
from datasets import load_dataset
from tokenizers import ByteLevelBPETokenizer
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import Dataset, IterableDataset
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

FOLDER = Path("your-llama")  # base model, tokenizer, data
CONTEXT = 64  # tokens of an example


# --- the model ---
class Llama(nn.Module):
    """Tokens [batch, time] -> logits [batch, time, vocabulary]: what the script wants of a model."""

    def __init__(self, llama):
        super().__init__()
        self.llama = llama

    def forward(self, tokens):
        return self.llama(input_ids=tokens, use_cache=False).logits


def base():
    """The folder of the base. Without this question Transformers would look for that name on the network."""
    if not (FOLDER / "config.json").is_file():
        raise UserError(f"there is no model in {FOLDER}; python docs/your_llama.py make")
    return FOLDER


def model():
    """The base. Its files are mapped, not read: a weight is there once somebody cuts their part out of it."""
    config, tokenizer = AutoConfig.from_pretrained(base()), AutoTokenizer.from_pretrained(FOLDER)
    known = getattr(config, "vocab_size", len(tokenizer))  # what is no language model is refused below
    if len(tokenizer) > known:
        raise ValueError(f"the tokenizer has {len(tokenizer)} tokens, and the model knows {known}")
    if torch.get_default_device().type == "meta":  # a rank that gets rank 0's weights: shapes alone
        return Llama(AutoModelForCausalLM.from_config(config))
    return Llama(AutoModelForCausalLM.from_pretrained(FOLDER))


# --- the data ---
def windows(streaming=False):
    """Rows of CONTEXT + 1 tokens, for each of the two files."""
    tokenizer, found = AutoTokenizer.from_pretrained(base()), []
    for name in ("train", "validation"):
        file = str(FOLDER / f"{name}.jsonl")
        how = {"split": "train", "streaming": streaming, "cache_dir": str(FOLDER / "cache")}
        rows = load_dataset("json", data_files=file, **how)
        columns = rows.column_names or list(next(iter(rows), {}))
        if "text" not in columns:
            raise ValueError(f"{file} has no column 'text': it has {', '.join(columns) or 'no rows'}")

        def pack(documents):
            tokens = [token for ids in tokenizer(documents["text"])["input_ids"] for token in ids]
            starts = range(0, len(tokens) - CONTEXT, CONTEXT)
            return {"tokens": [tokens[start : start + CONTEXT + 1] for start in starts]}

        found.append(rows.map(pack, batched=True, batch_size=16, remove_columns=columns).with_format("torch"))
    return found


def pair(row):
    return row["tokens"][:-1], row["tokens"][1:]


class Pairs(Dataset):
    """Rows that are found by their numbers."""

    def __init__(self, rows):
        self.rows = rows

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, number):
        return pair(self.rows[number])


class PairStream(IterableDataset):
    """Rows as they come."""

    def __init__(self, rows):
        self.rows, self.set_epoch = rows, rows.set_epoch  # with each epoch they are shuffled anew

    def __iter__(self):
        return map(pair, self.rows)


def data():
    """For --task docs/your_llama.py: Arrow tables, which are mapped into memory."""
    return tuple(map(Pairs, windows()))


def stream():
    """For --task docs/your_llama.py:stream: files that are read from front to end, shuffled in a buffer."""
    training, validation = windows(streaming=True)
    return PairStream(training.shuffle(seed=0, buffer_size=256)), PairStream(validation)


def micro_batch():
    """For the planner: the model, and what it is called with."""
    return Llama(LlamaForCausalLM(CONFIG)), (torch.zeros(8, CONTEXT, dtype=torch.long),)


# --- made on the spot, and taken along ---
CONFIG = LlamaConfig(
    vocab_size=512,
    hidden_size=64,
    intermediate_size=192,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=CONTEXT,
)


def make():
    """A base with random weights in several files, a tokenizer, and two files of text."""
    FOLDER.mkdir(exist_ok=True)
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    texts = [file.read_text(errors="replace")[:4000] for file in files][:120]
    for name, part in (("train", texts[:-6]), ("validation", texts[-6:])):
        (FOLDER / f"{name}.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in part))
    bpe = ByteLevelBPETokenizer()
    bpe.train_from_iterator(texts[:-6], vocab_size=CONFIG.vocab_size, special_tokens=["<s>"], show_progress=False)
    PreTrainedTokenizerFast(tokenizer_object=bpe._tokenizer, bos_token="<s>").save_pretrained(FOLDER)
    torch.manual_seed(0)
    LlamaForCausalLM(CONFIG).save_pretrained(FOLDER, max_shard_size="200KB")


def save(weights, folder):
    """What was trained, as Transformers keeps it; and its loss after it is loaded again."""
    trained = model()
    load_weights(trained, weights)
    trained.llama.save_pretrained(folder)
    AutoTokenizer.from_pretrained(FOLDER).save_pretrained(folder)
    again = Llama(AutoModelForCausalLM.from_pretrained(folder)).eval()
    held_out = data()[1]
    inputs, targets = (torch.stack(part) for part in zip(*(held_out[n] for n in range(len(held_out))), strict=True))
    with torch.no_grad():
        loss = cross_entropy(again(inputs).flatten(0, 1), targets.flatten())
    print(f"{folder}: loss {loss:.4f} on {len(held_out)} examples that were not trained on")


if __name__ == "__main__":
    with one_line_errors():
        match sys.argv[1:]:
            case ["make"]:
                make()
            case ["save", weights, folder]:
                save(weights, folder)
            case _:
                raise UserError(
                    "say make, or save WEIGHTS FOLDER; training is distributed_training.py --task docs/your_llama.py"
                )
