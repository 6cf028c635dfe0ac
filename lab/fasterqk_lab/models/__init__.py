"""Fast, exact implementations of the paper's transformers; `benchmarks/training.py` has the plain ones."""

from fasterqk_lab.models._classifier import Classifier as Classifier
from fasterqk_lab.models._classifier import ClassifierConfig as ClassifierConfig
from fasterqk_lab.models._classifier import Embedding as Embedding
from fasterqk_lab.models._generator import GeneratorConfig as GeneratorConfig
from fasterqk_lab.models._generator import GPTAnswerGenerator as GPTAnswerGenerator
