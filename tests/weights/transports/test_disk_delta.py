"""What the sources of a delta publish, and what hosts of engines make of it."""

import errno
import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file

from slime.utils.errors import RunError
from slime.weights import local_checkpoint
from slime.weights.local_checkpoint import LocalCheckpoint
from slime.weights.source import WeightSource
from slime.weights.transports import disk_delta, transport_of
from slime.weights.transports.disk_delta import DiskDeltaTransport
from slime.weights.transports.transport import Delta

NAMES = ("a", "b", "c", "d")


def checkpoint(dtype=torch.bfloat16):
    generator = torch.Generator().manual_seed(0)
    tensors = {name: torch.randn(8, 4, generator=generator).to(dtype) for name in NAMES}
    return {**tensors, "scalar": torch.tensor(2.0), "unpushed": torch.arange(3)}


@pytest.fixture
def args(tmp_path):
    hf = tmp_path / "hf"
    hf.mkdir()
    (hf / "config.json").write_text("{}")
    save_file(checkpoint(), hf / "model.safetensors")
    return SimpleNamespace(
        hf_checkpoint=str(hf), update_weight_transport="disk", update_weight_mode="delta", colocate=False,
        update_weight_disk_dir=str(tmp_path / "pushes"), update_weight_disk_keep_files=False, release_train=False,
        update_weight_delta_encoding="xor", update_weight_delta_checksum="xxh3-128",
        update_weight_local_checkpoint_dir=str(tmp_path / "local"), distributed_timeout_minutes=1,
    )  # fmt: skip


class Run:
    """A trainer of `num_sources` sources, and a host. `weights`: those of the trainer, by default the checkpoint's."""

    def __init__(self, args, num_sources=2, weights=None):
        self.args, self.directory = args, args.update_weight_disk_dir
        self.weights = weights or {name: tensor for name, tensor in checkpoint().items() if name != "unpushed"}
        self.sources = [
            WeightSource(
                lambda index=index: self.buckets(index, num_sources), transport_of(args)(args, index, num_sources)
            )
            for index in range(num_sources)
        ]
        self.host = host_of(args)

    def buckets(self, index, num_sources):
        for name in list(self.weights)[index::num_sources]:
            yield [(name, self.weights[name])]

    def change(self, name, index=0):
        """Another value in one place of a tensor."""
        self.weights[name] = self.weights[name].clone()
        self.weights[name].view(-1)[index] += 1

    def send(self, version, whole=False):
        deltas = [source.send(version, whole).delta for source in self.sources]
        return Delta(*(sum(getattr(delta, name) for delta in deltas) for name in ("changed_bytes", "wire_bytes")))

    def settle(self):
        for source in self.sources:
            source.settle()

    def published(self, version):
        return transport_of(self.args).directory(self.args, version)

    def push(self, version, whole=False):
        delta = self.send(version, whole)
        assert self.host.bring_to(self.published(version)) is None
        self.settle()
        return delta

    def assert_on(self, args=None):
        local = loaded((args or self.args).update_weight_local_checkpoint_dir)
        assert {name: local[name] for name in self.weights}.keys() == self.weights.keys()
        for name, tensor in self.weights.items():
            assert local[name].dtype == tensor.dtype and local[name].equal(tensor), name


def host_of(args, timeout=5.0):
    return LocalCheckpoint(args.update_weight_local_checkpoint_dir, args.hf_checkpoint, timeout)


def loaded(directory):
    return {name: tensor for path in Path(directory).glob("*.safetensors") for name, tensor in load_file(path).items()}


@pytest.fixture(params=["xor", "overwrite"])
def run(args, request):
    args.update_weight_delta_encoding = request.param
    return Run(args)


def test_the_way_of_the_weights_is_chosen_by_mode(args):
    assert transport_of(args) is DiskDeltaTransport
    assert DiskDeltaTransport.fetching_order(args, 3) == (
        "fetch_weights",
        f"{args.update_weight_disk_dir}/weight_v000003",
    )
    assert DiskDeltaTransport.placing_order(args, 3) == (
        "update_weights_from_disk", args.update_weight_local_checkpoint_dir, "3",
    )  # fmt: skip


def test_only_what_changed_travels(run, tmp_path):
    run.change("a")
    first = run.push(1)
    run.assert_on()
    assert loaded(run.args.update_weight_local_checkpoint_dir)["unpushed"].equal(torch.arange(3))
    assert (tmp_path / "local" / "config.json").is_file()
    run.change("b", 5)
    run.change("scalar")
    second = run.push(2)
    run.assert_on()
    assert 1 <= first.changed_bytes <= 2 and 2 <= second.changed_bytes <= 6
    index = json.loads((run.published(2) / "model.safetensors.index.json").read_text())
    assert sorted(index["weight_map"]) == ["b", "scalar"]
    metadata = index["metadata"]
    assert (metadata["version"], metadata["base_version"]) == (2, 1)
    assert metadata["delta_encoding"] == run.args.update_weight_delta_encoding
    assert (metadata["compression_format"], metadata["checksum_format"]) == ("zstd", "xxh3-128")
    assert second.wire_bytes == sum(tensor.nbytes for tensor in loaded(run.published(2)).values())


def test_a_push_that_changes_nothing_is_published_too(run):
    assert run.push(1) == Delta(0, 0)
    run.assert_on()
    assert run.push(2) == Delta(0, 0)
    run.change("a")
    run.push(3)
    run.assert_on()


def test_s4_a_resumed_run_takes_hosts_from_the_checkpoint_to_its_weights(run):
    for name in NAMES:
        run.change(name)
    run.push(41)
    run.assert_on()
    resumed = Run(run.args)
    resumed.weights = {name: tensor + 1 for name, tensor in run.weights.items()}
    resumed.host = run.host
    resumed.push(42)
    resumed.assert_on()
    assert [path.name for path in sorted(run.published(42).parent.glob("weight_v*"))] == ["weight_v000042"]


def test_a_host_that_comes_late_is_led_through_all_of_it(run, tmp_path):
    for version, name in enumerate(NAMES, 1):
        run.change(name)
        run.push(version)
    late = SimpleNamespace(**{**vars(run.args), "update_weight_local_checkpoint_dir": str(tmp_path / "late")})
    # Its engine gets the last push again.
    assert run.send(4) == Delta(0, 0)
    assert host_of(late).bring_to(run.published(4)) is None
    run.assert_on(late)
    run.settle()
    run.change("a", 3)
    run.push(5)
    assert host_of(late).bring_to(run.published(5)) is None
    run.assert_on(late)


def test_s9_a_delta_is_applied_once_and_only_to_its_base(run, tmp_path):
    run.change("a")
    run.push(1)
    run.change("a", 1)
    run.push(2)
    assert run.host.bring_to(run.published(2)) is None, "a second engine of the host"
    run.assert_on()
    # A host that missed a push is led through both.
    other = SimpleNamespace(**{**vars(run.args), "update_weight_local_checkpoint_dir": str(tmp_path / "other")})
    host = host_of(other)
    assert host.bring_to(run.published(1)) is None
    run.change("a", 2)
    run.push(3)
    assert host.bring_to(run.published(3)) is None
    run.assert_on(other)


def test_a_whole_publication_ends_what_came_before(run, tmp_path):
    run.change("a")
    run.push(1)
    run.change("b")
    delta = run.push(2, whole=True)
    total = sum(tensor.nbytes for tensor in run.weights.values())
    assert delta == Delta(total, total)
    assert [path.name for path in sorted(run.published(2).parent.glob("weight_v*"))] == ["weight_v000002"]
    run.change("c")
    assert run.push(3).changed_bytes <= 2
    run.assert_on()
    late = SimpleNamespace(**{**vars(run.args), "update_weight_local_checkpoint_dir": str(tmp_path / "late")})
    assert host_of(late).bring_to(run.published(3)) is None
    run.assert_on(late)


def test_weights_that_change_in_place_are_compared_with_what_engines_have(run):
    """As an optimizer changes them: what a publication of all tensors remembers of them is in other memory."""
    run.push(1, whole=True)
    for version in (2, 3):
        run.weights["a"].view(-1)[5] += 1
        assert 1 <= run.push(version).changed_bytes <= 2
        run.assert_on()


def test_everything_is_kept_where_asked_for(run):
    run.args.update_weight_disk_keep_files = True
    run.push(1)
    run.push(2, whole=True)
    assert len(list(run.published(1).parent.glob("weight_v*"))) == 2


def lose_the_base(run):
    shutil.rmtree(run.published(1))
    (run.published(2).parent.parent / "local" / ".slime-state.json").unlink()


def spoil_the_stream(run):
    (path,) = run.published(2).glob("*.safetensors")
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def spoil_the_digest(run):
    (path,) = run.published(2).glob("*.safetensors")
    data = path.read_bytes()
    at = data.index(b"digest") + 14
    path.write_bytes(data[:at] + (b"0" if data[at : at + 1] != b"0" else b"1") + data[at + 1 :])


def take_a_file_away(run):
    (path,) = run.published(2).glob("*.safetensors")
    path.unlink()


def cut_a_file(run):
    (path,) = run.published(2).glob("*.safetensors")
    path.write_bytes(path.read_bytes()[:-1])


@pytest.mark.parametrize("spoil", [lose_the_base, spoil_the_stream, spoil_the_digest, take_a_file_away, cut_a_file])
def test_what_is_damaged_or_gone_is_asked_for_whole_and_never_loaded(run, spoil):
    run.change("a")
    run.push(1)
    run.change("b")
    run.send(2)
    spoil(run)
    assert isinstance(run.host.bring_to(run.published(2)), str)
    assert run.send(2, whole=True).wire_bytes == sum(tensor.nbytes for tensor in run.weights.values())
    assert run.host.bring_to(run.published(2)) is None
    run.assert_on()
    run.settle()
    run.change("c")
    assert run.push(3).changed_bytes <= 2
    run.assert_on()


def test_other_bytes_on_the_host_than_the_trainer_has_are_found(run, tmp_path):
    run.change("a")
    run.push(1)
    (path,) = (tmp_path / "local").glob("*.safetensors")
    data = bytearray(path.read_bytes())
    at = bytes(data).index(run.weights["b"].view(torch.uint8).numpy().tobytes())
    data[at + 3] ^= 4
    path.write_bytes(data)
    run.change("b")
    run.push(2)
    # It was built anew.
    run.assert_on()


def test_a_host_killed_while_it_patches_builds_anew(run, monkeypatch):
    run.change("a")
    run.push(1)
    for name in NAMES:
        run.change(name)
    run.send(2)
    patch_tensor, done = local_checkpoint._patch_tensor, []

    def dies(*arguments):
        if len(done) >= 2:
            raise KeyboardInterrupt
        done.append(patch_tensor(*arguments))

    with monkeypatch.context() as killed:
        killed.setattr(local_checkpoint, "_patch_tensor", dies)
        with pytest.raises(KeyboardInterrupt):
            run.host.bring_to(run.published(2))
    assert host_of(run.args).bring_to(run.published(2)) is None
    run.assert_on()


def test_a_push_that_failed_is_followed_by_one_of_all_tensors(run, tmp_path, monkeypatch):
    run.change("a")
    run.push(1)
    run.change("b")

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    # The first source has sent, the second one cannot.
    run.sources[0].send(2)
    with monkeypatch.context() as disk:
        disk.setattr(disk_delta, "write_shard", full)
        with pytest.raises(RunError, match="No space left on device"):
            run.sources[1].send(2)
    assert not list((tmp_path / "pushes").glob("*weight_v000002"))
    total = sum(tensor.nbytes for tensor in run.weights.values())
    assert run.push(2) == Delta(total, total)
    run.assert_on()


def test_a_checkpoint_in_another_dtype_is_replaced_whole(run):
    run.weights = {name: tensor.float() for name, tensor in run.weights.items()}
    run.send(1)
    assert run.host.bring_to(run.published(1)) is not None
    run.send(1, whole=True)
    assert run.host.bring_to(run.published(1)) is None
    run.assert_on()
    run.settle()
    run.change("a")
    assert run.push(2).changed_bytes <= 4
    run.assert_on()


def test_a_checkpoint_without_weights_is_followed_by_a_whole_publication(run):
    Path(run.args.hf_checkpoint, "model.safetensors").unlink()
    run.send(1)
    assert isinstance(run.host.bring_to(run.published(1)), str)
    run.push(1, whole=True)
    run.change("a")
    assert run.push(2).changed_bytes <= 2
    run.assert_on()


@pytest.mark.parametrize("is_exchanged", [True, False])
def test_deltas_change_single_experts_of_a_checkpoint_that_stacks_them(args, is_exchanged):
    hf, layer = Path(args.hf_checkpoint), "layers.0.mlp.experts"
    config = {"model_type": "qwen3_vl_moe", "text_config": {"hidden_size": 4, "num_experts": 2}}
    (hf / "config.json").write_text(json.dumps(config))
    parts = {"gate": torch.randn(2, 3, 4), "up": torch.randn(2, 3, 4), "down": torch.randn(2, 4, 3)}
    whole = {"gate_up_proj": torch.cat([parts["gate"], parts["up"]], dim=1), "down_proj": parts["down"]}
    stored = {f"{layer}.{name}": stack.mT.contiguous() if is_exchanged else stack for name, stack in whole.items()}
    save_file({**checkpoint(), **stored}, hf / "model.safetensors")
    experts = {f"{layer}.{expert}.{part}_proj.weight": parts[part][expert] for part in parts for expert in range(2)}
    run = Run(args, weights={**checkpoint(), **experts})
    run.change(f"{layer}.1.up_proj.weight", 5)
    assert run.push(1).changed_bytes <= 4
    run.assert_on()
    assert loaded(args.update_weight_local_checkpoint_dir).keys() == run.weights.keys()
    run.change(f"{layer}.0.down_proj.weight", 7)
    assert run.push(2).changed_bytes <= 4
    run.assert_on()
