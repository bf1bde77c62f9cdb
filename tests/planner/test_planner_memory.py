"""What the planner says of memory: ZeRO's table cell by cell, published formulas of activations, known models."""

import re
import warnings
from dataclasses import replace

import pytest
import torch
from planner_cases import refusal, say_json

from common.constants import GIB
from common.errors import UserError
from common.model import GPT, Block
from course.fsdp.formulas import layer_bytes, score_bytes
from planner import any_module, constants, memory, models, published
from planner.constants import PRIOR
from planner.hardware import find_gpu
from planner.layout import Layout

ZERO = published.rows("zero_table1_model_state_memory.csv")


def layout(stage=0, precision="bf16-mixed-16", batch_size=1, **sizes):
    return Layout(tuple(sizes.items()), batch_size, zero_stage=stage, precision=precision)


@pytest.mark.parametrize("row", ZERO, ids=lambda row: f"{row['model']}-{row['dp']}-{row['stage'].split()[0]}")
def test_zeros_table_cell_by_cell(row):
    """Within one unit of the last digit that the paper prints: it rounds some cells, and cuts others off."""
    stage = ("Pos", "Pos+g", "Pos+g+p").index(row["stage"].split()[0]) + 1
    printed = row["paper_GB"]
    unit = 10.0 ** -len(printed.partition(".")[2])
    kept = memory.state(layout(stage, shard=int(row["dp"])), float(row["params"]), 0)
    assert abs(sum(kept.values()) / 1e9 - float(printed)) < unit, "GB of the state, and what the paper prints"


def test_recipes_have_their_bytes():
    """Bytes of a parameter, by precision and stage, as Megatron-LM's README and ZeRO's section 3.1 have them."""
    sizes = {
        (0, "float32"): 16, (0, "bf16-mixed"): 18, (0, "fp16-mixed"): 20, (0, "bf16-mixed-16"): 16, (0, "bf16"): 8,
        (0, "bf16-12"): 12, (3, "bf16-mixed"): 16,
    }  # fmt: skip
    for (stage, precision), size in sizes.items():
        assert sum(memory.state(layout(stage, precision), 1, 0).values()) == size, precision


GPT3 = {"a": 96, "h": 12288, "s": 2048}  # of 175 billion parameters: Korthikanti et al. 2022, table 3


@pytest.mark.parametrize(
    "tensor, cut, recompute, formula",
    [  # bytes per token and unit of width: their table 2, with t = 8
        (1, False, "none", lambda a, h, s: 34 + 5 * a * s / h),
        (8, False, "none", lambda a, h, s: 10 + 24 / 8 + 5 * a * s / (8 * h)),
        (8, True, "none", lambda a, h, s: 34 / 8 + 5 * a * s / (8 * h)),
        (8, False, "attention", lambda a, h, s: 10 + 24 / 8),
        (8, True, "attention", lambda a, h, s: 34 / 8),
        (8, False, "full", lambda a, h, s: 2),
    ],
)
def test_activations_are_korthikantis(tensor, cut, recompute, formula):
    a, h, s = GPT3.values()
    model = models.Model("gpt", 1, h, a, 51200)
    one = Layout(
        (("tensor", tensor),), 3, micro_batch=3, sequence=s, recompute=recompute, sequence_parallel=cut, flash=False,
        dropout=True,
    )  # fmt: skip
    assert memory.layer_memory(model, one) == pytest.approx(3 * s * h * formula(a, h, s)), "bytes of a layer"


@pytest.mark.parametrize("framework, tensors", [("megatron", 1), ("torch", 2), ("course", 2)])
@pytest.mark.parametrize("width", [24, 32, 48])  # of an expert; with 32, a token's experts are as wide as a usual MLP
def test_a_mixture_keeps_tokens_at_their_experts(framework, tensors, width):
    """Beside what an MLP as wide as a token's two experts keeps: of 2 bytes, what goes in and (but for Megatron-LM)
    what comes out, for each of the two."""
    one = Layout((("data", 1),), 1, sequence=8, framework=framework)
    mixture = models.Model("mixture", 1, 16, 2, 99, experts=4, top_k=2, expert_width=width)
    dense = models.Model("dense", 1, 16, 2, 99, mlp_width=2 * width)
    more = memory.layer_memory(mixture, one) - memory.layer_memory(dense, one)
    assert more == 8 * 2 * 2 * 16 * tensors


def test_bytes_of_a_layer_of_which_some_is_computed_again():
    """Of width 10, queries 8, keys 4, an MLP of 20, on two ranks."""
    sizes = {"width": 10, "query": 8, "key": 4, "mlp_width": 20, "tensor": 2}
    for fields, expected in (
        ({"recompute": "full", "sequence_parallel": False}, 2 * 10),
        ({"recompute": "products"}, 2 * (30 / 2 + (8 + 4 + 4 + 20) / 2)),
        ({"recompute": "products", "gated": 4}, 2 * (30 / 2 + (8 + 4 + 4 + 40) / 2)),
        ({"recompute": "operators"}, 2 * (10 / 2 + (8 + 8 + 4 + 20) / 2)),
        ({"recompute": "operators", "gated": 4}, 2 * (20 / 2 + (8 + 8 + 4 + 20) / 2)),
    ):
        assert layer_bytes(**sizes, **fields) == expected, f"bytes per token that a layer keeps, {fields}"
    assert score_bytes(4, 10, dropout=False) == 2 * 4 * 10, "one matrix of 16 bits without dropout"


PARAMETERS = {  # as their sources print them, in billions
    "gpt2": 0.124, "gpt2-xl": 1.558, "llama-7b": 6.738, "llama-2-70b": 68.977, "llama-3-8b": 8.030,
    "llama-3-70b": 70.554, "llama-3-405b": 405.85, "mistral-7b": 7.242, "mixtral-8x7b": 46.70, "qwen2.5-7b": 7.616,
    "deepseek-v3": 671.03, "opt-6.7b": 6.658, "pythia-6.9b": 6.857, "megatron-530b": 529.6, "megatron-1t": 1008.0,
    "t5-11b": 11.307, "bert-large": 0.335,
}  # fmt: skip


@pytest.mark.parametrize("name", PARAMETERS)
def test_parameters_of_known_models(name):
    assert models.find(name).parameters / 1e9 == pytest.approx(PARAMETERS[name], rel=4e-3), "billions of parameters"


def test_every_token_uses_all_three_matrices_of_a_shared_expert():
    """DeepSeek-V3 has one in each of 58 layers, of width 2,048 in a model of 7,168."""
    one = models.find("deepseek-v3")
    two = models.custom(one, shared_experts=2)
    each = 58 * 3 * 7168 * 2048
    assert (two.parameters - one.parameters, two.active_parameters - one.active_parameters) == (each, each), (
        "all, active"
    )


@pytest.mark.parametrize("tied", [True, False])
def test_parameters_of_the_courses_gpt(tied):
    with torch.device("meta"):
        model = GPT(3, 64, 4, 32, tied=tied)
    shape = models.custom(models.course_gpt(3, 64, 4, 32), tied=tied)
    assert shape.parameters == sum(p.numel() for p in model.parameters()), "the planner's parameters, and the model's"


def test_megatrons_parameters_are_those_of_its_table():
    for run in published.megatron():
        printed = float(run.model.name.split()[1][:-1])
        assert run.model.parameters / 1e9 == pytest.approx(printed, abs=0.06), (
            f"billions of parameters of {run.model.name}"
        )


def test_what_ran_out_of_memory_does_not_fit_and_what_ran_does():
    for run in published.torchtitan():
        needed = memory.estimate(run.model, run.layout, PRIOR).needed
        assert (needed > run.cluster.gpu.memory) is run.out_of_memory, run.name


class Gated(torch.nn.Module):
    """A layer as Llama's: 4 heads of queries and 2 of keys, SwiGLU, no biases, norms that keep their input alone."""

    def __init__(self, width=64, key=32, hidden=176):
        super().__init__()
        self.norms = torch.nn.ModuleList(torch.nn.LayerNorm(width, bias=False) for _ in range(2))
        sizes = {"q": (width, width), "k": (width, key), "v": (width, key), "o": (width, width),
                 "gate": (width, hidden), "up": (width, hidden), "down": (hidden, width)}  # fmt: skip
        self.linear = torch.nn.ModuleDict({n: torch.nn.Linear(*size, bias=False) for n, size in sizes.items()})

    def forward(self, x):
        h = self.norms[0](x)
        q, k, v = (self.linear[name](h).unflatten(-1, (-1, 16)).transpose(1, 2) for name in "qkv")
        y = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.linear["o"](y.transpose(1, 2).flatten(-2))
        h = self.norms[1](x)
        return x + self.linear["down"](torch.nn.functional.silu(self.linear["gate"](h)) * self.linear["up"](h))


def test_16_bit_gradients_beside_a_copy_of_the_parameters_are_not_fully_shards():
    """InternLM under stage 3, were its framework not named: what nvidia-smi says is a third more than fully_shard's."""
    errors = []
    for run in published.runs():
        if run.layout.precision == "bf16-mixed-16" and run.layout.zero_stage == 3 and run.gib:
            found = memory.estimate(run.model, replace(run.layout, framework=""), constants.load())
            errors.append(found.expected / GIB / run.gib - 1)
    assert len(errors) >= 10 and sum(map(abs, errors)) / len(errors) < 0.1


def test_bf16_optimizers_gradients_are_what_blooms_runs_had_besides():
    """Where gradients are added up in float32, DeepSpeed has those in 16 bit as well. Its constant is that of BLOOM's
    runs in fp16, which have none of them."""
    errors = []
    for run in published.runs():
        if run.source.startswith("BLOOM") and run.layout.precision == "bf16-mixed" and run.gib:
            found = memory.estimate(run.model, run.layout, constants.load())
            errors.append(found.expected / GIB / run.gib - 1)
    assert len(errors) >= 10 and abs(sum(errors)) / len(errors) < 0.05


@pytest.mark.parametrize("half", [False, True])
def test_what_a_layer_keeps_is_what_autograd_keeps(half):
    """Counted on tensors without memory, of two architectures; what the formula leaves out are numbers of each token
    and head: means and deviations of norms, and attention's sums."""
    tokens, width, size = 4 * 128, 64, 2 if half else 4
    x = (4, 128, width)
    for make, formula, products in (
        (lambda: Block(width, 4), layer_bytes(width, width, width, 4 * width, itemsize=size), 12 * width**2),
        (Gated, layer_bytes(width, width, 32, 176, gated=4, itemsize=size), 2 * width * (64 + 32) + 3 * width * 176),
    ):
        found = any_module.measure(lambda make=make: (make(), (torch.randn(x, requires_grad=True),)), half)
        per_token = found.kept / tokens
        assert formula <= per_token <= formula + 4 * (2 * 2 + 4) + 1, (make, per_token, formula)
        attention = 6 * 2 * tokens * 128 * width  # 2 products of scores forward, 4 backward; PyTorch counts them whole
        assert found.flops == pytest.approx(6 * tokens * products + attention, rel=0.2), "FLOPs of a layer"


def linear():
    return torch.nn.Linear(1000, 1000, bias=False), (torch.randn(8, 1000),)


def test_any_module_is_measured(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(
        "import torch\n"
        "def model():\n"
        "    layers = [torch.nn.Linear(1000, 1000, bias=False) for _ in range(4)]\n"
        "    return torch.nn.Sequential(*layers), (torch.randn(8, 1000),)\n"
        "def alone():\n    return torch.nn.Linear(1, 1)\n"
        "class Asks(torch.nn.Linear):\n    def forward(self, x):\n        return x * float(x.sum())\n"
        "def asks():\n    return Asks(1, 1), (torch.randn(1),)\n"
        "def frozen():\n    return torch.nn.Linear(1, 1).requires_grad_(False), (torch.randn(1),)\n"
        "def lazy():\n    return torch.nn.LazyLinear(4), (torch.randn(1),)\n"
        "def raises():\n    raise ValueError('no such layer')\n"
        "def many():\n    return torch.nn.Linear(1, 1), (torch.randn(1), torch.randn(1))\n"
        "class Long(torch.nn.Linear):\n    def forward(self, x):\n        raise ValueError('one line\\nand another')\n"
        "def long():\n    return Long(1, 1), (torch.randn(1),)\n"
    )
    line = "--gpu h100-80gb --gpus 2 --precision fp32"
    said = say_json(f"measure {file}:model {line}")
    assert (said["parameters"], said["largest"]) == (4_000_000, 1_000_000), "of four layers, and of one"
    assert said["kept"] == 4 * 4 * 8 * 1000, "each of four layers keeps its input"
    assert said["flops"] == 2 * 8 * 1_000_000 * (4 + 4 + 3), "the first layer's input needs no gradient"
    assert said["stages"]["zero1"]["parts"]["optimizer"] == 8 * 4_000_000 / 2, "bytes of the optimizer under ZeRO-1"
    assert said["stages"]["fsdp"]["parts"]["gathered"] == 2 * 4 * 1_000_000, "a layer and the next one"
    broken = tmp_path / "broken.py"
    broken.write_text("raise ValueError('no such file of settings')")
    for what, says in (
        (f"{file}:frozen", "trained"),
        (f"{file}:raises", "ValueError: no such layer"),
        (f"{file}:lazy", "lazy"),
        (f"{file}:many", "TypeError: Linear.forward() takes 2 positional arguments but 3 were given"),
        (f"{file}:long", "ValueError: one line"),
        (f"{broken}:model", "ValueError: no such file of settings"),
        (f"{file}:none", f"{file} has no function 'none'"),
        ("nowhere.py:f", "no such file"),
        (str(file), "FILE.py:FUNCTION"),
        (f"{file}:alone", "(module, inputs)"),
        (f"{file}:asks", "DataDependentOutputException: aten._local_scalar_dense.default"),
    ):
        assert says in refusal(f"measure {what} {line}"), what


def test_inputs_are_a_tensor_or_several_in_order_or_by_name():
    kinds = (lambda x: x, lambda x: (x,), lambda x: [x], lambda x: {"x": x})
    found = [any_module.measure(lambda given=given: (Several(), given(torch.randn(4, 100)))) for given in kinds]
    assert found == [found[0]] * 4
    with pytest.raises(UserError, match="int"):
        any_module.measure(lambda: (Several(), 3))


def test_a_function_that_fails_leaves_the_default_type_as_it_was():
    def fails():
        made_with.append(torch.get_default_dtype())
        raise ValueError("no such layer")

    for half, made in ((False, torch.float32), (True, torch.bfloat16)):
        made_with = []
        with pytest.raises(UserError, match="ValueError: no such layer"):
            any_module.measure(fails, half)
        types = made_with[0], torch.get_default_dtype()
        assert types == (made, torch.float32), f"half {half}: the default type inside of the function, and after it"


class Several(torch.nn.Module):
    """Two results that are trained, and one that is not."""

    def __init__(self):
        super().__init__()
        self.one, self.two = (torch.nn.Linear(100, size, bias=False) for size in (100, 200))

    def forward(self, x):
        return x, self.one(x), self.two(x), 3


def test_all_results_of_a_module_that_are_trained_are():
    found = any_module.measure(lambda: (Several(), (torch.randn(8, 100),)))
    assert found.flops == 2 * 2 * 8 * 100 * (100 + 200), "forward, and for both weights backward"
    assert (found.parameters, found.largest, found.kept) == (30_000, 20_000, 4 * 8 * 100), "one input is kept, once"


class Nested(torch.nn.Module):
    """A row of layers in a child, a head that is larger than any of them, and a buffer that a product needs."""

    def __init__(self):
        super().__init__()
        self.body = torch.nn.Module()
        self.body.layers = torch.nn.ModuleList(torch.nn.Linear(10, 10, bias=False) for _ in range(3))
        self.head = torch.nn.Linear(10, 25, bias=False)
        self.register_buffer("scale", torch.ones(10))

    def forward(self, x):
        for layer in self.body.layers:
            x = layer(x) * self.scale
        return self.head(x)


def test_units_are_layers_of_rows_wherever_they_are_and_children_beside_them():
    found = any_module.measure(lambda: (Nested(), (torch.randn(2, 10, requires_grad=True),)))
    assert (found.parameters, found.largest) == (3 * 100 + 250, 250), "the head; layers of the body are units"
    assert found.kept == 4 * 4 * 2 * 10, "each product's input; the buffer is the module's own"
    layers, pair = ((torch.nn.Linear(10, 10) for _ in range(n)) for n in (3, 2))
    row = torch.nn.Sequential(torch.nn.Sequential(*layers), torch.nn.ModuleDict({"mlp": torch.nn.Sequential(*pair)}))
    sizes = [sum(p.numel() for p in unit.parameters()) for unit in any_module.units_of(row)]
    assert sizes == [110, 110, 110, 220], "a layer of a row is one unit, with the rows that it has"


def test_attentions_backward_pass_has_five_products_for_two():
    def made():
        layer = Block(64, 4)
        layer.mlp = torch.nn.Identity()
        return layer, (torch.randn(1, 128, 64, requires_grad=True),)

    products = 3 * 2 * 128 * 4 * 64**2  # those of queries, keys, values and the output, forward and backward
    assert any_module.measure(made).flops - products == (2 + 5) * 2 * 128 * 128 * 64, "FLOPs of attention"


class Named(torch.nn.Module):
    """Results by name, as models of Transformers give them, and a loss where it is asked for."""

    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(10, 10, bias=False)

    def forward(self, x, with_loss):
        y = self.layer(x)
        return {"logits": y, "loss": (self.layer(y).sum() if with_loss else None)}


def test_results_by_name_layers_that_are_copied_and_frozen_parts():
    products = 2 * 4 * 10 * 10
    for with_loss, flops in ((False, 2 * products), (True, 2 * products + 3 * products)):
        found = any_module.measure(lambda with_loss=with_loss: (Named(), (torch.randn(4, 10), with_loss)))
        assert found.flops == flops, "of what the loss depends on"

    def encoder():
        layer = torch.nn.TransformerEncoderLayer(16, 2, dim_feedforward=32, batch_first=True)
        module = torch.nn.TransformerEncoder(layer, 3)
        module.layers[:2].requires_grad_(False)
        torch.nn.init.trunc_normal_(module.layers[2].linear1.weight)  # looks at values, as a ViT's weights are drawn
        module.layers[2].linear2.to(torch.float64).to(torch.float32)  # as peft does with adapters
        return module, (torch.randn(2, 8, 16),)

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = any_module.measure(encoder)
    layer = sum(p.numel() for p in encoder()[0].layers[2].parameters())
    assert (found.parameters, found.frozen, found.largest, found.largest_trained) == (
        3 * layer,
        2 * layer,
        layer,
        layer,
    )
    four = any_module.needed(found, 4, "bf16")
    assert four["ddp"]["optimizer"] == any_module.formula("ddp", layer, 4, "bf16")["optimizer"]
    assert [four[stage]["frozen parameters"] for stage in ("ddp", "fsdp")] == [2 * 2 * layer, 2 * 2 * layer / 4]


def test_what_a_stage_needs_by_parts():
    """A unit of 1,000 in mixed precision: gathered in 2 bytes, its messages of gradients have 4."""
    found = any_module.Measured(parameters=10_000, largest=1_000, kept=500, flops=0)
    eight = any_module.needed(found, 8, "bf16-mixed")
    assert eight["zero2"]["buckets of gradients"] == 2 * 4 * 1_000, "bytes of two buckets"
    assert eight["fsdp"]["gathered"] == 2 * 2 * 1_000 and eight["fsdp"]["unsharded gradients"] == (2 + 4) * 1_000
    assert [eight[stage]["parameters"] for stage in ("ddp", "zero1", "fsdp")] == [20_000, 20_000, 40_000 / 8], "bytes"
    alone = any_module.needed(found, 1, "bf16-mixed")
    assert {*alone["fsdp"]} == {"parameters", "gradients", "optimizer", "activations"}, "one GPU gathers nothing"


def test_a_report_is_of_its_precision_and_in_its_units():
    gpu, constants = find_gpu("h100-80gb"), replace(PRIOR, matmul=0.5, allocator=1.1)
    full, half = (any_module.report(linear, gpu, 1, name, constants) for name in ("float32", "bf16-mixed"))
    assert (full["kept"], half["kept"]) == (4 * 8 * 1000, 2 * 8 * 1000), "bytes of the input"
    flops = 2 * 2 * 8 * 1_000_000  # forward, and for the weight backward
    assert half["seconds_of_products"] == pytest.approx(flops / (989e12 * gpu.achievable * 0.5)), "seconds in 16 bit"
    assert full["seconds_of_products"] == pytest.approx(2 * half["seconds_of_products"]), "TF32 has half of the rate"
    ddp = full["stages"]["ddp"]
    assert ddp["bytes"] == pytest.approx(1.1 * sum(ddp["parts"].values())), "with what the allocator adds"
    said = {"parameters": 5, "frozen": 0, "kept": 3 * 2**30, "flops": 2e12, "seconds_of_products": 0.25,
            "stages": {"ddp": {"fits": "no", "bytes": 2**31, "parts": {"gradients": 2**30, "none": 0}}}}  # fmt: skip
    said = " ".join(any_module.table(said).split())
    numbers = {float(number) for number in re.findall(r"\d+\.\d+", said)}
    assert {3.0, 2.0, 250.0, 1.0} <= numbers, f"GiB kept, TFLOP, ms, and GiB of gradients: {said}"


def test_a_stage_fits_if_it_does_with_all_that_the_allocator_may_add():
    """16 bytes for each of a million parameters, and 32,000 of the layer's input: 15% more at most, and 0% at least."""
    needed = 16 * 1_000_000 + 4 * 8 * 1000
    for room, says in ((1.16, "yes"), (1.14, "tight"), (1.01, "tight"), (0.99, "no")):
        gpu = replace(find_gpu("h100-80gb"), memory=room * needed)
        said = any_module.report(linear, gpu, 1, "float32", PRIOR)
        assert said["stages"]["ddp"]["fits"] == says, f"{room} times what is needed"
