"""A plugin for axolotl: rates by circuit, and a monitor and clip of attention logits, from its YAML.

Put this file on the PYTHONPATH and name it in the configuration:

    plugins: [axolotl_fasterqk.FasterQKPlugin]
    fasterqk: {qk_ratio: 10, layer_decay: 0.9}   # arguments of fasterqk.make_optimizer
    fasterqk_logits: {every: 100, clip: 100}     # arguments of fasterqk.huggingface.LogitCallback

The class, rate and decay of the optimizer are those of the configuration (`optimizer: adamw_torch`, ...).
"""

from typing import Any

from axolotl.integrations.base import BasePlugin
from pydantic import BaseModel

from fasterqk.huggingface import LogitCallback, trainer_optimizer


class FasterQKArgs(BaseModel):
    """The keys that the plugin adds to axolotl's configuration."""

    fasterqk: dict[str, Any] | None = None
    fasterqk_logits: dict[str, Any] | None = None


class FasterQKPlugin(BasePlugin):
    """Gives axolotl's trainer its optimizer and the logit callback."""

    def get_input_args(self) -> str:
        return "axolotl_fasterqk.FasterQKArgs"

    def post_trainer_create(self, cfg: Any, trainer: Any) -> None:
        if cfg.fasterqk:
            factory, settings = trainer_optimizer(trainer.args, **cfg.fasterqk.to_dict())
            trainer.optimizer = factory()(trainer.model, **settings)
        if cfg.fasterqk_logits:
            LogitCallback(**cfg.fasterqk_logits.to_dict()).add_to(trainer)
