"""The nets: sizes, names, and equality with torchvision's ResNet-18."""

import pytest
import torch
from torch import nn

from jobs.model import build_model


@pytest.mark.parametrize(
    ("name", "num_classes", "num_parameters"),
    [("resnet18", 10, 11_173_962), ("resnet18", 100, 11_220_132), ("small", 10, 98_970), ("small", 100, 110_580)],
)
def test_number_of_parameters(name: str, num_classes: int, num_parameters: int) -> None:
    model = build_model(name, num_classes)
    assert sum(parameter.numel() for parameter in model.parameters()) == num_parameters


def test_resnet18_computes_what_torchvision_computes_with_the_same_weights() -> None:
    from torchvision.models import resnet18

    reference = resnet18(num_classes=10)
    reference.conv1 = nn.Conv2d(3, 64, kernel_size=3, padding=1, bias=False)
    reference.maxpool = nn.Identity()
    model = build_model("resnet18", 10)
    reference.load_state_dict(model.state_dict())  # strict: the names are equal too
    images = torch.randn(4, 3, 32, 32)
    torch.testing.assert_close(model(images), reference(images))
    torch.testing.assert_close(model.eval()(images), reference.eval()(images))


@pytest.mark.parametrize("name", ["resnet18", "small"])
def test_one_sample_trains(name: str) -> None:
    model = build_model(name, 10)
    logits = model(torch.randn(1, 3, 32, 32))
    logits.sum().backward()
    assert logits.shape == (1, 10)
    assert all(p.grad is not None and bool(p.grad.isfinite().all()) for p in model.parameters())


@pytest.mark.parametrize("name", ["resnet18", "small"])
def test_weights_follow_from_torchs_seed(name: str) -> None:
    states = []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        states.append(build_model(name, 10).state_dict())
    same, again, other = (nn.utils.parameters_to_vector(state.values()) for state in states)
    assert torch.equal(same, again)
    assert not torch.equal(same, other)


def test_unknown_model_is_named_with_the_known_ones() -> None:
    with pytest.raises(ValueError) as caught:
        build_model("resnet50", 10)
    assert str(caught.value) == "model 'resnet50' does not exist; expected one of resnet18, small"
