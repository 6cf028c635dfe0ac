"""Certify the labels: every model of a library is labelled or refused, and its labels are perturbed.

``survey`` runs over the models of a library, ``libraries`` lists and builds them, ``perturbation`` is a
second opinion on labels, ``page`` writes the counts. ``results`` has the published outcomes, one line per
model.

    python -m tools.survey timm --only 'vit_*' --out vit.jsonl
"""
