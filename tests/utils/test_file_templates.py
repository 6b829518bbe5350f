from slime.utils.files import existing_files


def test_files_in_the_order_of_their_ids(tmp_path):
    directory = tmp_path / "with [brackets]"
    directory.mkdir()
    for name in ("10.pt", "9.pt", "eval_2.pt", "3.txt"):
        (directory / name).touch()
    (directory / "4.pt").mkdir()
    names = [path.rsplit("/", 1)[1] for path in existing_files(str(directory / "{rollout_id}.pt"))]
    assert names == ["9.pt", "10.pt", "eval_2.pt"]


def test_templates_that_take_numbers_only_match_nothing(tmp_path):
    assert existing_files(str(tmp_path / "{rollout_id:04d}.pt")) == []
    assert existing_files(str(tmp_path / "{step}.pt")) == []
