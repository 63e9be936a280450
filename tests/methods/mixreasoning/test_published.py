"""The paper's numbers that our page quotes, recomputed from its table."""

import pytest

# Mean tokens, thinking and mixed, on AIME24, GPQA-Diamond, MATH-500, GSM8K; Pass@1 likewise.
TOKENS = {
    "DS-R1-7B": ((10893, 6030, 3351, 1214), (8436, 4991, 2187, 765)),
    "Qwen3-8B": ((11975, 8624, 5104, 2403), (8873, 6734, 3483, 1389)),
    "Qwen3-14B": ((12047, 7161, 4659, 1950), (9031, 6225, 3017, 1137)),
    "QwQ-32B": ((11518, 7923, 4508, 1745), (8976, 5783, 3297, 880)),
}
QWEN = ((64.67, 57.32, 92.30, 95.45), (67.33, 57.17, 92.76, 95.88))


def test_savings_reach_from_13_to_49_percent():
    savings = [
        1 - mixed / thinking
        for model in TOKENS.values()
        for thinking, mixed in zip(*model, strict=True)
    ]
    assert min(savings) == pytest.approx(0.131, abs=0.001)  # Qwen3-14B on GPQA
    assert max(savings) == pytest.approx(0.496, abs=0.001)  # QwQ on GSM8K


def test_averages_of_qwen3_8b():
    thinking, mixed = (sum(values) / 4 for values in TOKENS["Qwen3-8B"])
    assert (thinking, mixed) == (7026.5, 5119.75)
    assert 1 - mixed / thinking == pytest.approx(0.271, abs=0.001)  # printed as 28 %
    think, mix = (sum(values) / 4 for values in QWEN)
    assert (think, mix) == pytest.approx((77.435, 78.285))  # printed as 77.44 and 78.29
