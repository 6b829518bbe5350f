from slime.observability.console import progress_snapshot, start_progress


def test_snapshot_follows_the_task():
    assert progress_snapshot() is None
    with start_progress("rollout 3", 8) as progress:
        progress.advance()
        progress.advance(3)
        assert progress_snapshot() == ("rollout 3", 4, 8)
    assert progress_snapshot() is None


def test_a_new_task_replaces_the_old_one():
    first = start_progress("first", 2)
    second = start_progress("second", 5)
    first.close()
    assert progress_snapshot() == ("second", 0, 5)
    second.close()
    assert progress_snapshot() is None
