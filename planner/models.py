"""Shapes of transformers: what they have to be known by to count parameters, operations and bytes."""

from dataclasses import dataclass, replace

from common.errors import UserError
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
        """Of all experts of all layers; the shared ones are not among them."""
        return self.moe_layers * self.experts * self.matrices * self.width * self.expert_width

    @property
    def mlp_parameters(self) -> float:
        """Of a layer's MLP that every token uses, on average: shared experts and routers in a mixture."""
        moe = self.width * (self.experts + self.matrices * self.shared_experts * self.expert_width)
        dense = self.layers - self.moe_layers
        return (dense * self.matrices * self.width * self.hidden + self.moe_layers * moe) / self.layers

    @property
    def uncut_parameters(self) -> int:
        """Of a layer: norms and biases of outputs, which tensor parallelism leaves whole."""
        norms = 2 * self.width * (2 if self.bias != "none" else 1)
        return norms + (2 * self.width if self.bias != "none" else 0)

    @property
    def layer_parameters(self) -> float:
        """Of a layer, on average, without its experts."""
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
        """Of those, what one token uses."""
        unused = self.moe_layers * (self.experts - self.top_k) * self.matrices * self.width * self.expert_width
        return self.parameters - unused

    def flops(self, sequence: int) -> float:
        """Model FLOPs of a training step per token: forward, and twice that backward; no recomputation.

        Two per parameter of a matrix product, and attention's products over the whole sequence, causal or not
        (Narayanan et al. 2021, appendix; Chowdhery et al. 2022, appendix B).
        """
        norms = self.layers * self.uncut_parameters + self.width
        tables = (0 if self.tied else self.embedding_parameters) + self.positions * self.width
        return 6 * (self.active_parameters - norms - tables) + 12 * self.layers * self.query * sequence


def _family(source: str, common: dict, **sizes: tuple) -> dict[str, Model]:
    """name -> (layers, width, heads, further fields)."""
    found = {}
    for name, (layers, width, heads, *more) in sizes.items():
        name = name.replace("_", "-").replace("--", ".")
        fields = common | (more[0] if more else {})
        found[name] = Model(name=name, layers=layers, width=width, heads=heads, source=source, **fields)
    return found


GPT2 = {"vocabulary": 50257, "positions": 1024, "tied": True, "bias": "all"}
LLAMA = {"vocabulary": 32000, "mlp": "swiglu"}
LLAMA3 = {"vocabulary": 128256, "mlp": "swiglu", "kv_heads": 8}
QWEN = {"vocabulary": 152064, "mlp": "swiglu"}
MEGATRON = {"vocabulary": 51200, "positions": 2048, "tied": True, "bias": "all"}

MODELS: dict[str, Model] = {
    **_family(
        "Radford et al. 2019, table 2", GPT2,
        gpt2=(12, 768, 12), gpt2_medium=(24, 1024, 16), gpt2_large=(36, 1280, 20), gpt2_xl=(48, 1600, 25),
    ),
    **_family(
        "Brown et al. 2020, table 2.1", GPT2 | {"positions": 2048},
        gpt3_1__3b=(24, 2048, 16), gpt3_6__7b=(32, 4096, 32), gpt3_13b=(40, 5120, 40), gpt3_175b=(96, 12288, 96),
    ),
    **_family(
        "Zhang et al. 2022, table 1", {"vocabulary": 50272, "positions": 2050, "tied": True, "bias": "all"},
        opt_125m=(12, 768, 12), opt_1__3b=(24, 2048, 32), opt_6__7b=(32, 4096, 32), opt_13b=(40, 5120, 40),
        opt_30b=(48, 7168, 56), opt_66b=(64, 9216, 72), opt_175b=(96, 12288, 96),
    ),
    **_family(
        "Biderman et al. 2023, table 1", {"vocabulary": 50304, "bias": "all"},
        pythia_160m=(12, 768, 12), pythia_410m=(24, 1024, 16), pythia_1__4b=(24, 2048, 16),
        pythia_2__8b=(32, 2560, 32), pythia_6__9b=(32, 4096, 32), pythia_12b=(36, 5120, 40),
    ),
    **_family(
        "Touvron et al. 2023, table 2", LLAMA,
        llama_7b=(32, 4096, 32, {"mlp_width": 11008}), llama_13b=(40, 5120, 40, {"mlp_width": 13824}),
        llama_33b=(60, 6656, 52, {"mlp_width": 17920}), llama_65b=(80, 8192, 64, {"mlp_width": 22016}),
        llama_2_7b=(32, 4096, 32, {"mlp_width": 11008}), llama_2_13b=(40, 5120, 40, {"mlp_width": 13824}),
        llama_2_70b=(80, 8192, 64, {"mlp_width": 28672, "kv_heads": 8}),
    ),
    **_family(
        "Grattafiori et al. 2024, table 3", LLAMA3,
        llama_3_8b=(32, 4096, 32, {"mlp_width": 14336}), llama_3_70b=(80, 8192, 64, {"mlp_width": 28672}),
        llama_3_405b=(126, 16384, 128, {"mlp_width": 53248}),
        llama_3__2_1b=(16, 2048, 32, {"mlp_width": 8192, "tied": True}),
        llama_3__2_3b=(28, 3072, 24, {"mlp_width": 8192, "tied": True}),
    ),
    **_family(
        "Jiang et al. 2023, table 1; Jiang et al. 2024, table 1", LLAMA | {"kv_heads": 8},
        mistral_7b=(32, 4096, 32, {"mlp_width": 14336}),
        mixtral_8x7b=(32, 4096, 32, {"experts": 8, "top_k": 2, "expert_width": 14336, "mlp_width": 14336}),
        mixtral_8x22b=(56, 6144, 48, {"experts": 8, "top_k": 2, "expert_width": 16384, "mlp_width": 16384,
                                      "vocabulary": 32768}),
    ),
    **_family(
        "Qwen2.5 model cards (config.json)", QWEN,
        qwen2__5_7b=(28, 3584, 28, {"mlp_width": 18944, "kv_heads": 4}),
        qwen2__5_14b=(48, 5120, 40, {"mlp_width": 13824, "kv_heads": 8}),
        qwen2__5_32b=(64, 5120, 40, {"mlp_width": 27648, "kv_heads": 8}),
        qwen2__5_72b=(80, 8192, 64, {"mlp_width": 29568, "kv_heads": 8}),
    ),
    **_family(
        "DeepSeek-AI 2024 (V3), section 4.2; attention with latent keys counted from its ranks 1536 and 512",
        {"vocabulary": 129280, "mlp": "swiglu"},
        deepseek_v3=(61, 7168, 128, {
            "mlp_width": 18432, "experts": 256, "top_k": 8, "expert_width": 2048, "shared_experts": 1,
            "dense_layers": 3, "head_width": 160,
            "attention": 7168 * 1536 + 1536 * 128 * 192 + 7168 * 576 + 512 * 128 * 256 + 128 * 128 * 7168,
        }),
    ),
    **_family(
        "Devlin et al. 2019, section 3", {"vocabulary": 30522, "positions": 514, "tied": True, "bias": "all"},
        bert_base=(12, 768, 12), bert_large=(24, 1024, 16),
    ),
    **_family(  # encoder and decoder layers alike; the decoder's attention to the encoder counts half for each layer
        "Raffel et al. 2020, section 3.7.2; half of the layers have a second attention, counted as half of one in each",
        {"vocabulary": 32128, "tied": True},
        t5_base=(24, 768, 12, {"mlp_width": 3072, "attention": 6 * 768 * 768}),
        t5_large=(48, 1024, 16, {"mlp_width": 4096, "attention": 6 * 1024 * 1024}),
        t5_3b=(48, 1024, 32, {"mlp_width": 16384, "head_width": 128, "attention": 6 * 1024 * 4096}),
        t5_11b=(48, 1024, 128, {"mlp_width": 65536, "head_width": 128, "attention": 6 * 1024 * 16384}),
    ),
    **_family(
        "Narayanan et al. 2021, table 1", MEGATRON,
        megatron_1__7b=(24, 2304, 24), megatron_3__6b=(30, 3072, 32), megatron_7__5b=(36, 4096, 32),
        megatron_18b=(40, 6144, 48), megatron_39b=(48, 8192, 64), megatron_76b=(60, 10240, 80),
        megatron_145b=(80, 12288, 96), megatron_310b=(96, 16384, 128), megatron_530b=(105, 20480, 128),
        megatron_1t=(128, 25600, 160), megatron_22b=(48, 6144, 64), megatron_175b=(96, 12288, 96),
    ),
}  # fmt: skip
ALIASES = {
    "gpt-2": "gpt2", "gpt-2-small": "gpt2", "gpt2-small": "gpt2", "gpt-2-medium": "gpt2-medium",
    "gpt-2-large": "gpt2-large", "gpt-2-xl": "gpt2-xl", "gpt-3": "gpt3-175b", "gpt3": "gpt3-175b",
    "llama-70b": "llama-2-70b", "llama-2-7b-hf": "llama-2-7b", "llama-30b": "llama-33b",
    "llama-3.1-8b": "llama-3-8b", "llama-3.1-70b": "llama-3-70b", "llama-3.1-405b": "llama-3-405b",
    "llama-405b": "llama-3-405b", "llama3-8b": "llama-3-8b", "llama3-70b": "llama-3-70b", "llama3-405b": "llama-3-405b",
    "llama2-7b": "llama-2-7b", "llama2-13b": "llama-2-13b", "llama2-70b": "llama-2-70b", "deepseek": "deepseek-v3",
}  # fmt: skip


def find(name: str) -> Model:
    """The model of that name. Raises UserError with the nearest name."""
    return lookup(name.lower(), MODELS, "model", ALIASES)


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
