"""LeNet-5 as one writes it without this package: DataLoader, PIL transforms, Adam, a loop.

`python -m benchmarks.lenet` compares with it and runs it as `python -m benchmarks.lenet.plain TASK`, where TASK is JSON. The last
line that it prints is its result.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset
from torchvision import transforms

from benchmarks.task import answer
from gptscale.lenet.data.sources import LabelledImages, open_data


class Images(Dataset[tuple[Any, int]]):
    """Images that go from memory to PIL and then through the transform, as in torchvision's MNIST."""

    def __init__(self, part: LabelledImages, transform: Any) -> None:
        self.images, self.labels, self.transform = part.images, part.labels, transform

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Any, int]:
        image = Image.fromarray(self.images[index, 0].numpy(), mode="L")
        return self.transform(image), int(self.labels[index])


class LeNet(nn.Module):
    """The usual LeNet-5, with the activation before pooling."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(1, 6, 5, padding=2), nn.Conv2d(6, 16, 5)
        self.fc1, self.fc2, self.fc3 = nn.Linear(400, 120), nn.Linear(120, 84), nn.Linear(84, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(F.relu(self.conv1(x)), 2)
        x = F.max_pool2d(F.relu(self.conv2(x)), 2)
        x = F.relu(self.fc2(F.relu(self.fc1(x.flatten(1)))))
        return self.fc3(x)  # type: ignore[no-any-return]


def main(task: dict[str, Any]) -> dict[str, Any]:
    """Train for the task's epochs and return the seconds of each epoch and the test accuracy after the last."""
    torch.manual_seed(task["seed"])
    torch.set_num_threads(task["threads"])
    data = open_data(task["data"], root=Path(task["data_dir"]))
    plain = [transforms.ToTensor(), transforms.Normalize((0.5,), (0.5,))]
    augmented = transforms.Compose([transforms.RandomAffine(15, (0.1, 0.1), (0.8, 1.2)), *plain])
    workers = task["num_workers"]
    train = DataLoader(Images(data.train, augmented), batch_size=task["batch_size"], shuffle=True, num_workers=workers)
    test = DataLoader(Images(data.test, transforms.Compose(plain)), batch_size=1000, num_workers=workers)
    model, criterion = LeNet(), nn.CrossEntropyLoss()
    optimizer = torch.optim.Adam(model.parameters(), lr=task["lr"])
    times = []
    for _ in range(task["epochs"]):
        began = time.perf_counter()
        model.train()
        for images, labels in train:
            optimizer.zero_grad()
            loss = criterion(model(images), labels)
            loss.backward()
            optimizer.step()
        times.append(time.perf_counter() - began)
    model.eval()
    with torch.no_grad():
        correct = sum(int((model(images).argmax(1) == labels).sum()) for images, labels in test)
    return {"epoch_times_s": times, "accuracy": correct / len(data.test), "n_images": len(data.train)}


if __name__ == "__main__":
    answer(main)
