"""A vision transformer with LoRA adapters, and pictures of your own, for the course's script (docs/your-task.md).

The base is made from a configuration with random weights, so nothing is downloaded; with a base of your own,
`ViTForImageClassification.from_pretrained(FOLDER)` takes its place.

    pip install -r requirements-engines.txt
    torchrun --nproc_per_node=2 distributed_training.py --distributed --task docs/your_vit.py --validate-every 20
    python -m common.runs export RUN --safetensors --out weights.safetensors
    python docs/your_vit.py save weights.safetensors my-adapters
    python -m planner measure docs/your_vit.py:micro_batch --gpu h100-80gb --gpus 8
"""

import sys

from common import installed

if __name__ == "__main__":
    installed.at_start(("transformers", "peft"), "requirements-engines.txt")

import common.vision  # noqa: F401  first: peft imports torchvision
from common import quiet_engines  # noqa: F401  engines say much that means nothing
from common.errors import UserError, one_line_errors
from common.own import load_weights

# isort: split
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset
from transformers import ViTConfig, ViTForImageClassification

CONFIG = ViTConfig(
    image_size=8,
    patch_size=2,
    num_channels=1,
    num_labels=10,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=4,
    num_attention_heads=4,
    hidden_dropout_prob=0.0,
    attention_probs_dropout_prob=0.0,
)
# The head is new to the base, so it is trained whole, and is saved with the adapters.
LORA = LoraConfig(r=8, lora_alpha=16, target_modules=["q_proj", "v_proj"], modules_to_save=["classifier"])


class Classifier(nn.Module):
    """Pictures [batch, channels, height, width] -> logits [batch, classes]."""

    def __init__(self, vit):
        super().__init__()
        self.vit = vit

    def forward(self, pixels):
        return self.vit(pixel_values=pixels).logits


def base():
    torch.manual_seed(0)
    return ViTForImageClassification(CONFIG)


def model():
    """The base, frozen, with adapters that are trained."""
    return Classifier(get_peft_model(base(), LORA))


def data():
    """Handwritten digits: all but the last 200, and these."""
    digits = load_digits()
    pixels = torch.from_numpy(digits.images / 16.0).float().unsqueeze(1)
    labels = torch.from_numpy(digits.target).long()
    return TensorDataset(pixels[:-200], labels[:-200]), TensorDataset(pixels[-200:], labels[-200:])


def micro_batch():
    """For the planner: the model, and what it is called with."""
    return model(), (torch.zeros(32, 1, 8, 8),)


def save(weights, folder):
    """The adapters, as peft keeps them; and the loss of the base with them after they are loaded again."""
    trained = model()
    load_weights(trained, weights)
    trained.vit.save_pretrained(folder)
    again = Classifier(PeftModel.from_pretrained(base(), folder)).eval()
    pixels, labels = data()[1].tensors
    with torch.no_grad():
        logits = again(pixels)
    loss, right = cross_entropy(logits, labels), (logits.argmax(1) == labels).float().mean()
    print(f"{folder}: loss {loss:.4f} on {len(labels)} pictures that were not trained on, {right:.0%} of them right")


if __name__ == "__main__":
    with one_line_errors():
        match sys.argv[1:]:
            case ["save", weights, folder]:
                save(weights, folder)
            case _:
                raise UserError("say save WEIGHTS FOLDER; training is distributed_training.py --task docs/your_vit.py")
