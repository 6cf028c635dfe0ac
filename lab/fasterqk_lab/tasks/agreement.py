"""A generated language of subject-verb agreement: is the next verb singular or plural?

A sentence ends before its verb. It has an optional opening adverb, the subject, and up to three modifiers,
each with a noun that may differ from the subject in number (an *attractor*):

    often , the old actors near the bridge that my doctor praised ...

Only nouns show number (determiners and past-tense verbs do not), and only the subject decides, so its noun is
exactly the relevant token. The sample is the same for all seeds.
"""

from pathlib import Path
from random import Random

import numpy as np

from fasterqk_lab.tasks._registry import ClassificationTask, LabelledInstance, LabelledInstances

FORMS = ("prefix",)
NEEDS = ()
COUNTS = {"train": 10_000, "validation": 1_000, "test": 2_000}
CLASSES = ("singular", "plural")
SAMPLE_SEED = 20_260
# Probabilities of a singular subject, an opening adverb, an adjective before a noun, a modifier's noun with
# the other number, and 0 to 3 modifiers.
SINGULAR, OPENING, ADJECTIVE, OTHER_NUMBER = 0.6, 0.4, 0.3, 0.5
MODIFIERS = (0.2, 0.35, 0.3, 0.15)


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


NOUNS = _words("""
    actor artist author baker banker barber boxer builder butcher captain carpenter chef clerk coach cook
    dancer dentist doctor driver editor engineer farmer fisher gardener guard hunter inventor janitor judge
    lawyer librarian manager mayor mechanic merchant miner nurse officer painter pilot plumber poet porter
    producer runner sailor scholar sculptor senator sergeant singer skater soldier student surgeon surveyor
    tailor teacher tourist trader tutor waiter weaver writer bridge cabinet camera candle carpet castle
    garden guitar island kettle ladder lantern mirror pencil picture tunnel
""")
# Past tense: singular and plural are equal.
VERBS = _words("""
    admired advised avoided blamed called chased cheered copied envied feared followed found greeted helped
    hired ignored invited joined knew liked met missed noticed observed painted passed praised pushed
    remembered respected saw sketched studied thanked trusted visited warned watched welcomed
""")
ADJECTIVES = _words("""
    ancient angry brave bright calm careful clever cold curious dark eager famous fierce gentle happy
    honest humble lazy little lonely loud modern nervous noisy old patient polite proud quiet quick red shy
    silent small strange tall tired warm wise young
""")
PREPOSITIONS = _words("""
    above across against around before behind below beneath beside by near opposite under with
""")
OPENERS = _words("""
    today yesterday often sometimes usually perhaps surprisingly apparently recently finally meanwhile
    naturally luckily oddly
""")
DETERMINERS = _words("the my your his her our their")
PAD, COMMA, RELATIVE = "[PAD]", ",", "that"
VOCABULARY = (PAD, COMMA, RELATIVE, *DETERMINERS, *PREPOSITIONS, *OPENERS, *ADJECTIVES, *VERBS)
VOCABULARY += (*NOUNS, *(f"{noun}s" for noun in NOUNS))


def load(form: str, file: str, folder: Path) -> ClassificationTask:
    """The task; reads no files."""
    generator = Random(SAMPLE_SEED)
    ids = {word: index for index, word in enumerate(VOCABULARY)}
    sentences: set[tuple[str, ...]] = set()  # no sentence is in two splits

    def draw(split: str, number: int) -> LabelledInstance:
        words, subject, label, attractors = draw_sentence(generator)
        while tuple(words) in sentences:
            words, subject, label, attractors = draw_sentence(generator)
        sentences.add(tuple(words))
        relevance = (np.arange(len(words)) == subject).astype(float)
        tokens, groups = np.array([ids[word] for word in words]), {"attractors": attractors}
        return LabelledInstance(f"{split}-{number}", tokens, label, relevance, groups)

    instances = ((split, draw(split, number)) for split in COUNTS for number in range(COUNTS[split]))
    splits = LabelledInstances.by_split(instances)
    return ClassificationTask(name="agreement", splits=splits, classes=CLASSES, vocabulary=VOCABULARY)


def draw_sentence(generator: Random) -> tuple[list[str], int, int, int]:
    """One sentence up to its verb: words, position of the subject, its number (1 = plural), attractors.

    >>> sentence, subject, number, attractors = draw_sentence(Random(1))
    >>> sentence[subject].endswith("s") == (number == 1)
    True
    """
    number = int(generator.random() >= SINGULAR)
    sentence = []
    if generator.random() < OPENING:
        sentence += [generator.choice(OPENERS), COMMA]
    sentence += _noun_phrase(generator, number)
    subject = len(sentence) - 1
    attractors = 0
    for _ in range(generator.choices(range(len(MODIFIERS)), MODIFIERS)[0]):
        other = generator.random() < OTHER_NUMBER
        attractors += int(other)
        sentence += _modifier(generator, 1 - number if other else number)
    return sentence, subject, number, attractors


def _modifier(generator: Random, number: int) -> list[str]:
    """ "near the bridge", "that met the nurses" or "that the nurses met", with a noun of that number."""
    phrase = _noun_phrase(generator, number)
    kind = generator.randrange(3)
    if kind == 0:
        return [generator.choice(PREPOSITIONS), *phrase]
    verb = generator.choice(VERBS)
    return [RELATIVE, verb, *phrase] if kind == 1 else [RELATIVE, *phrase, verb]


def _noun_phrase(generator: Random, number: int) -> list[str]:
    adjective = [generator.choice(ADJECTIVES)] if generator.random() < ADJECTIVE else []
    noun = generator.choice(NOUNS) + ("s" if number else "")
    return [generator.choice(DETERMINERS), *adjective, noun]
