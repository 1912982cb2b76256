"""A small anchor-free detector (after FCOS, Tian et al., 2019): each image has a list of boxes of its own length."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers import assert_trees_close
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import purestep as ps
from purestep import metrics, optim

SIZE, STRIDE, IMAGES, EPOCHS = 32, 4, 24, 2
Target = dict[str, Tensor]  # boxes: [n, 4], corners; labels: [n]


class Shapes(Dataset[tuple[Tensor, Target]]):
    """Images with none to three bright rectangles of two kinds."""

    def __len__(self) -> int:
        return IMAGES

    def __getitem__(self, index: int) -> tuple[Tensor, Target]:
        drawn = torch.Generator().manual_seed(index)
        image, boxes, labels = 0.1 * torch.randn(1, SIZE, SIZE, generator=drawn), [], []
        for _ in range(index % 4):
            left, top = (int(torch.randint(0, SIZE - 12, (), generator=drawn)) for _ in range(2))
            label = int(torch.randint(0, 2, (), generator=drawn))
            width, height = (12, 6) if label else (6, 12)
            image[0, top : top + height, left : left + width] += 1.0 + label
            boxes.append([left, top, left + width, top + height])
            labels.append(label)
        return image, {"boxes": torch.tensor(boxes).float().reshape(-1, 4), "labels": torch.tensor(labels).long()}


def collate(rows: list[tuple[Tensor, Target]]) -> tuple[Tensor, list[Target]]:
    images, targets = zip(*rows, strict=True)
    return torch.stack(images), list(targets)


def loader() -> DataLoader[Any]:
    return DataLoader(Shapes(), batch_size=8, collate_fn=collate)


class Detector(nn.Module):
    """[batch, 1, size, size] -> class logits [batch, places, 2] and distances to the four sides [batch, places, 4]."""

    def __init__(self) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for inputs, outputs, stride in ((1, 8, 2), (8, 16, 2), (16, 16, 1)):
            layers += [nn.Conv2d(inputs, outputs, 3, stride, 1), nn.BatchNorm2d(outputs), nn.ReLU()]
        self.body, self.head = nn.Sequential(*layers), nn.Conv2d(16, 6, 1)

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        found = self.head(self.body(images)).flatten(2).transpose(1, 2)
        return found[..., :2], found[..., 2:].exp() * STRIDE


def network() -> nn.Module:
    torch.manual_seed(0)
    return Detector()


def places() -> Tensor:
    """The middle of each cell of the grid, [places, 2]: x, y."""
    at = torch.arange(STRIDE // 2, SIZE, STRIDE).float()
    y, x = torch.meshgrid(at, at, indexing="ij")
    return torch.stack([x.flatten(), y.flatten()], dim=1)


def assigned(target: Target) -> tuple[Tensor, Tensor]:
    """For each place the class of the smallest box around it, or -1, and its distances to the sides of that box."""
    at, boxes = places(), target["boxes"]
    if not len(boxes):
        return torch.full((len(at),), -1), torch.zeros(len(at), 4)
    sides = torch.cat([at[:, None] - boxes[None, :, :2], boxes[None, :, 2:] - at[:, None]], dim=2)
    area = ((boxes[:, 2] - boxes[:, 0]) * (boxes[:, 3] - boxes[:, 1])).expand(len(at), -1)
    area = area.masked_fill(sides.amin(dim=2) <= 0, torch.inf)
    smallest, index = area.min(dim=1)
    labels = torch.where(smallest < torch.inf, target["labels"][index], -1)
    return labels, sides[torch.arange(len(at)), index]


def detection_loss(logits: Tensor, distances: Tensor, targets: list[Target]) -> tuple[Tensor, Tensor, int]:
    """The loss over all places of a batch that lie in a box, and their number."""
    labels, sides = (torch.stack(each) for each in zip(*map(assigned, targets), strict=True))
    inside = labels >= 0
    wanted = nn.functional.one_hot(labels.clamp(min=0), 2) * inside[..., None]
    classes = nn.functional.binary_cross_entropy_with_logits(logits, wanted.float(), reduction="sum")
    overlap = torch.minimum(distances[inside], sides[inside])
    area = [d[:, :2].add(d[:, 2:]).prod(dim=1) for d in (distances[inside], sides[inside], overlap)]
    boxes = (1 - area[2] / (area[0] + area[1] - area[2])).sum()
    count = max(int(inside.sum()), 1)
    return (classes + boxes) / count, boxes / count, count


def objective(model: ps.Model, batch: tuple[Tensor, list[Target]]) -> ps.Loss:
    images, targets = batch
    loss, boxes, count = detection_loss(*model(images), targets)
    return ps.Loss(loss, count, {"box_loss": metrics.as_mean(boxes, count)})


def loop() -> nn.Module:
    module = network()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.02, momentum=0.9)
    for _ in range(EPOCHS):
        for images, targets in loader():
            optimizer.zero_grad()
            detection_loss(*module(images), targets)[0].backward()
            optimizer.step()
    return module


def program(**settings: Any) -> ps.Program:
    return ps.program(network(), objective, optim.sgd(0.02, momentum=0.9), **settings)


def test_it_is_the_plain_loop() -> None:
    made, module = program(), loop()
    result = ps.fit(made.init(), {"train": loader(), "val": loader()}, made, epochs=EPOCHS, progress=False,
                    device="cpu")  # fmt: skip
    expected = {name: p.detach() for name, p in module.named_parameters()}
    assert_trees_close(result.state.params, expected, rtol=1e-4, atol=1e-6)
    assert_trees_close(result.state.buffers, dict(module.named_buffers()), rtol=1e-4, atol=1e-6)
    assert result.history["val_box_loss"][-1] < result.history["val_box_loss"][0]


def test_micro_batches_cut_the_list_of_boxes_with_the_images() -> None:
    (images, targets), made = next(iter(loader())), program(microbatches=2, keep_eval=("body.*",))
    state, found = made.train_step(made.init(), (images, targets))
    whole = program(keep_eval=("body.*",))
    expected, wanted = whole.train_step(whole.init(), (images, targets))
    assert_trees_close(state.params, expected.params, rtol=1e-4, atol=1e-6)
    assert float(found["loss"]) == pytest.approx(float(wanted["loss"]), rel=1e-5)


def test_a_graph_of_it_is_refused_with_the_line_that_reads_a_value() -> None:
    made = program()
    with pytest.raises(ps.errors.StepContractError, match=r"test_detection\.py"):
        ps.compile_step(made.train_step, backend="aot_eager")(made.init(), next(iter(loader())))
