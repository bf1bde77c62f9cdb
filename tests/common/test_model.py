"""The models: what they compute, how they begin, and how many parameters they have, against numbers worked out here."""

import math

import pytest
import torch
from torch import nn

from common.model import GPT, Attention, Block, cross_entropy, make_resnet


def test_parameters_of_the_model_that_the_scripts_train():
    """4 blocks of width 128, 128 positions, 256 tokens. A block: norms 2 x 256, attention 4 x 128^2 + 128, MLP
    128 x 512 + 512 + 512 x 128 + 128."""
    block = 2 * 256 + 4 * 128**2 + 128 + 2 * 128 * 512 + 512 + 128
    model = GPT(layers=4, width=128, heads=4, context=128)
    numbers = 256 * 128 + 128 * 128 + 4 * block + 2 * 128
    assert sum(p.numel() for p in model.parameters()) == numbers == 840_960, "a tied weight counts once"
    untied = GPT(layers=4, width=128, heads=4, context=128, tied=False)
    assert sum(p.numel() for p in untied.parameters()) == 840_960 + 256 * 128
    assert model.head.out.weight is model.embedding.tokens.weight, "tied: one tensor"


def test_the_models_begin_as_gpt_2_does():
    torch.manual_seed(0)
    model = GPT(layers=8, width=256, heads=4, context=64, tied=False)
    for name, parameter in model.named_parameters():
        kind = ".".join(name.split(".")[-2:])
        if parameter.dim() == 1:
            assert set(parameter.tolist()) == ({1.0} if "norm" in kind and "weight" in kind else {0.0}), name
        else:
            std = 0.02 / math.sqrt(2 * 8) if name.endswith(("attention.out.weight", "mlp.down.weight")) else 0.02
            assert parameter.std().item() == pytest.approx(std, rel=0.05), f"standard deviation of {name}"
            assert abs(parameter.mean().item()) < 0.05 * std, name


def test_no_token_sees_a_later_one():
    torch.manual_seed(0)
    model, tokens = GPT(layers=2, width=16, heads=4, context=8), torch.arange(8)[None]
    other = tokens.clone()
    other[0, 5] = 200
    changed = (model(tokens) != model(other)).any(dim=-1)[0].tolist()
    assert changed == [False] * 5 + [True] * 3, "which places hear of a change at place 5"


def test_the_order_of_tokens_counts():
    torch.manual_seed(0)
    model = GPT(layers=1, width=16, heads=4, context=8)
    assert not torch.allclose(model(torch.tensor([[1, 1, 2]]))[0, 0], model(torch.tensor([[1, 1, 2]]))[0, 1])


def test_attention_is_that_of_each_head_alone():
    """Of one token after another, by the formula: softmax(q k / sqrt(d)) v over the tokens so far, for each head."""
    torch.manual_seed(0)
    layer, x = Attention(width=8, heads=2), torch.randn(1, 3, 8)
    q, k, v = (part(x)[0] for part in (layer.query, layer.key, layer.value))
    rows = []
    for time in range(3):
        heads = []
        for own in (slice(0, 4), slice(4, 8)):
            weights = torch.stack([q[time, own] @ k[past, own] / 4**0.5 for past in range(time + 1)]).softmax(0)
            heads.append(sum(weights[past] * v[past, own] for past in range(time + 1)))
        rows.append(torch.cat(heads))
    assert torch.allclose(layer(x)[0], layer.out(torch.stack(rows)), atol=1e-6), "attention differs from its formula"
    assert layer.query.bias is layer.key.bias is layer.value.bias is None, "a bias on the keys has no gradient"


def test_a_block_has_a_norm_before_each_half():
    torch.manual_seed(0)
    block, x = Block(width=8, heads=2), torch.randn(1, 3, 8)
    nn.init.normal_(block.norm1.weight), nn.init.normal_(block.norm2.weight)
    middle = x + block.attention(nn.functional.layer_norm(x, (8,), block.norm1.weight))
    up, down = block.mlp.up, block.mlp.down
    right = middle + down(nn.functional.gelu(up(nn.functional.layer_norm(middle, (8,), block.norm2.weight))))
    assert torch.allclose(block(x), right, atol=1e-6), "not x + attention(norm1(x)), then x + mlp(norm2(x))"
    assert (up.out_features, down.in_features) == (32, 32), "four times as wide"


def test_the_resnet_is_for_small_pictures_and_looks_at_one_example_at_a_time():
    torch.manual_seed(0)
    model, pictures = make_resnet(3, 10), torch.randn(4, 3, 8, 8)
    assert not [m for m in model.modules() if isinstance(m, nn.BatchNorm2d)], "BatchNorm mixes examples"
    assert {m.num_groups for m in model.modules() if isinstance(m, nn.GroupNorm)} == {8}
    assert (model.conv1.kernel_size, model.conv1.stride, model.conv1.in_channels) == ((3, 3), (1, 1), 3)
    assert model.layer1(model.maxpool(model.conv1(pictures))).shape == (4, 64, 8, 8), "nothing is lost before stage 2"
    torch.testing.assert_close(model(pictures)[1:2], model(pictures[1:2]), rtol=1e-3, atol=1e-4)
    assert model(pictures).shape == (4, 10)


def test_parameters_of_the_resnet():
    """A stem, four stages of one block of two convolutions, a shortcut where a stage has other channels, and a layer;
    no convolution has a bias, and each has a norm after it with two numbers for each channel."""

    def block(before, after):
        shortcut = before * after + 2 * after if before != after else 0
        return 9 * before * after + 9 * after * after + 2 * 2 * after + shortcut

    blocks = block(64, 64) + block(64, 128) + block(128, 256) + block(256, 512)
    expected = 9 * 3 * 64 + 2 * 64 + blocks + 512 * 10 + 10
    assert sum(p.numel() for p in make_resnet(3, 10).parameters()) == expected == 4_903_242, "parameters"


def test_the_loss_is_a_mean_over_all_predictions():
    logits, targets = torch.zeros(2, 3, 4), torch.zeros(2, 3, dtype=torch.long)
    assert cross_entropy(logits, targets).item() == pytest.approx(math.log(4)), "of 4 classes, by chance"
    logits[0, 0, 0] = 100.0  # one of six is certain
    assert cross_entropy(logits, targets).item() == pytest.approx(math.log(4) * 5 / 6)
