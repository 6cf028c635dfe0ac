"""What the tables of two arms say about their setting."""

from fasterqk_lab.experiments._arm_tables import describe
from fasterqk_lab.experiments._arms import BASELINE, FASTER


def test_what_else_differs_between_the_arms_is_said():
    arms = {
        BASELINE: {"qk_ratio": 1.0, "lr": 5e-4, "epochs": 70},
        FASTER: {"qk_ratio": 20.0, "lr": 5e-5, "epochs": 100},
    }
    summary = {"experiment": "t", "protocol": "released", "seeds": [1], "epochs": 70, "arms": arms}
    assert describe(summary) == (
        "t, protocol released: 70 epochs, 1 seed, QK learning rate times 20, base rate 5e-05 instead of "
        "0.0005, 100 epochs in the faster arm"
    )
