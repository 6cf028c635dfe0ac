"""The paper's transformers, quick and exact, with a plain reference beside them."""

from fasterqk.models.classifier import Classifier, ClassifierConfig
from fasterqk.models.embedding import Embedding
from fasterqk.models.plain import PlainClassifier

__all__ = ["Classifier", "ClassifierConfig", "Embedding", "PlainClassifier"]
