"""Models: spec -> [model] -> training loop.  Nets for 32x32 images, written out so that no torchvision is imported.

Source: He et al., "Deep residual learning for image recognition" (2015); the CIFAR form of ResNet-18 has a 3x3 stem of
stride 1 and no max-pooling.  Parameter names are torchvision's.
"""

from torch import Tensor, nn


def build_model(name: str, num_classes: int) -> nn.Module:
    """A net that maps float32 (B, 3, 32, 32) to logits (B, num_classes); weights from torch's global generator.

    name: "resnet18" (11.2 million parameters) or "small" (0.1 million, seconds on a CPU).
    Raises ValueError: there is no such model.
    """
    builders: dict[str, type[nn.Module]] = {"resnet18": ResNet18, "small": SmallNet}
    if name not in builders:
        raise ValueError(f"model {name!r} does not exist; expected one of {', '.join(builders)}")
    model = builders[name](num_classes)
    _initialize(model)
    return model


class ResidualBlock(nn.Module):
    """Two 3x3 convolutions and a shortcut, which is a 1x1 convolution where the shape changes."""

    def __init__(self, channels_in: int, channels_out: int, stride: int) -> None:
        """Halve height and width when stride is 2."""
        super().__init__()
        self.conv1 = _conv3x3(channels_in, channels_out, stride)
        self.bn1 = nn.BatchNorm2d(channels_out)
        self.conv2 = _conv3x3(channels_out, channels_out)
        self.bn2 = nn.BatchNorm2d(channels_out)
        self.downsample: nn.Module = nn.Identity()
        if stride != 1 or channels_in != channels_out:
            shortcut = nn.Conv2d(channels_in, channels_out, kernel_size=1, stride=stride, bias=False)
            self.downsample = nn.Sequential(shortcut, nn.BatchNorm2d(channels_out))

    def forward(self, x: Tensor) -> Tensor:
        """(B, channels_in, H, W) -> (B, channels_out, H / stride, W / stride)."""
        residual = self.bn2(self.conv2(self.bn1(self.conv1(x)).relu_()))
        out: Tensor = residual + self.downsample(x)
        return out.relu_()


class ResNet18(nn.Module):
    """ResNet-18 in its CIFAR form; 4x4 pixels are left before pooling, so BatchNorm can train on one sample."""

    def __init__(self, num_classes: int) -> None:
        """Four stages of two blocks each."""
        super().__init__()
        self.conv1 = _conv3x3(3, 64)
        self.bn1 = nn.BatchNorm2d(64)
        self.layer1 = nn.Sequential(ResidualBlock(64, 64, 1), ResidualBlock(64, 64, 1))
        self.layer2 = nn.Sequential(ResidualBlock(64, 128, 2), ResidualBlock(128, 128, 1))
        self.layer3 = nn.Sequential(ResidualBlock(128, 256, 2), ResidualBlock(256, 256, 1))
        self.layer4 = nn.Sequential(ResidualBlock(256, 512, 2), ResidualBlock(512, 512, 1))
        self.fc = nn.Linear(512, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        """(B, 3, 32, 32) -> (B, num_classes)."""
        x = self.bn1(self.conv1(x)).relu_()
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        logits: Tensor = self.fc(x.mean(dim=(2, 3)))
        return logits


class SmallNet(nn.Module):
    """Four convolutions with BatchNorm, about 98,000 parameters; for tests, demos and machines without a GPU."""

    def __init__(self, num_classes: int) -> None:
        """Each stage but the first halves height and width: 32, 16, 8, 4 pixels."""
        super().__init__()
        self.layer1 = _conv_stage(3, 16, 1)
        self.layer2 = _conv_stage(16, 32, 2)
        self.layer3 = _conv_stage(32, 64, 2)
        self.layer4 = _conv_stage(64, 128, 2)
        self.fc = nn.Linear(128, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        """(B, 3, 32, 32) -> (B, num_classes)."""
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        logits: Tensor = self.fc(x.mean(dim=(2, 3)))
        return logits


def _conv3x3(channels_in: int, channels_out: int, stride: int = 1) -> nn.Conv2d:
    return nn.Conv2d(channels_in, channels_out, kernel_size=3, stride=stride, padding=1, bias=False)


def _conv_stage(channels_in: int, channels_out: int, stride: int) -> nn.Sequential:
    return nn.Sequential(
        _conv3x3(channels_in, channels_out, stride), nn.BatchNorm2d(channels_out), nn.ReLU(inplace=True)
    )


def _initialize(model: nn.Module) -> None:
    """He initialisation of the convolutions; BatchNorm and the last layer keep torch's defaults."""
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
