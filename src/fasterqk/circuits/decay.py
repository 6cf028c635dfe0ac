"""Which parameters are not decayed: biases and norms, by the rule of the Hugging Face Trainer."""

import re

from torch import nn

# The Trainer's own patterns, searched in the lower-case name.
_NAMES = re.compile(r"bias|layernorm|rmsnorm|(?:^|\.)norm(?:$|\.)|_norm(?:$|\.)")


def undecayed(model: nn.Module) -> set[str]:
    """Names of the parameters that take no weight decay.

    These are all biases and everything in a normalisation layer, known by its name (as the Trainer does)
    or by its class, which also catches an ``nn.RMSNorm`` called ``ln_1``.

    >>> sorted(undecayed(nn.TransformerEncoderLayer(8, 2)))[:3]
    ['linear1.bias', 'linear2.bias', 'norm1.bias']
    """
    found = set()
    for prefix, module in model.named_modules():
        norm = "norm" in type(module).__name__.lower()
        for name, _ in module.named_parameters(prefix, recurse=False):
            if norm or _NAMES.search(name.lower()):
                found.add(name)
    return found
