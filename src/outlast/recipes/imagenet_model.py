"""ResNet with 18 to 152 layers, for `outlast.recipes.imagenet` (He et al., "Deep residual learning for image recognition", 2015).

A bottleneck's 3x3 convolution has the stride, as is now common (ResNet "v1.5"). Weights have torchvision's names, so published
weights can be loaded.
"""

# mypy: allow-untyped-calls
from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

from outlast.recipes.shared import results

WIDTH = 64  # channels in the first stage; each later stage has twice as many
LAYERS = {  # blocks in each of the four stages; networks with 50 or more layers have bottlenecks
    "resnet18": (2, 2, 2, 2),
    "resnet34": (3, 4, 6, 3),
    "resnet50": (3, 4, 6, 3),
    "resnet101": (3, 4, 23, 3),
    "resnet152": (3, 8, 36, 3),
}


class BasicBlock(nn.Module):
    """Two 3x3 convolutions beside a shortcut: (b, i, h, w) -> (b, width, h / stride, w / stride)."""

    expansion = 1

    def __init__(self, i: int, width: int, stride: int = 1) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(i, width, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = shortcut(i, width, stride)

    def forward(self, x: Tensor) -> Tensor:
        y = self.relu(self.bn1(self.conv1(x)))
        y = self.bn2(self.conv2(y))
        return self.relu(y.add_(x if self.downsample is None else self.downsample(x)))  # type: ignore[no-any-return]


class Bottleneck(nn.Module):
    """1x1, 3x3 and 1x1 convolutions beside a shortcut: (b, i, h, w) -> (b, 4 width, h / stride, w / stride)."""

    expansion = 4

    def __init__(self, i: int, width: int, stride: int = 1) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(i, width, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, stride, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv3 = nn.Conv2d(width, 4 * width, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(4 * width)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = shortcut(i, 4 * width, stride)

    def forward(self, x: Tensor) -> Tensor:
        y = self.relu(self.bn1(self.conv1(x)))
        y = self.relu(self.bn2(self.conv2(y)))
        y = self.bn3(self.conv3(y))
        return self.relu(y.add_(x if self.downsample is None else self.downsample(x)))  # type: ignore[no-any-return]


def shortcut(i: int, o: int, stride: int) -> nn.Sequential | None:
    """Return the projection of a block's input to its output's shape, or None if the shapes are equal."""
    if stride == 1 and i == o:
        return None
    return nn.Sequential(nn.Conv2d(i, o, 1, stride, bias=False), nn.BatchNorm2d(o))


def stage(block: type[BasicBlock] | type[Bottleneck], i: int, width: int, count: int, stride: int) -> nn.Sequential:
    """Return a stage of `count` blocks, of which the first has the stride."""
    return nn.Sequential(block(i, width, stride), *(block(width * block.expansion, width) for _ in range(count - 1)))


class ResNet(nn.Module):
    """A network from images (b, 3, h, w) to logits (b, classes). With `zero_gamma`, each block initially equals its shortcut."""

    def __init__(self, arch: str, classes: int, *, zero_gamma: bool = False) -> None:
        super().__init__()
        self.arch, self.classes = arch, classes
        block = BasicBlock if arch in ("resnet18", "resnet34") else Bottleneck
        self.conv1 = nn.Conv2d(3, width := WIDTH, 7, 2, 3, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)
        self.maxpool = nn.MaxPool2d(3, 2, 1)
        first, second, third, fourth = LAYERS[arch]
        self.layer1 = stage(block, width, width, first, 1)
        self.layer2 = stage(block, width * block.expansion, 2 * width, second, 2)
        self.layer3 = stage(block, 2 * width * block.expansion, 4 * width, third, 2)
        self.layer4 = stage(block, 4 * width * block.expansion, 8 * width, fourth, 2)
        self.fc = nn.Linear(8 * width * block.expansion, classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
            if zero_gamma and isinstance(module, BasicBlock | Bottleneck):
                last = module.bn3 if isinstance(module, Bottleneck) else module.bn2
                nn.init.zeros_(last.weight)
        nn.init.normal_(self.fc.weight, std=0.01)  # as in Goyal et al.; torch's default is uniform
        nn.init.zeros_(self.fc.bias)

    def forward(self, x: Tensor) -> Tensor:
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))  # (b, 64, h/4, w/4)
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))  # (b, 512 | 2048, h/32, w/32)
        return self.fc(x.mean((2, 3)))  # type: ignore[no-any-return]


class Statistics:
    """Updates BatchNorm's running statistics once per step from the global batch, so that they are the same in any world.

    `nn.BatchNorm2d` updates them in every forward pass, and DDP then keeps those of rank 0. Here all micro-batches of a step
    start from the same statistics, and their results are averaged. With a single micro-batch, this equals torch's update.
    """

    def __init__(self, model: nn.Module) -> None:
        norms = [module for module in model.modules() if isinstance(module, nn.BatchNorm2d)]
        self._batches = [norm.num_batches_tracked for norm in norms if norm.num_batches_tracked is not None]
        self._counts: list[Tensor] = []
        self._running = [each for norm in norms for each in (norm.running_mean, norm.running_var) if each is not None]
        self._start: list[Tensor] = []
        self._mean: list[Tensor] = []

    def begin(self) -> None:
        """Keep the current statistics, from which all micro-batches of a step start. Call this before a step."""
        self._start = [each.clone() for each in self._running]
        self._mean = [torch.zeros_like(each) for each in self._running]
        torch._foreach_add_(self._batches, 1)
        self._counts = [each.clone() for each in self._batches]

    def add(self, share: float) -> None:
        """Add a micro-batch's statistics, weighted by its `share` from `Batch.split`. Call this after each micro-batch."""
        torch._foreach_add_(self._mean, self._running, alpha=share)
        torch._foreach_copy_(self._running, self._start)

    def end(self, ranks: int) -> None:
        """Set the statistics to the mean over all ranks. Call this after the last micro-batch. All ranks must call this."""
        if ranks > 1:
            flat = torch.cat(self._mean)
            dist.all_reduce(flat)
            self._mean = list(flat.div_(ranks).split([len(each) for each in self._mean]))
        torch._foreach_copy_(self._running, self._mean)
        torch._foreach_copy_(self._batches, self._counts)


def load(model: ResNet, file: Path) -> str:
    """Load weights of torchvision or of this recipe. Returns a description of the omitted weights, or "".

    The last layer is omitted if the file has a different number of classes. Raises OutlastError for another model's weights.
    """
    weights, own = results.state_dict(file), model.state_dict()
    weights |= {name: tensor for name, tensor in own.items() if name.endswith("num_batches_tracked") and name not in weights}
    classes = len(weights.get("fc.bias", own["fc.bias"]))
    if classes != model.classes:
        weights |= {name: tensor for name, tensor in own.items() if name.startswith("fc.")}
    model.load_state_dict(results.fitted(weights, model, f"--weights {file} (name the --arch that they were trained with)"))
    return f"fc, as it is for {classes} classes and the data have {model.classes}" if classes != model.classes else ""
