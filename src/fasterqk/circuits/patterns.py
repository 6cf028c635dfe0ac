"""What a name says about a parameter: ``q_proj`` makes queries, ``out_proj`` writes the output.

A name is cut into words (``c_attn`` -> c, attn; ``W_Q`` -> w, q; ``queryProj`` -> query, proj), and a few
words carry the meaning. This is how nine of ten models spell it; where it is not enough the registry or
the probe decides.
"""

import re
from dataclasses import dataclass

_LETTERS = {
    "q": "q",
    "query": "q",
    "queries": "q",
    "wq": "q",
    "k": "k",
    "key": "k",
    "keys": "k",
    "wk": "k",
    "v": "v",
    "value": "v",
    "values": "v",
    "wv": "v",
    "kv": "kv",
    "wkv": "kv",
    "qk": "qk",
    "wqk": "qk",
    "qkv": "qkv",
    "wqkv": "qkv",
    "qv": "qv",
}
_OUTPUT = {"o", "wo", "out", "output", "dense", "proj", "projection"}
_NORM = {"norm", "layernorm", "rmsnorm", "ln", "batchnorm", "groupnorm", "l2norm"}
# Tables and numbers that reach the scores only.
_BIAS = re.compile(
    r"relative_attention_bias|rel(ative)?_pos|relative_position|position_bias|rel_bias|relative_bias|"
    r"logit_scale|sinks?$|attention_biases|r_[wrs]_bias|pos_bias|linear_pos|pos_proj|"
    r"attention_scale|temperature|tau$",
    re.IGNORECASE,
)


@dataclass(frozen=True)
class Meaning:
    """What the words of one name say: the letters of q, k, v they hold, and whether it is a norm."""

    letters: str = ""
    output: bool = False
    norm: bool = False
    score: bool = False


def words(name: str) -> list[str]:
    """The words of one name, in lower case.

    >>> words("W_Q"), words("queryKeyValue"), words("kv_a_proj_with_mqa")
    (['w', 'q'], ['query', 'key', 'value'], ['kv', 'a', 'proj', 'with', 'mqa'])
    """
    spaced = re.sub(r"([a-z])([A-Z])", r"\1_\2", name)
    return [word for word in re.split(r"[_\W]+", spaced.lower()) if word]


def meaning(name: str) -> Meaning:
    """What ``name`` (one component of a path) says.

    >>> meaning("q_proj").letters, meaning("query_key_value").letters, meaning("out_proj").output
    ('q', 'qkv', True)
    """
    parts = words(name)
    found = "".join(_LETTERS.get(part, "") for part in parts)
    letters = "".join(letter for letter in "qkv" if letter in found)
    return Meaning(
        letters,
        output=not letters and any(part in _OUTPUT for part in parts),
        norm=any(part in _NORM for part in parts),
        score=bool(_BIAS.search(name)),
    )
