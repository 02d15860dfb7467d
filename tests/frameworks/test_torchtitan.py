"""torchtitan's Trainer with one line more: killed where it hurts, it ends as if nothing was."""

from __future__ import annotations

import pytest

from tests.frameworks.conftest import Lives, assert_same, losses, result
from tests.frameworks.test_transformers import drawn


@pytest.fixture
def titan(lives) -> Lives:
    return lives("titan.py", "tests.frameworks.titan_on_cpu", "torchtitan.models.qwen3")


def test_two_kills_change_nothing_and_a_complete_run_is_not_trained_again(titan):
    plain = titan.undisturbed(ranks=2)
    kept, output = titan.kept(ranks=2, kill=drawn(range(2, 10), range(10, 21)))
    assert "restored step" in output
    assert_same(plain, kept, kills=2, ranks=2)
    written = [path.name for path in (kept / "titan" / "checkpoint").iterdir()]
    assert written == ["step-20"], "by torchtitan, for others to read"
    again, output = titan.kept(ranks=2, out="again", checkpoint={"load_step": 3})
    assert not (again / "losses-0").exists()
    assert result(again)["weights"] == result(plain)["weights"]
    assert "load_step=3 and exclude_from_loading=[] are ignored: this run holds step 20" in output


def test_accumulation_with_loader_workers_resumes_bit_equal(titan):
    options = {"ranks": 2, "workers": 1, "global_batch": 8, "steps": 12}
    plain = titan.undisturbed(**options)
    kept, _ = titan.kept(**options, kill=drawn(range(2, 6), range(6, 13)))
    assert_same(plain, kept, kills=2, ranks=2)
    assert len(next(iter(losses(kept)[2]))) == 2, "two micro-batches a step"


def test_a_run_without_a_step_starts_from_the_checkpoint_that_torchtitan_loads(titan):
    options = {"ranks": 2, "steps": 6}
    own = {"enable": True, "last_save_model_only": False}
    seed = titan.undisturbed(**options, out="seed", checkpoint=own)
    path = {
        "initial_load_path": str(seed / "titan" / "checkpoint" / "step-6"),
        "initial_load_model_only": False,
    }
    plain = titan.undisturbed(ranks=2, steps=12, checkpoint={**own, **path})
    kept, _ = titan.kept(ranks=2, steps=12, checkpoint=path, kill=[9])
    assert min(losses(kept)) == 7
    assert result(kept)["weights"] == result(plain)["weights"]


PIPELINE = {"pipeline_parallel_degree": 2, "pipeline_parallel_schedule": "Interleaved1F1B"}


@pytest.mark.parametrize(
    ("parallelism", "batch", "parts"),
    [
        pytest.param({"tensor_parallel_degree": 2}, 2, 1, id="tensor"),
        pytest.param({"expert_parallel_degree": 2}, 2, 1, id="expert"),
        pytest.param(PIPELINE, 4, 2, id="pipeline"),
    ],
)
def test_tensor_expert_and_pipeline_parallel_models_resume_bit_equal(
    titan, parallelism, batch, parts
):
    """Each of its parts has two optimizers. Where there are several, the adapter is in both
    trainings: without it torchtitan's experts count tokens of memory with any content."""
    options = {"ranks": 2, "steps": 8, "parallelism": parallelism, "batch": batch}
    options["layers"] = 4 if parts > 1 else 1
    plain = titan.undisturbed(**options, bare=parts == 1)
    kept, output = titan.kept(**options, kill=drawn(range(2, 5), range(5, 9)))
    assert "does the training change the model" not in output
    assert_same(plain, kept, kills=2, ranks=2)
    assert result(kept)["divided"] == [parts, 2 * parts]


def test_an_async_mode_is_refused(titan):
    _, output = titan.kept(ranks=2, checkpoint={"async_mode": "async"}, code=1)
    assert "checkpoint.async_mode=async: keepstep copies beside the training" in output
