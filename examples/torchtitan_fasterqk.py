"""torchtitan's way of making optimizers, with rates by circuit.

In a torchtitan configuration, in place of `default_adamw(...)`:

    optimizer=CircuitOptimizers.Config(settings={"optimizer": "AdamW", "lr": 8e-4, "qk_ratio": 3})
"""

from dataclasses import dataclass, field
from typing import Any

from torch import nn
from torchtitan.components.optimizer import OptimizersContainer
from torchtitan.components.optimizer.utils import init_optim_state, load_flat_optim_state_dict

from fasterqk.optim import from_config


class CircuitOptimizers(OptimizersContainer):
    """One optimizer per part of the model; parts are sharded before they come here."""

    @dataclass(kw_only=True, slots=True)
    class Config(OptimizersContainer.Config):
        settings: dict[str, Any] = field(default_factory=dict)
        """Settings of `fasterqk.optim.from_config`; `param_groups` and `implementation` are not read."""

    def __init__(self, config: Config, *, model_parts: list[nn.Module]) -> None:
        self.model_parts = model_parts
        self.optimizers = [from_config(config.settings)(part) for part in model_parts]
        trained = [p for part in model_parts for p in part.parameters() if p.requires_grad]
        self._post_init(trained)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        for optimizer in self.optimizers:
            init_optim_state(optimizer)
            optimizer.state_dict()  # gives optimizer.state one entry per parameter, which torchtitan reads
            load_flat_optim_state_dict(optimizer, state_dict)
