"""What cannot be brought into this world is refused on every rank, before anything is changed."""

from __future__ import annotations


def test_a_different_model_is_refused_with_all_differences_and_is_not_changed(run_of):
    run = run_of()
    run.save("fsdp", 2)
    for answer in run.restore("plain", 1, misfit=True):
        assert "MismatchError" in answer["error"]
        assert "model.stray: float32[2] here, missing in the checkpoint" in answer["error"]
        assert answer["changed"] == []


def test_a_saved_tensor_that_no_rank_has_is_refused_by_name(run_of):
    """A pipeline's stage does not miss the others' tensors, but all of them together must."""
    run = run_of()
    run.save("plain", 1)
    for answer in run.restore("stages", 2, short=True):
        assert "model.large: in the checkpoint, missing here" in answer["error"]
        assert "model.p1" not in answer["error"]
        assert answer["changed"] == []


def test_a_restore_at_another_world_size_with_a_missing_shard_is_refused(run_of, sidecar):
    run = run_of()
    run.save("fsdp", 2)
    [shard] = sidecar.root.glob("0*/rank-00001-of-00002.safetensors")
    shard.unlink()
    run.lose_memory()
    for answer in run.restore("plain", 1):
        assert answer["error"].startswith(("RestoreError", "WorldChangedError", "NothingCommon"))
        assert answer["changed"] == []


def shards(sidecar, step):
    [directory] = sidecar.root.glob(f"0*-{step:09d}")
    return directory, sorted(directory.glob("rank-*.safetensors"))


def test_a_shard_of_another_epoch_in_a_steps_directory_is_refused_and_kept(run_of, sidecar):
    run = run_of()
    older = run.save("fsdp", 2)
    newer = run.save("fsdp", 2, step=older + 1, scale=2)
    _, (_, old) = shards(sidecar, older)
    _, (_, new) = shards(sidecar, newer)
    mixed = old.read_bytes()
    new.unlink()  # a file of its own: what is committed may be linked elsewhere
    new.write_bytes(mixed)
    run.lose_memory()
    for answer in run.restore("plain", 1):
        assert (answer["step"], answer["wrong"]) == (older, [])
    assert str(new) in sidecar.text(), "the culprit is named"
    kept = [path for path in sidecar.volume.rglob("*") if path.is_file()]
    assert any(path.read_bytes() == mixed for path in kept if path != old), "nothing is deleted"


def test_a_foreign_file_in_a_step_directory_is_neither_read_nor_moved(run_of, sidecar):
    run = run_of()
    step = run.save("fsdp", 2)
    directory, (first, _) = shards(sidecar, step)
    foreign = directory / "model.safetensors"
    foreign.write_bytes(first.read_bytes())
    stray = directory / "rank-00000-of-00003.safetensors"
    stray.write_bytes(first.read_bytes())
    run.lose_memory()
    for answer in run.restore("plain", 1):
        assert (answer["step"], answer["wrong"]) == (step, [])
    assert f"{stray}: holds rank 0 of 2, not rank 0 of 3" in sidecar.text()
    assert list(sidecar.volume.rglob("*rank-00000-of-00003.foreign*")), "kept, under another name"
    assert foreign.exists()
    assert str(foreign) in sidecar.text()
