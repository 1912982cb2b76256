"""Models of libraries that need not be there: timm, torchvision, peft, diffusers."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

import purestep as ps

from . import families
from .compare import Entry
from .models import CLASSES, labelled, own_loss

PIXELS = 64

TIMM = (
    *(
        "resnet10t",
        "resnet18",
        "seresnet18",
        "resnext26ts",
        "mobilenetv3_small_050",
        "efficientnet_lite0",
        "ghostnet_050",
    ),
    *("test_vit", "test_convnext", "test_convnext2", "test_resnet", "test_efficientnet", "test_byobnet", "test_nfnet"),
    *("test_vit2", "test_vit3", "test_vit4", "test_mambaout", "test_convnext3", "test_efficientnet_ln"),
    *("test_efficientnet_evos", "test_efficientnet_gn"),
)
"""Names that `timm.create_model` takes."""
TORCHVISION: dict[str, dict[str, Any]] = {
    "resnet18": {"width_per_group": 64},
    "mobilenet_v2": {"width_mult": 0.25},
    "mobilenet_v3_small": {"width_mult": 0.5},
    "mnasnet0_5": {},
    "shufflenet_v2_x0_5": {},
    "squeezenet1_1": {},
}
"""By name in `torchvision.models`: arguments that make it small."""


def _timm(name: str) -> Entry:
    def make() -> nn.Module:
        timm: Any = importlib.import_module("timm")
        return timm.create_model(name, num_classes=CLASSES, drop_rate=0.1, pretrained=False)

    return labelled(name, "timm", make, (3, PIXELS, PIXELS))


def _torchvision(name: str, given: dict[str, Any]) -> Entry:
    def make() -> nn.Module:
        models: Any = importlib.import_module("torchvision.models")
        return getattr(models, name)(num_classes=CLASSES, weights=None, **given)

    return labelled(name, "torchvision", make, (3, PIXELS, PIXELS))


def _adapted(name: str, adapter: str, given: dict[str, Any]) -> Entry:
    def make() -> nn.Module:
        peft: Any = importlib.import_module("peft")
        return peft.get_peft_model(families.model("gpt2", "GPT2LMHeadModel"), getattr(peft, adapter)(**given))

    return own_loss(name, make, families.tokens, "peft")


PEFT: dict[str, tuple[str, dict[str, Any]]] = {
    "LoRA on GPT-2": ("LoraConfig", {"task_type": "CAUSAL_LM", "r": 4, "lora_dropout": 0.1}),
    "DoRA on GPT-2": ("LoraConfig", {"task_type": "CAUSAL_LM", "r": 4, "lora_dropout": 0.1, "use_dora": True}),
    "IA3 on GPT-2": ("IA3Config", {"task_type": "CAUSAL_LM"}),
    "prompt tuning on GPT-2": ("PromptTuningConfig", {"task_type": "CAUSAL_LM", "num_virtual_tokens": 3}),
    "prefix tuning on GPT-2": ("PrefixTuningConfig", {"task_type": "CAUSAL_LM", "num_virtual_tokens": 3}),
}
"""By name: the class of the adapter's configuration, and its arguments."""


def _unet() -> Entry:
    def make() -> nn.Module:
        diffusers: Any = importlib.import_module("diffusers")
        return diffusers.UNet2DModel(
            sample_size=8,
            block_out_channels=(8, 16),
            down_block_types=("DownBlock2D", "AttnDownBlock2D"),
            up_block_types=("AttnUpBlock2D", "UpBlock2D"),
            layers_per_block=1,
            norm_num_groups=4,
            attention_head_dim=4,
            dropout=0.1,
        )

    def batch(rows: int, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
        noise, clean = (torch.randn(rows, 3, 8, 8, generator=generator) for _ in range(2))
        return clean + noise, torch.randint(100, (rows,), generator=generator), noise

    def loss(model: Any, batch: Any) -> Tensor:
        noisy, times, noise = batch
        return functional.mse_loss(model(noisy, times).sample, noise)

    return Entry("UNet2DModel", "diffusers", make, batch, loss, lambda model, batch: ps.Loss(loss(model, batch), 1.0))


def entries() -> Iterator[Entry]:
    """A row for each model, whether its library is there or not."""
    makers: list[Callable[[], Entry]] = [
        *(lambda name=name: _timm(name) for name in TIMM),
        *(lambda name=name, given=given: _torchvision(name, given) for name, given in TORCHVISION.items()),
        *(lambda name=name, given=given: _adapted(name, *given) for name, given in PEFT.items()),
        _unet,
    ]
    for make in makers:
        yield make()
