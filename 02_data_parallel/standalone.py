"""DataParallel: one process divides every batch among the GPUs of one machine, one thread for each GPU.

The model lives on the first GPU, is copied to the others in every step, and collects their gradients.

    python standalone.py
    python standalone.py 8     # until epoch 8; goes on from the checkpoint
"""

import os
import sys

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

EPOCHS = 4 if len(sys.argv) < 2 else int(sys.argv[1]) if sys.argv[1].isdigit() else sys.exit("say how many epochs")
BATCH_SIZE = 96  # of all GPUs together
CHECKPOINT = "checkpoint-data-parallel.pt"


def train(device):
    digits = load_digits()  # 1,797 images of 8 x 8 pixels that come with scikit-learn
    images, labels = torch.tensor(digits.data / 16, dtype=torch.float32), torch.tensor(digits.target)
    order = torch.Generator()
    data = TensorDataset(images[:1500], labels[:1500])
    loader = DataLoader(data, BATCH_SIZE, shuffle=True, generator=order, drop_last=True)
    test_images, test_labels = images[1500:].to(device), labels[1500:].to(device)

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10)).to(device)
    replicas = nn.DataParallel(model)  # uses all GPUs that it sees; the model has to be on the first of them
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    done = 0
    if os.path.exists(CHECKPOINT):
        state = torch.load(CHECKPOINT, map_location=device)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        done = state["epochs"]
        print(f"{CHECKPOINT}: {done} epochs are done, of {EPOCHS}; delete it to begin anew")

    for epoch in range(done, EPOCHS):
        # Each epoch has an order of its own, the same after a restart. torch.manual_seed would reset dropout as well.
        order.manual_seed(epoch)
        total = 0.0
        for batch, targets in loader:
            outputs = replicas(batch)  # scatters the batch from the CPU, and gathers the outputs on the first GPU
            loss = nn.functional.cross_entropy(outputs, targets.to(device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += loss.detach()
        with torch.no_grad():
            correct = (model(test_images).argmax(1) == test_labels).sum().item()
        print(f"epoch {epoch + 1}: loss {total / len(loader):.4f}, {correct} of {len(test_labels)} test images right")
        # Save the model inside: the wrapper's names begin with "module.", and fit nothing but another wrapper.
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epochs": epoch + 1}
        torch.save(state, CHECKPOINT + ".part")
        os.replace(CHECKPOINT + ".part", CHECKPOINT)  # a crash while saving leaves the old checkpoint


if __name__ == "__main__":
    if int(os.environ.get("RANK", 0)) > 0:
        print("DataParallel is a single process: the other ones of torchrun have nothing to do")
        sys.exit()
    gpus = torch.cuda.device_count()
    if gpus < 2:
        print(f"{gpus} GPU(s) here, and DataParallel needs two to divide a batch: one device trains on all of it")
    train(torch.device("cuda:0" if gpus else "cpu"))
