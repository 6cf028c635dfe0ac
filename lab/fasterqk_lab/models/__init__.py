"""The paper's transformers, quick and exact; `benchmarks/training.py` has them written plainly."""

from fasterqk_lab.models._classifier import Classifier as Classifier
from fasterqk_lab.models._classifier import ClassifierConfig as ClassifierConfig
from fasterqk_lab.models._classifier import Embedding as Embedding
from fasterqk_lab.models._generator import GeneratorConfig as GeneratorConfig
from fasterqk_lab.models._generator import GPTAnswerGenerator as GPTAnswerGenerator
