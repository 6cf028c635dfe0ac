"""What a name says about a part of attention: ``q_proj`` makes queries, ``out_proj`` writes the output.

A name is cut into words (``c_attn`` -> c, attn; ``W_Q`` -> w, q; ``queryProj`` -> query, proj), and a few
words carry the meaning.
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
    "qv": "qv",
    "qkv": "qkv",
    "wqkv": "qkv",
}
_OUTPUT = {"o", "wo", "out", "output", "dense", "post", "gate", "g", "ov"}
# A projection that says nothing else is the one at the end.
_BARE = {"proj", "projection"}
# Fused projections whose names do not spell q, k, v.
_FUSED = re.compile(r"c_attn|in_proj(_weight|_bias)?|w_?pack|att(n|ention)?_proj", re.IGNORECASE)
_NORM = {"norm", "layernorm", "rmsnorm", "ln", "batchnorm", "groupnorm", "l2norm", "normalization", "bn"}
# Tables and numbers that are added to the scores or scale them, and act nowhere else.
_SCORE = re.compile(
    r"relative_attention_bias|rel(ative)?_pos|relative_position|position_bias|rel_bias|relative_bias|"
    r"logit_scale|sinks?$|attention_bias(es)?$|r_[wrs]_bias|r_kernel|pos_bias|linear_pos|pos_proj|rel_logits|"
    r"attention_scale|per_dim_scale|softmax_scal|^scaling$|temperature|distance_embedding",
    re.IGNORECASE,
)


@dataclass(frozen=True)
class Meaning:
    """What the words of one name say.

    ``letters``: those of q, k, v it names, in that order; ``output``: it writes attention's output;
    ``norm``: it is a normalisation; ``score``: it acts on the scores alone.
    """

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


def is_fused(name: str) -> bool:
    """Whether ``name`` is one of the usual names for queries, keys and values in one weight."""
    return bool(_FUSED.fullmatch(name))


def meaning(name: str) -> Meaning:
    """What ``name`` (one component of a path) says.

    >>> meaning("q_proj").letters, meaning("query_key_value").letters, meaning("out_proj").output
    ('q', 'qkv', True)
    >>> meaning("c_proj").output, meaning("rank_proj").output, meaning("layernorm1").norm
    (True, False, True)
    """
    parts = words(name)
    found = "qkv" if is_fused(name) else "".join(_LETTERS.get(part, "") for part in parts)
    letters = "".join(letter for letter in "qkv" if letter in found)
    telling = [part for part in parts if part not in ("c", "layer")]
    bare = len(telling) == 1 and telling[0] in _BARE
    output = bare or any(part in _OUTPUT for part in parts)
    return Meaning(
        letters,
        output=not letters and output,
        norm=any(part.rstrip("0123456789") in _NORM for part in parts),
        score=bool(_SCORE.search(name)),
    )
