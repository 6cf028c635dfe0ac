"""A model folder of Hugging Face transformers, opened by what its configuration says it is."""

from collections.abc import Sequence
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple

from fasterqk.attention.examples import Example
from fasterqk.attention.huggingface.causal import HuggingFaceCausal
from fasterqk.attention.huggingface.classifier import HuggingFaceClassifier
from fasterqk.attention.huggingface.encode import encode_for_causal, encode_for_classifier
from fasterqk.attention.instances import Instance
from fasterqk.attention.models import Measurable
from fasterqk.errors import InputError

# Tokenizers without a limit say 1e30, which no tokenizer can count to.
_NO_LIMIT = 2**30
_CAUSAL_ENDINGS = ("ForCausalLM", "LMHeadModel")


class Loaded(NamedTuple):
    """A model ready to be measured, its tokenizer, the longest input it takes, how many tokens it knows."""

    model: Measurable
    tokenizer: Any
    limit: int
    vocabulary: int

    def encode(self, examples: Sequence[Example]) -> list[Instance]:
        """The examples as this model reads them."""
        if self.model.classes:
            instances = encode_for_classifier(examples, self.tokenizer, self.model.classes, self.limit)
        else:
            instances = encode_for_causal(examples, self.tokenizer, self.limit)
        for example, instance in zip(examples, instances, strict=True):
            highest = max(int(ids.max()) for ids in (instance.tokens, instance.target) if ids is not None)
            if highest >= self.vocabulary:
                raise InputError(
                    f"{example.where}: the tokenizer gives token {highest}, but the model knows"
                    f" {self.vocabulary}; tokenizer and model do not belong together"
                )
        return instances


def load_model(folder: str | PathLike[str]) -> Loaded:
    """The sequence classifier or causal model saved in ``folder``; other heads are refused.

    Nothing is downloaded and no code of the folder is run.
    """
    try:
        import transformers
    except ImportError:
        raise InputError("measuring needs transformers: pip install 'fasterqk[hf]'") from None
    path = Path(folder)
    if not (path / "config.json").is_file():
        raise InputError(f"{str(folder)!r} is no model folder: it has no config.json")
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    config = _opened(transformers.AutoConfig, path)
    architecture = (config.architectures or ["a model that names no architecture"])[0]
    if config.is_encoder_decoder or not architecture.endswith(
        ("ForSequenceClassification", *_CAUSAL_ENDINGS)
    ):
        raise InputError(
            f"{str(folder)!r} holds {architecture}; only sequence classifiers and causal language models,"
            " without an encoder-decoder, can be measured"
        )
    causal = architecture.endswith(_CAUSAL_ENDINGS)
    kind = transformers.AutoModelForCausalLM if causal else transformers.AutoModelForSequenceClassification
    model, report = _opened(kind, path, output_loading_info=True)
    if report["missing_keys"]:
        raise InputError(
            f"{str(folder)!r} lacks {len(report['missing_keys'])} weights of {architecture}, such as"
            f" {sorted(report['missing_keys'])[0]!r}; they would be random"
        )
    tokenizer = _opened(transformers.AutoTokenizer, path)
    wrapped: Measurable = HuggingFaceCausal(model) if causal else HuggingFaceClassifier(model)
    vocabulary = model.get_input_embeddings().num_embeddings
    return Loaded(wrapped, tokenizer, longest_input(model, tokenizer), vocabulary)


def longest_input(model: Any, tokenizer: Any) -> int:
    """How many tokens the model takes, from its positions and its tokenizer."""
    limits = [tokenizer.model_max_length]
    positions = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if positions is not None and positions > 0:  # XLNet says -1 for "no limit"
        limits.append(positions)
    for name, module in model.named_modules():
        # RoBERTa and its kin count positions from behind the padding id.
        if name.endswith("position_embeddings") and getattr(module, "padding_idx", None) is not None:
            limits.append(module.num_embeddings - module.padding_idx - 1)
    return int(min(*limits, _NO_LIMIT))


def _opened(kind: Any, path: Path, **options: Any) -> Any:
    try:
        return kind.from_pretrained(str(path), local_files_only=True, **options)
    except Exception as error:  # transformers raises nearly every kind for a damaged folder
        reason = " ".join(str(error).split())[:200]
        raise InputError(f"cannot open {kind.__name__} from {str(path)!r}: {reason}") from None
