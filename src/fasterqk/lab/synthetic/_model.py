"""The single-layer attention model of the paper's equation 1, as plain as it can be written.

This is the reference that the engine is tested against, and the way a researcher would train it. The
embedding is one-hot and there are no biases.
"""

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from fasterqk.capture import record
from fasterqk.lab.synthetic._cell import layer_names


class AttentionModel(nn.Module):
    """One of the four parameterizations; its layers are named as in ``layer_names``.

    It reads tokens (batch, context + 1), the last of which is the query, and returns logits
    (batch, outputs) for the next token: of the whole vocabulary, or of the tokens ``outputs`` only.
    The query looks at the context, and with ``attend_query`` at itself. Scores are multiplied by
    ``score_scale`` (1 in the paper, 1/sqrt(50) as released).

    >>> model = AttentionModel("FACO")
    >>> [name for name, _ in model.named_parameters()]
    ['key.weight', 'query.weight', 'output_value.weight']
    >>> model(torch.tensor([[10, 0, 3, 5]])).shape
    torch.Size([1, 50])
    """

    def __init__(
        self,
        parameterization: str,
        vocabulary: int = 50,
        score_scale: float = 1.0,
        attend_query: bool = False,
        outputs: Sequence[int] | None = None,
    ) -> None:
        super().__init__()
        self.vocabulary, self.score_scale, self.attend_query = vocabulary, score_scale, attend_query
        self.outputs = list(range(vocabulary) if outputs is None else outputs)
        for name in layer_names(parameterization):
            self.add_module(name, nn.Linear(vocabulary, vocabulary, bias=False))

    def forward(self, tokens: Tensor) -> Tensor:
        embedded = functional.one_hot(tokens, self.vocabulary).to(next(self.parameters()).dtype)
        attended = embedded if self.attend_query else embedded[:, :-1]
        attention = self.attention(attended, embedded[:, -1])
        record(self, attention[:, None, None, :])
        return self.logits(attended, attention)

    def attention(self, attended: Tensor, query: Tensor) -> Tensor:
        """Probabilities (batch, position) of the query's row."""
        if hasattr(self, "query_key"):
            keys, queries = self.get_submodule("query_key")(attended), query
        else:
            keys, queries = self.get_submodule("key")(attended), self.get_submodule("query")(query)
        return torch.softmax(self.score_scale * torch.einsum("btd,bd->bt", keys, queries), dim=-1)

    def logits(self, attended: Tensor, attention: Tensor) -> Tensor:
        """Logits (batch, outputs) of what the attention brings together."""
        if hasattr(self, "output_value"):
            values, output = attended, self.get_submodule("output_value")
        else:
            values, output = self.get_submodule("value")(attended), self.get_submodule("output")
        logits: Tensor = output(torch.einsum("bt,btd->bd", attention, values))
        return logits[:, self.outputs]

    def load_matrices(self, matrices: Mapping[str, np.ndarray]) -> "AttentionModel":
        """Take over full matrices by layer name (see ``initial_matrices``); returns the model."""
        with torch.no_grad():
            for name, parameter in self.named_parameters():
                parameter.copy_(torch.from_numpy(matrices[name.removesuffix(".weight")]))
        return self
