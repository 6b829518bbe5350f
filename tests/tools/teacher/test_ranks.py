"""What a rank of the teacher does by itself, with a backend that notes what it is told."""

from types import SimpleNamespace

import torch
import torch.distributed as dist

from slime.arguments.checkpoints import WeightSource
from tools.teacher import ranks
from tools.teacher.ranks import TeacherRank


def test_all_ranks_load_what_rank_0_has_found(tmp_path, monkeypatch):
    """A run that trains may have saved between the looks of two ranks."""
    pointer = tmp_path / "latest_checkpointed_iteration.txt"
    pointer.write_text("3")
    source, loaded, done = WeightSource("megatron", str(tmp_path)), [], []
    backend = SimpleNamespace(place=lambda: None, residents=None, load_weights=loaded.append)
    accelerator = SimpleNamespace(set_device=lambda index: None, keep_freed_memory=lambda: None)
    stubs = {
        "make_backend": lambda args: done.append("backend") or backend, "get_gloo_group": lambda: "all ranks",
        "load_plug_ins": lambda *given: done.append("plug-ins"),
        "ResidentMemory": lambda *given, ends: SimpleNamespace(hold=lambda holds: None),
        "get_accelerator": lambda: accelerator,
    }  # fmt: skip
    for name, stub in stubs.items():
        monkeypatch.setattr(ranks, name, stub)
    monkeypatch.setattr(torch, "set_num_threads", lambda count: None)
    told = []

    def broadcast(objects, src, group):
        assert (src, group) == (0, "all ranks")
        told.append(list(objects))
        objects[:] = told[0]

    monkeypatch.setattr(dist, "broadcast_object_list", broadcast)
    for _ in range(2):
        rank = TeacherRank(
            SimpleNamespace(initial_weights=source), local_rank=0, local_world_size=1, sample_rows=1, label_rows=1
        )
        pointer.write_text("5")
        rank.start()
    assert [source.step for (source,) in told] == [3, 5]
    assert [source.step for source in loaded] == [3, 3]
    # Plug-ins may import what only a backend makes importable.
    assert done == ["backend", "plug-ins"] * 2
