"""The paper's transformers, quick and exact; `benchmarks/_plain.py` has them as anybody would write them."""

from fasterqk_lab.models._classifier import Classifier, ClassifierConfig, Embedding
from fasterqk_lab.models._generator import GeneratorConfig, GPTAnswerGenerator

__all__ = [
    "Classifier",
    "ClassifierConfig",
    "Embedding",
    "GPTAnswerGenerator",
    "GeneratorConfig",
]
