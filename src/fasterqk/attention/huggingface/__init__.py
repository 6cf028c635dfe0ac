"""Hugging Face models and tokenizers, ready to be measured; needs transformers."""

from fasterqk.attention.huggingface.causal import HuggingFaceCausal
from fasterqk.attention.huggingface.classifier import HuggingFaceClassifier
from fasterqk.attention.huggingface.encode import encode_for_causal, encode_for_classifier
from fasterqk.attention.huggingface.load import Loaded, load_model

__all__ = [
    "HuggingFaceCausal",
    "HuggingFaceClassifier",
    "Loaded",
    "encode_for_causal",
    "encode_for_classifier",
    "load_model",
]
