"""The paper's transformers, quick and exact, with a plain reference beside them."""

from fasterqk.lab.models._classifier import Classifier, ClassifierConfig, Embedding
from fasterqk.lab.models._plain import PlainClassifier

__all__ = ["Classifier", "ClassifierConfig", "Embedding", "PlainClassifier"]
