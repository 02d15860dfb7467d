"""sentence-transformers' trainers with one line more."""

from __future__ import annotations

import pytest

from tests.frameworks.conftest import TRL, assert_same, drawn


@pytest.mark.parametrize(
    ("loss", "arguments"),
    [
        ("softmax", {"batch_sampler": "batch_sampler"}),
        ("summed", {"batch_sampler": "no_duplicates"}),
    ],
)
def test_a_loss_that_holds_weights_and_sums_resumes_bit_equal(lives, loss, arguments):
    trainer = lives("sentence.py", *TRL)
    plain = trainer.undisturbed(loss=loss, arguments=arguments)
    kept, output = trainer.kept(
        loss=loss, arguments=arguments, kill=drawn(range(2, 10), range(11, 19))
    )
    assert "restored step" in output
    assert "is in no step" not in output
    assert_same(plain, kept, kills=2)
