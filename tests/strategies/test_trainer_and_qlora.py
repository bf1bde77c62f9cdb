"""The scripts of chapter 06 with the Trainer and with QLoRA, with stand-ins for the libraries: what each is asked for,
a run's numbers and checkpoint, bytes by part. tests/strategies/test_engines.py has the libraries themselves."""

import sys
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from engine_stand_ins import Accelerator, TrainingArguments, on_rank_1_of_4, scripts, stand_in
from helpers import SMALL, configure, do_not_draw, launcher, metrics, saved
from torch import nn

from common import run_dir
from common.data import Text, global_batch
from common.errors import UserError

ROUNDED = {"rel": 1e-5}


@pytest.fixture
def trainer(monkeypatch):
    for path in scripts(monkeypatch):
        yield path("fsdp.with_trainer")


def test_the_trainer_ends_when_the_run_does(trainer):
    """After its last step, and after Ctrl-C, which ends the run's steps early."""
    logged, strategy = [], SimpleNamespace()
    run = SimpleNamespace(steps=lambda: iter([0, 1]), log=lambda *given: logged.append(given))
    follow, control = trainer.Follow(run, strategy), SimpleNamespace(should_training_stop=False)
    follow.on_train_begin(None, None, control, optimizer="the optimizer")
    assert strategy.optimizer == "the optimizer", "the one whose state goes into checkpoints"
    ended = []
    for step in (1, 2):
        logs = {"loss": f"{step}.5", "grad_norm": step * 2.0, "learning_rate": 0.1}
        follow.on_log(None, SimpleNamespace(global_step=step), control, logs=logs)
        ended.append(control.should_training_stop)
    follow.on_log(None, SimpleNamespace(global_step=2), control, logs={"train_runtime": 3.0})
    found = [(step, loss.item(), norm.item()) for step, loss, norm in logged]
    assert found == [(0, 1.5, 2.0), (1, 2.5, 4.0)], "steps from 0, loss, norm: and no line of the end"
    assert ended == [False, True], "whether the Trainer stops after each step"
    control.should_training_stop = True  # as somebody else has asked
    again = trainer.Follow(run, strategy)
    again.on_train_begin(None, None, control)
    again.on_log(None, SimpleNamespace(global_step=1), control, logs={"loss": 1, "grad_norm": 1})
    assert control.should_training_stop is True, "what others have asked for stays"


ASKED = {
    "max_steps": 5, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 3, "max_grad_norm": 0.25,
    "bf16": False, "fp16": False, "fsdp": True, "use_cpu": True, "dataloader_pin_memory": False,
    "fsdp_config": {"version": 2, "reshard_after_forward": True, "transformer_layer_cls_to_wrap": ["Block"]},
    "train_sampling_strategy": "sequential", "remove_unused_columns": False, "save_strategy": "no",
    "logging_steps": 1, "report_to": [], "disable_tqdm": True,
}  # fmt: skip


def test_what_the_trainer_is_asked_for(monkeypatch, tmp_path):
    """On rank 1 of 4, on CPUs and on GPUs: the process group, the mesh and the run are stood for too."""
    on_rank_1_of_4(monkeypatch)
    weights, groups, meshes = [], [], []
    for path in scripts(monkeypatch):
        module = path("fsdp.with_trainer")
        monkeypatch.setattr(module, "materialise", lambda *given: weights.append(given))
        for kind, precision in (("cpu", "fp32"), ("cuda", "bf16"), ("cuda", "fp16")):

            @contextmanager
            def process_group(*given, kind=kind):
                groups.append(given)
                yield SimpleNamespace(rank=1, size=4, device=torch.device(kind))

            @contextmanager
            def run(*given):
                yield SimpleNamespace(steps=lambda: iter(()), given=given)

            made = []
            monkeypatch.setattr(module, "process_group", process_group)
            monkeypatch.setattr(module, "make_mesh", lambda *given: meshes.append(given) or "mesh")
            monkeypatch.setattr(module, "Run", run)
            monkeypatch.setattr(module.CourseTrainer, "train", lambda self, made=made: made.append(self))
            settings = SMALL | {"batch_size": 24, "steps": 5, "accumulation_steps": 3, "max_norm": 0.25}
            config = configure(strategy="fsdp", run_dir=tmp_path, timeout=77, check_collectives=True, **settings)
            config.precision, config.axes = precision, {"shard": 4}
            module.main(config)
            gpu = kind == "cuda"
            expected = ASKED | {precision: True} if gpu else ASKED
            expected = expected | {"output_dir": str(tmp_path), "use_cpu": not gpu, "dataloader_pin_memory": gpu}
            assert TrainingArguments.settings == expected, f"the Trainer's arguments on {kind}, in {precision}"
            (one,) = made
            order = torch.cat([global_batch(config.seed, step, 24, one.train_dataset.dataset.dataset.size)
                               for step in range(5)]).tolist()  # fmt: skip
            assert one.train_dataset.indices == order, "examples in the order of the course's batches"
            assert [type(seen).__name__ for seen in one.callbacks] == ["Follow"], "who is called back"
            state = one.accelerator.state
            assert state.distributed_type == "FSDP" and one.is_fsdp_enabled is True, "on CPUs it is told of FSDP"
            assert state.fsdp_plugin.settings == {"made of": ASKED["fsdp_config"]}
            assert groups[-1] == (config.device, config.backend, 77, True), "device, backend, timeout, check"
            assert meshes[-1] == ({"shard": 4}, kind), "the mesh: its axes, and the kind of device"
            assert weights[-1] == (one.model, torch.device("cpu"), "the group of four"), "rank 0's weights on each rank"
        config.batch_size = 22
        with pytest.raises(UserError, match="^--batch-size 22 does not divide by 4 data-parallel rank"):
            module.main(config)
        cls = module.FSDPWithTrainer
        assert (cls.preset, cls.from_meta) == ({"shard": -1}, True)
        cls.require(SimpleNamespace(resume=None), {"shard": 4})
        with pytest.raises(UserError) as error:
            cls.require(SimpleNamespace(resume="newest"), {"shard": 4})
        line = "--resume: a run is not resumed with the Trainer; --implementation pytorch takes it up"
        assert str(error.value) == line


def test_a_run_with_the_trainer_has_the_numbers_and_the_checkpoint_of_pytorch(trainer, tmp_path, monkeypatch):
    monkeypatch.setattr(run_dir, "loss_curve", run_dir.loss_curve)  # and after the test as before
    do_not_draw()
    more = SMALL | {"steps": 3, "warmup_steps": 2, "checkpoint_every": 2, "accumulation_steps": 3, "max_norm": 0.5}
    found = []
    for kind, main in (("by-hand", None), ("pytorch", trainer.main)):
        config = configure(run_dir=tmp_path / kind, strategy="fsdp", implementation=kind, **more)
        with launcher():
            (main or config.main)(config)
        lines = metrics(tmp_path / kind)
        found.append([value for line in lines for value in (line["loss"], line["grad_norm"], line["learning_rate"])])
    assert found[1] == pytest.approx(found[0], **ROUNDED), "loss, norm and learning rate of three steps"
    assert TrainingArguments.settings["output_dir"] == str(tmp_path / "pytorch")
    for number in (2, 3):
        ours, theirs = (saved(tmp_path / kind / f"checkpoint-{number:06}") for kind in ("by-hand", "pytorch"))
        assert ours.keys() == theirs.keys(), f"names in the checkpoint after step {number}"
        for name, value in ours.items():
            torch.testing.assert_close(theirs[name], value, rtol=1e-4, atol=1e-5, msg=f"step {number}: {name}")


# --- QLoRA ----------------------------------------------------------------------------------------------------


class Linear4bit(nn.Linear):
    """Four bits are packed when the layer moves, by the settings of its weight."""

    quant_state = None

    def __init__(self, inputs, outputs, bias, device, **how):
        super().__init__(inputs, outputs, bias, device)
        self.how = how

    def to(self, device):
        weight, self.moved = self.weight, device
        self.kept = weight.detach().float()
        blocks = weight.numel() // 64
        packed = torch.zeros(weight.numel() // 4, 1, dtype=weight.how["quant_storage"])
        self.weight = nn.Parameter(packed, requires_grad=False)
        self.weight.how = weight.how
        second = SimpleNamespace(absmax=torch.zeros(-(-blocks // 256)))
        nested = weight.how["compress_statistics"]
        absmax = torch.zeros(blocks, dtype=torch.uint8 if nested else torch.float32)
        self.quant_state = SimpleNamespace(absmax=absmax, nested=nested, offset=torch.zeros(()), state2=second)
        return self

    def forward(self, x):
        return F.linear(x.float(), self.kept)


def params4bit(data, requires_grad, module, **how):
    parameter = nn.Parameter(data, requires_grad=requires_grad)
    parameter.how, module.whose = how, module
    return parameter


class Llama(nn.Module):
    """Two blocks with two linear layers each, of which one is nested; embedding, norms, head."""

    def __init__(self, config):
        super().__init__()
        width, hidden = config.hidden_size, config.intermediate_size
        self.model = nn.Module()
        self.model.embed_tokens = nn.Embedding(config.vocab_size, width)
        self.model.layers = nn.ModuleList(nn.Module() for _ in range(config.num_hidden_layers))
        for block in self.model.layers:
            block.norm, block.mlp = nn.LayerNorm(width), nn.Module()
            block.mlp.up_proj = nn.Linear(width, hidden, bias=False)
            block.o_proj = nn.Linear(hidden, width, bias=False)
        self.lm_head = nn.Linear(width, config.vocab_size, bias=False)

    def forward(self, input_ids):
        x = self.model.embed_tokens(input_ids)
        for block in self.model.layers:
            x = x + self.adapted(block.o_proj, self.adapted(block.mlp.up_proj, block.norm(x)).relu()).to(x.dtype)
        return SimpleNamespace(logits=self.lm_head(x))

    @staticmethod
    def adapted(layer, x):
        return layer(x) + x.float() @ layer.lora["A"] @ layer.lora["B"]


def get_peft_model(model, lora):
    assert model.is_loaded_in_4bit, "peft has to know that the layers are in 4 bits"
    model.requires_grad_(False)
    get_peft_model.asked = lora
    for name, layer in model.named_modules():
        if name.split(".")[-1] in lora["target_modules"]:
            first, second = torch.randn(layer.in_features, lora["r"]) / 8, torch.zeros(lora["r"], layer.out_features)
            layer.lora = nn.ParameterDict({"A": first, "B": second})
    return model


SETTINGS = {
    "model": {"vocab_size": 256, "hidden_size": 64, "intermediate_size": 512, "num_hidden_layers": 2},
    "quantization": {"quant_type": "nf4", "compress_statistics": True, "quant_storage": "bfloat16",
                     "compute_dtype": "float32"},
    "lora": {"r": 4, "lora_alpha": 8, "target_modules": ["up_proj", "o_proj"]},
    "fsdp": {"fsdp_version": 2, "reshard_after_forward": True},
    "training": {"lr": 0.01, "batch_size": 4, "context": 8, "steps": 3, "seed": 5},
}  # fmt: skip


@pytest.fixture
def qlora(monkeypatch):
    stand_in(monkeypatch, "bitsandbytes")
    stand_in(monkeypatch, "bitsandbytes.nn", Linear4bit=Linear4bit, Params4bit=params4bit)
    stand_in(monkeypatch, "peft", LoraConfig=lambda **given: given, get_peft_model=get_peft_model)
    for path in scripts(monkeypatch):
        sys.modules["transformers"].LlamaConfig = SimpleNamespace
        sys.modules["transformers"].LlamaForCausalLM = Llama
        yield path("fsdp.with_qlora")


def test_layers_of_the_blocks_are_in_4_bits_and_all_else_is_in_bfloat16(qlora):
    model = qlora.make_model(SETTINGS)
    kinds = {name: type(layer).__name__ for name, layer in model.named_modules() if isinstance(layer, nn.Linear)}
    of_blocks = [f"model.layers.{block}.{name}" for block in (0, 1) for name in ("mlp.up_proj", "o_proj")]
    assert kinds == dict.fromkeys(of_blocks, "Linear4bit") | {"lm_head": "Linear"}, "linear layers"
    how = {"compress_statistics": True, "quant_type": "nf4", "quant_storage": torch.bfloat16}
    layer = model.get_submodule("model.layers.1.mlp.up_proj")
    assert layer.how == how | {"compute_dtype": torch.float32}, "what Linear4bit is told"
    assert layer.weight.how == how and layer.whose is layer, "what its weight is told"
    assert layer.moved == torch.device("cpu") and layer.bias is None, "moved, which packs the bits"
    assert (layer.in_features, layer.out_features) == (64, 512)
    torch.manual_seed(5)
    with torch.no_grad():
        expected = Llama(SimpleNamespace(**SETTINGS["model"])).to(torch.bfloat16)
    assert torch.equal(layer.kept, expected.model.layers[1].mlp.up_proj.weight.float()), "the seed's weights"
    assert get_peft_model.asked == SETTINGS["lora"] | {"task_type": "CAUSAL_LM"}, "what LoRA is told"
    assert model.lm_head.weight.dtype == model.model.embed_tokens.weight.dtype == torch.bfloat16
    empty = qlora.make_model(SETTINGS, "meta").get_submodule("model.layers.0.o_proj")
    assert empty.weight.is_meta and empty.quant_state is None, "on the meta device nothing is packed"


# Four layers of 64 x 512; a scale for 64 of them; embedding and head of 256 x 64, two norms of 2 x 64; adapters of
# 4 x (64 + 512) for each layer.
BYTES = {
    "embedding, norms, head in bfloat16": 2 * (2 * 16384 + 256),
    "base, 4 bits": 4 * 16384,
    "scales of the 4-bit blocks": 4 * (512 + 2 * 4 + 4),
    "adapters": 4 * 9216,
    "their gradients": 4 * 9216,
    "their AdamW state": 8 * 9216,
}


def test_bytes_by_part(qlora):
    assert qlora.bytes_by_part(qlora.make_model(SETTINGS)) == BYTES, "counted: two bytes hold four weights"
    assert qlora.bytes_by_part(qlora.make_model(SETTINGS, "meta")) == BYTES, "from shapes alone"
    eighth = {part: size if part.startswith("scales") else size // 8 for part, size in BYTES.items()}
    found = qlora.bytes_by_part(qlora.make_model(SETTINGS, "meta"), ranks=8)
    assert found == eighth, "eight ranks share all but the scales"
    plain = SETTINGS | {"quantization": SETTINGS["quantization"] | {"compress_statistics": False}}
    for device in ("cpu", "meta"):
        found = qlora.bytes_by_part(qlora.make_model(plain, device), compress=False)
        assert found == BYTES | {"scales of the 4-bit blocks": 4 * 512 * 4}, f"scales in float32, on {device}"
    odd = Linear4bit(65, 1, False, "meta")
    assert [qlora.scales(odd, compress) for compress in (True, False)] == [2 + 4 + 4, 8], "of 65 weights: two scales"


def test_what_qlora_trains(qlora, monkeypatch, capsys):
    """The second of two ranks, whose half of each batch a plain loop trains on."""
    monkeypatch.setattr(Accelerator, "num_processes", 2)
    monkeypatch.setattr(Accelerator, "process_index", 1)
    asked = []
    monkeypatch.setattr(Accelerator, "reduce", lambda self, loss, reduction: asked.append(reduction) or loss)
    monkeypatch.setattr(Accelerator, "print", lambda self, text: print(text), raising=False)
    losses, found, model = qlora.train(SETTINGS, torch.device("cpu"))
    plugin = Accelerator.settings["fsdp_plugin"]
    assert Accelerator.settings == {"cpu": True, "fsdp_plugin": plugin} and plugin.settings == SETTINGS["fsdp"]
    assert Accelerator.last.state.fsdp_plugin is plugin, "on CPUs Accelerate has to be told of FSDP"
    plain = qlora.make_model(SETTINGS)
    optimizer = torch.optim.AdamW([p for p in plain.parameters() if p.requires_grad], lr=0.01)
    data, expected = Text(8), []
    for step in range(3):
        inputs, targets = data.batch(global_batch(5, step, 4, data.size)[2:])
        loss = F.cross_entropy(plain(inputs).logits.float().transpose(1, 2), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        expected.append(loss.item())
    assert losses == pytest.approx(expected, **ROUNDED), "losses of three steps"
    for (name, one), other in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert torch.allclose(one, other, atol=1e-6), f"{name} after three steps"
    assert found == BYTES and asked == ["mean"] * 3, "bytes by part; each step's loss is the mean over ranks"
    shown = [f"step {step}/3  loss {loss:.4f}" for step, loss in enumerate(expected, start=1)]
    assert capsys.readouterr().out.splitlines() == shown


TABLE = """\
bytes on rank 0 of {ranks}, between steps:
  base, 4 bits                                   1,234,567
  adapters                                              89
"""


def test_what_qlora_prints(qlora, monkeypatch, tmp_path, capsys):
    file, asked = tmp_path / "settings.yaml", []
    file.write_text("model: {}\nquantization: {compress_statistics: false}\nlora: {}\nfsdp: {}\ntraining: {}\n")
    parts = {"base, 4 bits": 1234567, "adapters": 89}
    monkeypatch.setattr(qlora, "make_model", lambda settings, device: asked.append(device) or "model")
    monkeypatch.setattr(qlora, "bytes_by_part", lambda *given: asked.append(given) or parts)
    monkeypatch.setattr(sys, "argv", ["with_qlora.py", "--config", str(file), "--check", "4"])
    qlora.main()
    assert asked == ["meta", ("model", False, 4)], "--check makes the model without memory, and divides by 4 ranks"
    assert capsys.readouterr().out == TABLE.format(ranks=4)
    monkeypatch.setattr(sys, "argv", sys.argv[:3])
    monkeypatch.setattr(qlora, "train", lambda settings, device: ([], parts, device))
    for rank, shown in ((0, TABLE.format(ranks=2)), (1, "")):

        @contextmanager
        def process_group(rank=rank):
            yield SimpleNamespace(rank=rank, device="cpu")

        monkeypatch.setattr(qlora, "process_group", process_group)
        with launcher(rank, 2):
            qlora.main()
        assert capsys.readouterr().out == shown, f"what rank {rank} prints after training"


def test_a_wrong_file_of_qlora_gets_one_line(qlora, tmp_path):
    (tmp_path / "half.yaml").write_text("model: {}\n")
    (tmp_path / "no-yaml.yaml").write_text("model: [\n")
    (tmp_path / "empty.yaml").write_text("")
    for name, why in (
        ("no", ".*No such file or directory: .*"),
        ("no-yaml", "while parsing a flow node .*"),
        ("half", "there is no fsdp, lora, quantization, training; see configs/engines"),
        ("empty", "there is no fsdp, lora, model, quantization, training; see configs/engines"),
    ):
        path = tmp_path / f"{name}.yaml"
        with pytest.raises(UserError, match=f"^--config {path}: {why}$"):
            qlora.read(str(path))
