"""Every parameter of every architecture gets the label written down by hand, and the probe agrees."""

import pytest

from fasterqk.circuits import find_circuits

from .zoo import ZOO


@pytest.mark.parametrize("name", ZOO)
def test_labels_are_right_and_verified(name: str) -> None:
    architecture = ZOO[name]
    model = architecture.build()
    circuits = find_circuits(model, **architecture.find)
    found: dict[str, list[tuple[int | None, int | None, int | None, str]]] = {}
    for piece in circuits:
        found.setdefault(piece.parameter, []).append((piece.axis, piece.start, piece.stop, piece.role))
    parameters = dict(model.named_parameters())
    assert list(found) == list(parameters)
    expected = {name: architecture.expected(name, tuple(value.shape)) for name, value in parameters.items()}
    assert found == expected
    assert sum(piece.numel for piece in circuits) == sum(value.numel() for value in parameters.values())
    # The probe saw every weight of the two circuits.
    unseen = [
        piece.parameter
        for piece in circuits
        if piece.circuit in ("qk", "ov")
        and "probe" not in piece.decided_by
        and "relative" not in piece.parameter
    ]
    assert unseen == []
