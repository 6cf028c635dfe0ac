"""ferret's scores of HateXplain posts beside ours: equal wherever ferret reads the tokens that it kept."""

import numpy as np
import pytest

from fasterqk.attention import Nulls, measure
from fasterqk.attention.faithfulness import perturb
from fasterqk.attention.instances import collate
from fasterqk_lab.benchmarks import library as benchmark


@pytest.fixture
def setting(monkeypatch):
    small = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    monkeypatch.setattr(benchmark, "SIZE", small)
    monkeypatch.setattr(benchmark, "POSTS", 25)
    return benchmark.setting_of_measure()


def read_back(tokenizer, batch):
    """Whether every text of ``batch`` is the same after it was written out and tokenized again."""
    for tokens, real in zip(batch.tokens, batch.real, strict=True):
        inner = tokens[real].tolist()[1:-1]
        if tokenizer(tokenizer.decode(inner))["input_ids"][1:-1] != inner:
            return False
    return True


def test_equal_where_ferret_reads_what_it_kept(setting):
    ferret = pytest.importorskip("ferret")
    from ferret.explainers.explanation import Explanation

    tokenizer, model, instances = setting
    found = measure(model, instances, removal=benchmark.REMOVAL, nulls=Nulls(draws=0))
    kinds = {
        "aopc_comprehensiveness": ferret.AOPC_Comprehensiveness_Evaluation(model.model, tokenizer),
        "aopc_sufficiency": ferret.AOPC_Sufficiency_Evaluation(model.model, tokenizer),
    }
    ours = found.instance_scores(next(iter(found.rankings)))
    same = {True: 0, False: 0}
    for number, instance in enumerate(instances):
        target = int(found.faithfulness.predicted[number])
        importance = found.importance[number]
        given = Explanation(instance.texts[0], list(instance.pieces), importance, "attention", target)
        alone, without, _ = perturb(collate([instance]), importance[None], benchmark.REMOVAL)
        for name, some in zip(kinds, (without, alone), strict=True):
            theirs = kinds[name].compute_evaluation(given, target).score
            # ferret writes the tokens it keeps out as text and tokenizes that again: pieces of words that
            # lost their neighbours become other pieces. Ours are removed from the ids.
            exact = all(read_back(tokenizer, one) for one in some)
            same[exact] += 1
            if exact:
                assert ours[name][number] == pytest.approx(theirs, abs=1e-5), (name, number)
    assert same[True] > 5
    assert np.isfinite(found.summary()["aopc_sufficiency"])
