"""Shapes of transformers: what they have to be known by to count parameters, operations and bytes.

Those with a name are lines of planner/models.csv, whose columns are the fields of Model, and `aliases`."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from common.errors import UserError
from common.gpus import rows
from planner.names import lookup


@dataclass(frozen=True)
class Model:
    """A transformer.

    layers, width, heads: as usual; kv_heads: heads of keys and values (None: as many as heads)
    mlp_width:    between the two layers of the MLP (None: 4 width); mlp: "gelu" (two matrices) or "swiglu" (three)
    head_width:   of one head (None: width / heads)
    positions:    learned positions that the embedding has
    tied:         the output layer's weight is the embedding's
    bias:         linear layers have biases ("outputs": all but those of queries, keys and values, as in this course)
    experts, top_k, expert_width, shared_experts, dense_layers: of a mixture; a token goes to top_k of the experts and
                  to all shared ones, each of expert_width; the first dense_layers layers have an MLP of mlp_width
    parallel:     attention and MLP take the same input, and one sum along "tensor" is of both (GPT-NeoX, PaLM)
    context:      tokens of the longest sequence that its config.json allows (max_position_embeddings, n_positions), or
                  of the sequences in its paper where it has none (GPT-3, Megatron), of Llama 3 and 3.1 those of 3.1; 0
                  where that is not known. Pythia, Llama 2 and later, Mistral, Mixtral and Qwen were compared with
                  litgpt/config.py (Lightning-AI/litgpt, commit 26857050); LLaMA 7B, OPT, Qwen 3, DeepSeek-V3, Llama 3.1
                  405B and T5 base with copies of their config.json; other sizes, GPT-2 and BERT were not compared
    attention:    parameters of a layer's attention where they are not those of plain multi-head attention
    """

    name: str
    layers: int
    width: int
    heads: int
    vocabulary: int
    kv_heads: int | None = None
    mlp_width: int | None = None
    mlp: str = "gelu"
    head_width: int | None = None
    positions: int = 0
    tied: bool = False
    bias: str = "none"
    experts: int = 0
    top_k: int = 0
    expert_width: int = 0
    shared_experts: int = 0
    dense_layers: int = 0
    attention: int | None = None
    parallel: bool = False
    context: int = 0
    source: str = "given"

    def __post_init__(self):
        for what in ("layers", "width", "heads", "vocabulary"):
            if getattr(self, what) < 1:
                raise UserError(f"--{what} must be at least 1, not {getattr(self, what)}")
        if self.mlp not in ("gelu", "swiglu"):
            raise UserError(f"--mlp '{self.mlp}' is unknown; take gelu (two matrices) or swiglu (three)")
        if self.head_width is None and self.width % self.heads:
            raise UserError(f"--width {self.width} does not divide into --heads {self.heads}; change one of them")
        if self.kv_heads is not None and (self.kv_heads < 1 or self.heads % self.kv_heads):
            raise UserError(f"--kv-heads {self.kv_heads} does not divide --heads {self.heads}; take a divisor of it")
        if self.mlp_width is not None and self.mlp_width < 1:
            raise UserError(f"--mlp-width must be at least 1, not {self.mlp_width}")
        if self.experts and not 1 <= self.top_k <= self.experts:
            raise UserError(f"--top-k {self.top_k} is not between 1 and --experts {self.experts}")

    @property
    def query(self) -> int:
        """Width of all queries together."""
        return self.heads * (self.head_width or self.width // self.heads)

    @property
    def key(self) -> int:
        """Width of all keys together."""
        return self.query // self.heads * (self.kv_heads or self.heads)

    @property
    def hidden(self) -> int:
        return self.mlp_width or 4 * self.width

    @property
    def matrices(self) -> int:
        """Matrices of an MLP."""
        return 3 if self.mlp == "swiglu" else 2

    @property
    def attention_parameters(self) -> int:
        return self.attention or 2 * self.width * (self.query + self.key)

    @property
    def moe_layers(self) -> int:
        return self.layers - self.dense_layers if self.experts else 0

    @property
    def expert_parameters(self) -> int:
        """Parameters of all experts of all layers, without the shared ones."""
        return self.moe_layers * self.experts * self.matrices * self.width * self.expert_width

    @property
    def mlp_parameters(self) -> float:
        """Parameters of a layer's MLP that every token uses, on average: shared experts and routers in a mixture."""
        moe = self.width * (self.experts + self.matrices * self.shared_experts * self.expert_width)
        dense = self.layers - self.moe_layers
        return (dense * self.matrices * self.width * self.hidden + self.moe_layers * moe) / self.layers

    @property
    def uncut_parameters(self) -> int:
        """Parameters of a layer that tensor parallelism leaves whole: norms and biases of outputs."""
        norms = 2 * self.width * (2 if self.bias != "none" else 1)
        return norms + (2 * self.width if self.bias != "none" else 0)

    @property
    def layer_parameters(self) -> float:
        """Parameters of a layer, on average, without its experts."""
        biases = 0
        if self.bias != "none":
            biases = self.hidden * (self.matrices - 1) + (self.query + 2 * self.key if self.bias == "all" else 0)
        return self.attention_parameters + self.mlp_parameters + biases + self.uncut_parameters

    @property
    def embedding_parameters(self) -> int:
        return self.vocabulary * self.width

    @property
    def parameters(self) -> int:
        ends = self.embedding_parameters * (1 if self.tied else 2) + self.positions * self.width
        norm = self.width * (2 if self.bias != "none" else 1)
        return round(self.layers * self.layer_parameters + self.expert_parameters + ends + norm)

    @property
    def active_parameters(self) -> int:
        """The parameters that one token uses."""
        unused = self.moe_layers * (self.experts - self.top_k) * self.matrices * self.width * self.expert_width
        return self.parameters - unused

    def flops(self, sequence: int, lora: int = 0) -> float:
        """Model FLOPs of a training step per token: forward, and twice that backward; no recomputation. With adapters
        of rank `lora`, frozen weights have no gradients: forward, and once that backward; adapters' own are left out.

        Two per parameter of a matrix product, and attention's products over the whole sequence, causal or not
        (Narayanan et al. 2021, appendix; Chowdhery et al. 2022, appendix B).
        """
        norms = self.layers * self.uncut_parameters + self.width
        tables = (0 if self.tied else self.embedding_parameters) + self.positions * self.width
        return (4 if lora else 6) * (self.active_parameters - norms - tables) + 12 * self.layers * self.query * sequence


def _model(row: dict[str, str]) -> Model:
    """A line of planner/models.csv, where an empty cell is a field's default."""
    read: dict[str, Callable[[str], Any]] = {
        "name": str,
        "source": str,
        "mlp": str,
        "bias": str,
        "tied": "yes".__eq__,
        "parallel": "yes".__eq__,
    }
    given = {name: text for name, text in row.items() if text and name != "aliases"}
    return Model(**{name: read.get(name, int)(text) for name, text in given.items()})


_ROWS = rows(Path(__file__).with_name("models.csv"))
MODELS: dict[str, Model] = {row["name"]: _model(row) for row in _ROWS}
ALIASES = {alias: row["name"] for row in _ROWS for alias in row["aliases"].split()}


def find(name: str) -> Model:
    """The model of that name, also with an organization before it, as on Hugging Face. Raises UserError with the
    nearest name."""
    return lookup(name.lower().rpartition("/")[2], MODELS, "model", ALIASES)


def course_gpt(layers: int, width: int, heads: int, context: int, vocabulary: int = 256) -> Model:
    """The GPT of common/model.py."""
    return Model("course-gpt", layers, width, heads, vocabulary, positions=context, tied=True, bias="outputs")


def custom(base: Model | None, **fields) -> Model:
    """A model from a name, from a shape, or from a name with parts of its shape changed."""
    given = {name: value for name, value in fields.items() if value is not None}
    if base is not None:
        return replace(base, **given) if given else base
    missing = [name for name in ("layers", "width", "heads", "vocabulary") if name not in given]
    if missing:
        wanted = " ".join(f"--{name}" for name in missing)
        raise UserError(f"the model lacks {wanted}; give them, or a name with --model")
    return Model(name="given", **given)
