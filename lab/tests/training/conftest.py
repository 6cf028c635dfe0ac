import json

import pytest

from fasterqk_lab.tasks.jsonl import split_of
from fasterqk_lab.training import TrainConfig

WORDS = ["apple", "bread", "chair", "door", "early", "field", "green", "house"]


@pytest.fixture(scope="session")
def data_file(tmp_path_factory):
    """A little classification task: the label is whether 'left' or 'right' occurs, and that word is why."""
    path = tmp_path_factory.mktemp("data") / "little.jsonl"
    lines = []
    for number in range(240):
        length = 2 + number * 7 % 9
        tokens = [WORDS[(number * 5 + place * 3) % len(WORDS)] for place in range(length)]
        place = number * 11 % length
        tokens[place] = "right" if number % 2 else "left"
        if split_of(str(number)) == "test" and number % 3 == 0:
            tokens[place - 1] = f"unseen{number}"  # words that training never meets
        relevance = [int(word in ("left", "right")) for word in tokens]
        label = "right" if number % 2 else "left"
        lines.append({"id": str(number), "tokens": tokens, "relevance": relevance, "label": label})
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(path)


@pytest.fixture(scope="session")
def config(data_file):
    """A run of a second: a small model on the little task."""
    return TrainConfig(
        "jsonl",
        file=data_file,
        epochs=3,
        lr=3e-3,
        width=8,
        heads=2,
        head_width=4,
        mlp_width=8,
        context=16,
        init_scale=0.3,
        batch_size=16,
        bucket=2,
        train_subset=64,
        rationale_k=(20, 50),
        qk_ratio=5,
    )
