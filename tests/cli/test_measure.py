"""`fasterqk measure` from end to end on tiny models, and one line for every kind of bad input."""

import json
import shutil

import pytest
import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from fasterqk.cli.main import main

WORDS = ["the", "film", "was", "good", "bad", "very", "not", "plot", "yes", "no"]
KEYS = {
    "n",
    "n_without_relevance",
    "accuracy",
    "mrta",
    "ac",
    "acmc",
    "dtap",
    "dtap_edges",
    "entropy",
    "sufficiency",
    "comprehensiveness",
    "aopc",
    "plausibility",
    "null",
    "random",
}
CLASSIFIED = [
    {"tokens": ["the", "film", "was", "very", "good"], "relevance": [0, 0, 0, 1, 1], "label": "positive"},
    {"text": "the plot was bad", "spans": [[13, 16]], "label": 0},
    {"tokens": ["the", "film"], "relevance": [0, 0], "label": 1},
]
WRITTEN = [
    {"tokens": ["the", "film", "was", "good"], "relevance": [0, 0, 0, 1], "target": "yes"},
    {"text": "the plot was bad", "spans": [[13, 16]], "target": "no not good"},
]


def tokenizer(special):
    names = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS]
    made = Tokenizer(models.WordLevel({name: i for i, name in enumerate(names)}, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    if special:
        made.post_processor = processors.TemplateProcessing(
            single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
        )
    more = {"mask_token": "[MASK]"} if special else {}
    return transformers.PreTrainedTokenizerFast(tokenizer_object=made, pad_token="[PAD]", **more)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A classifier, a causal model and a model of another kind, saved."""
    torch.manual_seed(0)
    root = tmp_path_factory.mktemp("models")
    size = {"vocab_size": 15, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    size |= {"intermediate_size": 16, "max_position_embeddings": 32, "initializer_range": 0.5}
    bert = transformers.BertConfig(**size, id2label={0: "negative", 1: "positive"})
    saved = {
        "classifier": transformers.BertForSequenceClassification(bert),
        "causal": transformers.LlamaForCausalLM(transformers.LlamaConfig(**size)),
        "tagger": transformers.BertForTokenClassification(bert),
        "other": transformers.BertForSequenceClassification(bert),
    }
    for name, model in saved.items():
        model.save_pretrained(root / name)
        tokenizer(special=name != "causal").save_pretrained(root / name)
    return root


@pytest.fixture
def command(folders, tmp_path, capsys):
    """Runs the command on lines of data; returns exit code, standard output and standard error."""

    def run(model, lines, *options):
        path = tmp_path / "data.jsonl"
        path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines))
        capsys.readouterr()
        code = main(["measure", "--model", str(folders / model), "--data", str(path), *options])
        return code, *capsys.readouterr()

    return run


@pytest.mark.parametrize(("model", "lines"), [("classifier", CLASSIFIED), ("causal", WRITTEN)])
def test_json_is_one_document_with_the_promised_keys(command, model, lines):
    code, out, error = command(model, lines, "--json", "--rationale-k", "5,10,20,50")
    summary = json.loads(out)
    assert code == 0
    assert error == ""
    assert set(summary) >= KEYS
    assert summary["n"] == len(lines)
    assert summary["n_without_relevance"] == (1 if model == "classifier" else 0)
    assert set(summary["sufficiency"]) == set(summary["random"]["sufficiency"]) == {"5", "10", "20", "50"}
    assert sum(map(sum, summary["dtap"])) == pytest.approx(100)
    assert 0 <= summary["mrta"] <= 1
    assert 0 <= summary["null"]["mrta"] <= 1
    assert set(summary["plausibility"]) == {"auprc", "token_f1", "token_iou", "iou_f1"}


def test_several_importances_in_one_table(command, tmp_path):
    path = tmp_path / "mine.jsonl"
    lines = [
        {"id": "1", "scores": [0, 0, 0, 1, 2]},
        {"id": "2", "spans": [[13, 16, 1.5]]},
        {"id": "3", "characters": [1, 1, 1, 0, -2, -2, -2, -2]},
    ]
    path.write_text("\n".join(map(json.dumps, lines)))
    asked = ["--scores", "gradient", "--scores", "leave_one_out", "--scores", str(path)]
    code, out, error = command("classifier", CLASSIFIED, "--json", "--rationale-k", "20", *asked)
    assert (code, error) == (0, "")
    importance = json.loads(out)["importance"]
    assert list(importance) == ["rollout", "gradient", "leave_one_out", "mine"]
    # What the file says is what people said.
    assert importance["mine"]["plausibility"]["auprc"] == 1
    assert "tau_leave_one_out" in importance["mine"]
    code, out, _ = command("classifier", CLASSIFIED, *asked)
    assert code == 0 and "every importance of the tokens" in out and "leave_one_out" in out


def test_without_rationales_it_says_what_is_left_out(command, tmp_path):
    lines = [{"text": "the film was good", "label": 1}, {"tokens": ["bad", "plot"], "label": 0}]
    code, out, error = command("classifier", lines, "--out", str(tmp_path / "out"))
    assert (code, error) == (0, "")
    assert "The data does not say which tokens are relevant, so attention on relevant" in out
    assert "plausibility are left out" in out
    assert "aopc comprehensiveness" in out and "auprc " not in out


def test_scores_that_do_not_fit_are_one_line(command, tmp_path):
    path = tmp_path / "mine.jsonl"
    path.write_text('{"id": "1", "scores": [1, 2]}')
    code, out, error = command("classifier", CLASSIFIED, "--scores", str(path))
    assert (code, out) == (2, "")
    assert "no scores for 2 of 3 instances, such as id '2'" in error and error.count("\n") == 1


def test_two_models_are_compared_on_the_same_data(command, folders, tmp_path):
    lines = CLASSIFIED * 4
    lines = [{**line, "id": str(number)} for number, line in enumerate(lines)]
    both = ["--model", str(folders / "other"), "--rationale-k", "50"]
    code, out, error = command("classifier", lines, *both, "--json")
    document = json.loads(out)
    assert (code, error) == (0, "")
    assert list(document["models"]) == ["classifier", "other"]
    for name in ("mrta", "ac", "entropy"):
        one, other = (document["models"][model][name] for model in document["models"])
        found = document["difference"][name]
        assert found["value"] == pytest.approx(other - one)
        assert found["low"] <= found["value"] <= found["high"]
    assert set(document["difference"]["sufficiency"]) == {"50"}
    code, out, _ = command("classifier", lines, *both, "--out", str(tmp_path / "out"))
    assert code == 0 and "other minus classifier, paired by instance" in out
    tables = {path.name for path in (tmp_path / "out" / "tables").iterdir()}
    assert {"measure-difference.csv", "measure-scores-1.csv", "measure-instances-2.csv"} <= tables
    page = (tmp_path / "out" / "measure.html").read_text()
    assert "other minus classifier" in page and str(tmp_path / "out" / "measure.html") in out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--model", "x", "--model", "y"], "--model was given 3 times; give one model, or two"),
        (["--model", "SAME"], "was given twice; give two different models"),
        (["--model", "other", "--resamples", "0"], "--resamples 0: two models are compared by resampling"),
        (["--model", "other", "--eraser-out", "e.jsonl"], "--eraser-out takes the predictions of one model"),
        (["--resamples", "-1"], "--resamples: '-1' is not a whole number from 0 to"),
        (
            ["--resamples", "999999999999"],
            "--resamples: '999999999999' is not a whole number from 0 to 100000",
        ),
        (["--null", "999999999999"], "--null: '999999999999' is not a whole number from 1 to 1000"),
        (["--seed", "-1"], "--seed: '-1' is not a whole number from 0 to"),
        (["--rationale-k", "5,200"], "'200' is not a whole number from 1 to 100"),
        (["--null", "0"], "--null: '0' is not a whole number from 1 to"),
        (["--null", "some"], "--null: 'some' is not a whole number"),
        (["--k", "sheffield"], "'sheffield' is neither a convention (eraser, ferret) nor a list like 5,10"),
    ],
)
def test_bad_combinations_are_one_line(command, folders, options, message):
    options = [str(folders / "classifier") if option == "SAME" else option for option in options]
    try:
        code, out, error = command("classifier", CLASSIFIED, *options)
    except SystemExit as caught:
        code, out, error = caught.code, "", message  # argparse prints its own line
    assert (code, out) == (2, "")
    assert message in error


def test_nulls_and_conventions_on_request(command):
    none = json.loads(command("classifier", CLASSIFIED, "--json", "--null", "none", "--k", "50")[1])
    assert "random" not in none and "random_error" not in none
    several = json.loads(command("classifier", CLASSIFIED, "--json", "--null", "4", "--k", "50")[1])
    assert several["measured"]["draws"] == 4
    assert several["random_error"]["comprehensiveness"]["50"] >= 0
    ferret = json.loads(command("classifier", CLASSIFIED, "--json", "--k", "ferret")[1])
    assert list(ferret["sufficiency"]) == [str(k) for k in range(10, 101, 10)]
    assert ferret["measured"]["rounding"] == "down"
    eraser = json.loads(command("classifier", CLASSIFIED, "--json", "--k", "eraser")[1])
    assert list(eraser["sufficiency"]) == ["1", "5", "10", "20", "50"]
    low, high = eraser["interval"]["aopc"]["sufficiency"]
    assert low <= eraser["aopc"]["sufficiency"] <= high
    assert "interval" not in json.loads(command("classifier", CLASSIFIED, "--json", "--resamples", "0")[1])


def test_batch_size_changes_nothing(command):
    one, many = (
        json.loads(command("classifier", CLASSIFIED, "--json", "--batch-size", size)[1])
        for size in ("1", "3")
    )
    for name in ("accuracy", "mrta", "ac", "acmc", "entropy"):
        assert one[name] == pytest.approx(many[name], abs=1e-6)
    for name in ("sufficiency", "comprehensiveness"):
        assert one[name] == pytest.approx(many[name], abs=1e-6)
        assert one["random"][name] == pytest.approx(many["random"][name], abs=1e-6)


@pytest.mark.parametrize(
    "options",
    [
        ["--aggregate", "mean"],
        ["--aggregate", "max"],
        ["--aggregate", "last"],
        ["--aggregate", "layer:0"],
        ["--residual", "0"],
        ["--aggregate", "rollout/head:1"],
        ["--remove", "mask"],
        ["--remove", "attention"],
    ],
)
def test_options(command, options):
    code, out, _ = command("classifier", CLASSIFIED, "--json", "--rationale-k", "20", *options)
    assert code == 0
    assert set(json.loads(out)) >= KEYS


def test_people_get_tables(command):
    code, out, _ = command("causal", WRITTEN)
    assert code == 0
    assert "2 instances, 0 of them without a relevant token" in out
    assert "comprehensiveness" in out
    assert "DTAP, percent of instances" in out


def test_files_on_request(command, tmp_path):
    target, out = tmp_path / "e" / "mine.jsonl", tmp_path / "out"
    code, *_ = command("classifier", CLASSIFIED, "--json", "--eraser-out", str(target), "--out", str(out))
    assert code == 0
    predictions = [json.loads(line) for line in target.read_text().splitlines()]
    assert {line["classification"] for line in predictions} <= {"negative", "positive"}
    # What ERASER's metrics.py asks for unless it is told otherwise.
    assert [own["threshold"] for own in predictions[0]["thresholded_scores"]] == [0.01, 0.05, 0.1, 0.2, 0.5]
    assert (tmp_path / "e" / "mine.data" / "docs.jsonl").is_file()
    names = ("scores", "removals", "groups", "heads", "dtap", "instances")
    assert {path.name for path in (out / "tables").iterdir()} == {f"measure-{name}.csv" for name in names}
    assert (out / "tables" / "measure-instances.csv").read_text().count("\n") == 1 + len(CLASSIFIED)


def test_people_get_the_commands_of_eraser(command, tmp_path):
    target = tmp_path / "my files" / "mine.jsonl"
    code, out, _ = command("classifier", CLASSIFIED, "--rationale-k", "20", "--eraser-out", str(target))
    assert code == 0
    assert f"--split test --results '{target}' --aopc_thresholds 0.2" in out
    assert "rationales.jsonl'" in out
    # All lines have one label, and the model predicts another for some.
    same = [line | {"label": label} for line, label in zip(CLASSIFIED, (0, 0, 0), strict=True)]
    other = [line | {"label": 1} for line in same]
    printed = [command("classifier", lines, "--eraser-out", str(target))[1] for lines in (same, other)]
    assert any("cannot score predictions of" in text for text in printed)


GOOD = CLASSIFIED[0]


@pytest.mark.parametrize(
    ("model", "lines", "options", "message"),
    [
        ("classifier", [], [], "is empty"),
        (
            "classifier",
            [GOOD | {"relevance": [1] * 6}],
            [],
            "'relevance' has 6 numbers but 'tokens' has 5 words",
        ),
        ("classifier", [CLASSIFIED[2]], [], "no token is relevant in any of 1 instances"),
        ("classifier", [GOOD | {"label": 2}], [], "the label 2 is not a class of the model"),
        ("classifier", [GOOD | {"label": "ugly"}], [], "the label 'ugly' is not a class of the model"),
        ("classifier", WRITTEN, [], "a classifier needs 'label'"),
        ("causal", CLASSIFIED, [], "a causal model needs 'target'"),
        ("causal", WRITTEN, ["--remove", "mask"], "has no mask token"),
        ("causal", [WRITTEN[0] | {"target": "no " * 40}], [], "but the model reads 32"),
        ("tagger", CLASSIFIED, [], "holds BertForTokenClassification; only sequence classifiers"),
        ("nothing", CLASSIFIED, [], "has no config.json"),
        ("classifier", CLASSIFIED, ["--aggregate", "sum"], "unknown aggregation 'sum'"),
        (
            "classifier",
            CLASSIFIED,
            ["--aggregate", "layer:7"],
            "2 layers of attention; layer 7 was asked for",
        ),
        ("classifier", CLASSIFIED, ["--aggregate", "mean/head:2"], "head 2 was asked for, but layer 0 has 2"),
        ("classifier", CLASSIFIED, ["--residual", "1"], "residual weight 1.0"),
        (
            "classifier",
            CLASSIFIED,
            ["--rationale-k", "5,5"],
            "k is 5; give whole percentages from 1 to 100, each",
        ),
        ("classifier", ["{"], [], "line 1 is not JSON"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(command, model, lines, options, message):
    code, out, error = command(model, lines, *options)
    assert code == 2
    assert out == ""
    assert message in error
    assert error.startswith("fasterqk measure: ")
    assert error.count("\n") == 1


def test_a_model_trained_to_nan_is_said_so(command, folders, tmp_path):
    model = transformers.BertForSequenceClassification.from_pretrained(folders / "classifier")
    torch.nn.init.constant_(model.bert.encoder.layer[0].attention.self.query.weight, torch.nan)
    model.save_pretrained(tmp_path / "broken")
    tokenizer(special=True).save_pretrained(tmp_path / "broken")
    code, _, error = command(tmp_path / "broken", CLASSIFIED)
    assert code == 2
    assert "attention of layer 1 is not a number" in error
    assert error.count("\n") == 1


def test_a_missing_file_is_named(folders, capsys):
    assert main(["measure", "--model", str(folders / "classifier"), "--data", "none.jsonl"]) == 2
    assert "cannot read 'none.jsonl'" in capsys.readouterr().err


def test_attention_among_words(command):
    everything, words = (
        json.loads(command("classifier", CLASSIFIED, "--json", "--among", among)[1])
        for among in ("all", "words")
    )
    assert words["mrta"] == pytest.approx(everything["mrta_among_words"])
    assert words["null"]["mrta"] == pytest.approx(everything["null"]["mrta_among_words"])
    assert everything["concentration"]["special_share"] > 0 == words["concentration"]["special_share"]
    out = command("classifier", CLASSIFIED)[1]
    assert "mrta_among_words" in out and "of the aggregated attention is on special tokens" in out


def test_classes_with_other_names_are_compared_with_a_note(command, folders, tmp_path):
    renamed = tmp_path / "renamed"
    shutil.copytree(folders / "other", renamed)
    config = json.loads((renamed / "config.json").read_text())
    config |= {"id2label": {"0": "no", "1": "yes"}, "label2id": {"no": 0, "yes": 1}}
    (renamed / "config.json").write_text(json.dumps(config))
    lines = [line | {"label": number % 2} for number, line in enumerate(CLASSIFIED)]
    code, out, _ = command("classifier", lines, "--model", str(renamed), "--k", "50", "--resamples", "5")
    assert code == 0
    assert (
        "note: the classes of the two models, compared by number, are negative, positive and no, yes" in out
    )
