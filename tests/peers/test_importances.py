"""Importances of other packages, by the recipes of the documentation, and ferret's scores beside ours."""

import re
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from fasterqk.attention import Nulls, Removal, load_model, measure, read_examples
from fasterqk.attention.faithfulness import CONVENTIONS

PAGE = Path(__file__).parents[2] / "docs" / "importances.md"
WORDS = ["the", "film", "was", "good", "bad", "very", "not", "plot", "a", "fine", "cast", "and", "music"]
SIZE = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24}


def recipe(heading):
    """The Python under a heading of the page."""
    part = re.split(rf"^### {heading}$", PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE)[1]
    return re.search(r"```python\n(.*?)```", part, flags=re.DOTALL)[1]


@pytest.fixture(scope="module")
def tokenizer():
    names = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS]
    made = Tokenizer(models.WordLevel({name: i for i, name in enumerate(names)}, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    special = {"pad_token": "[PAD]", "unk_token": "[UNK]", "mask_token": "[MASK]"}
    special |= {"cls_token": "[CLS]", "sep_token": "[SEP]"}
    return transformers.PreTrainedTokenizerFast(tokenizer_object=made, model_max_length=32, **special)


@pytest.fixture(scope="module")
def classified(tmp_path_factory, tokenizer):
    """A loaded classifier with instances."""
    folder = tmp_path_factory.mktemp("classifier")
    torch.manual_seed(0)
    config = transformers.BertConfig(vocab_size=18, max_position_embeddings=32, initializer_range=0.5, **SIZE)
    transformers.BertForSequenceClassification(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    texts = [
        "the film was very good",
        "a bad plot and not a fine cast",
        "the music was fine and the plot bad",
    ]
    lines = [
        f'{{"id": "{n}", "text": "{text}", "spans": [[0, 8]], "label": 1}}' for n, text in enumerate(texts)
    ]
    (folder / "data.jsonl").write_text("\n".join(lines))
    loaded = load_model(folder)
    return loaded, loaded.encode(read_examples(folder / "data.jsonl"))


def run_recipe(heading, loaded, instances):
    names = {"loaded": loaded, "instances": instances, "measure": measure}
    exec(recipe(heading), names)
    return names["measurement"]


@pytest.mark.parametrize("heading", ["Captum", "ferret", "interpreto"])
def test_recipes_for_classifiers(heading, classified):
    pytest.importorskip(heading.lower())
    found = run_recipe(heading, *classified)
    name = heading.lower()
    assert list(found.rankings) == ["rollout", name]
    for instance, own in zip(found.instances, found.rankings[name].importance, strict=True):
        assert len(own) == len(instance.tokens) and np.ptp(own[instance.rankable]) > 0
    assert np.isfinite(found.summary().rankings[name]["aopc_comprehensiveness"])


def test_the_recipe_for_causal_models(tmp_path):
    pytest.importorskip("inseq")
    names = ["[PAD]", "[UNK]", *WORDS]
    made = Tokenizer(models.WordLevel({name: i for i, name in enumerate(names)}, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    special = {"pad_token": "[PAD]", "unk_token": "[UNK]", "bos_token": "[PAD]", "eos_token": "[PAD]"}
    torch.manual_seed(0)
    sizes = {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 32, "vocab_size": len(names)}
    ends = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"), 0)
    transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, **ends)).save_pretrained(tmp_path)
    transformers.PreTrainedTokenizerFast(tokenizer_object=made, **special).save_pretrained(tmp_path)
    (tmp_path / "data.jsonl").write_text('{"text": "the film was very", "target": "good and fine"}')
    loaded = load_model(tmp_path)
    instances = loaded.encode(read_examples(tmp_path / "data.jsonl"))
    found = run_recipe("inseq", loaded, instances)
    assert len(found.rankings["of_inseq"].importance[0]) == 4
    assert np.isfinite(found.rankings["of_inseq"].importance[0]).all()


def test_scores_are_ferrets_where_the_page_says_so(classified):
    ferret = pytest.importorskip("ferret")
    from ferret.explainers.explanation import Explanation

    loaded, instances = classified
    percents, rounding = CONVENTIONS["ferret"]
    removal = Removal(percents=percents, rounding=rounding)
    gradient = measure(loaded.model, instances, scores="gradient", removal=Removal(percents=()))
    # ferret drops negative importances; asked not to (only_pos=False), it fails with numpy 2.
    pairs = zip(instances, gradient.rankings["gradient"].importance, strict=True)
    positive = {x.id: own - own.min() + 1 for x, own in pairs}
    found = measure(
        loaded.model,
        instances,
        scores={"ours": positive, "leave_one_out": "leave_one_out"},
        removal=removal,
        nulls=Nulls(draws=0),
    )
    ours, ranking = found.instance_scores("ours"), found.rankings["ours"]
    bench = ferret.Benchmark(loaded.model.model, loaded.tokenizer)
    for number, instance in enumerate(instances):
        target = int(ranking.faithfulness.predicted[number])
        given = Explanation(
            instance.texts[0], list(instance.pieces), ranking.importance[number], "ours", target
        )
        rationale = instance.rationale.astype(int).tolist()
        scored = bench.evaluate_explanation(
            given,
            target,
            human_rationale=rationale,
            show_progress=False,
            top_k_rationale=sum(rationale),
        )
        theirs = {one.name: one.score for one in scored.evaluation_scores}
        for name, other in (
            ("aopc_comprehensiveness", "aopc_compr"),
            ("aopc_sufficiency", "aopc_suff"),
            ("tau_leave_one_out", "taucorr_loo"),
            ("auprc", "auprc_plau"),
            ("token_f1", "token_f1_plau"),
            ("token_iou", "token_iou_plau"),
        ):
            assert ours[name][number] == pytest.approx(theirs[other], abs=1e-5), (name, number)
