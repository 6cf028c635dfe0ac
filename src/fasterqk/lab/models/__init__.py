"""The paper's transformers, quick and exact, with a plain reference beside them."""

from fasterqk.lab.models._classifier import Classifier, ClassifierConfig, Embedding
from fasterqk.lab.models._generator import GeneratorConfig, GPTAnswerGenerator
from fasterqk.lab.models._plain import PlainClassifier, PlainGenerator

__all__ = [
    "Classifier",
    "ClassifierConfig",
    "Embedding",
    "GPTAnswerGenerator",
    "GeneratorConfig",
    "PlainClassifier",
    "PlainGenerator",
]
