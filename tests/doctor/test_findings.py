"""What is said of facts: which are wrong, which deserve a warning, and that there is something to do about each of them."""

import dataclasses

import pytest

from slime.doctor import findings
from slime.doctor.facts import MODELS, RAY_SESSIONS, Answer, Cluster, Devices, Disk, Machine, Packages
from slime.doctor.findings import GIB, MIB, OK, WARNING, WRONG, Finding

PINS = {"torch": "2.13.0", "sglang": "0.5.21", "numpy": "2.4.1", "six": "1.17.0"}
PACKAGES = Packages(
    (3, 11, 9), "CPU", "requirements/cpu.txt", PINS, ["torch", "sglang"],
    {"torch": "2.13.0+cpu", "sglang": "0.5.21", "numpy": "2.4.1", "six": "1.17.0"},
)  # fmt: skip
MACHINE = Machine(8, None, 32 * GIB, 30 * GIB, None, (16 * GIB, 15 * GIB), 1048576, None)
TORCH = {"version": "2.13.0", "cuda": "12.9", "driver": 12090, "problem": None, "devices": []}
H100 = {"name": "NVIDIA H100", "free": 79 * GIB, "total": 80 * GIB, "problem": None}


def amiss(found) -> list[Finding]:
    """What is not ok of findings; each of these says what to do."""
    listed = [finding for finding in found if finding.level != OK]
    assert all(finding.remedy for finding in listed)
    return listed


def only(found) -> Finding:
    (finding,) = amiss(found)
    return finding


def changed(packages: Packages = PACKAGES, **versions) -> Packages:
    return dataclasses.replace(packages, installed={**packages.installed, **versions})


def test_the_pinned_set_is_ok_whatever_build_of_torch_it_has():
    told = list(findings.about_packages(PACKAGES))
    assert amiss(told) == []
    assert told[-1].text.startswith(
        "4 of 4 packages are those of requirements/cpu.txt; torch 2.13.0+cpu, sglang 0.5.21"
    )


def test_what_is_needed_and_missing_is_wrong_and_what_is_only_pinned_is_a_warning():
    missing, beside = amiss(findings.about_packages(changed(sglang=None, six=None)))
    assert (missing.level, missing.remedy) == (WRONG, "bash scripts/install.sh")
    assert "sglang" in missing.text and "six" not in missing.text
    assert beside.level == WARNING and "six" in beside.text


def test_versions_that_the_code_was_not_written_for_are_named_one_by_one():
    told = list(findings.about_packages(changed(sglang="0.5.22", numpy="2.5.0", six="1.16.0")))
    engine, others = amiss(told)
    assert engine.level == others.level == WARNING
    assert "sglang 0.5.22" in engine.text and engine.remedy == "pip install sglang==0.5.21"
    assert "numpy 2.5.0 (2.4.1), six 1.16.0 (1.17.0)" in others.text
    assert told[-1].text.startswith("1 of 4")


def test_metadata_that_cannot_be_read_is_wrong():
    broken = dataclasses.replace(
        PACKAGES, installed=dict(PACKAGES.installed), unreadable={"numpy": "KeyError: 'Version'"}
    )
    del broken.installed["numpy"]
    assert only(findings.about_packages(broken)).level == WRONG


@pytest.mark.parametrize(
    "python, target, level",
    [((3, 10, 4), "GPU", WRONG), ((3, 12, 1), "CPU", WARNING), ((3, 12, 1), "GPU", OK), ((3, 11, 0), "CPU", OK)],
)
def test_python(python, target, level):
    first = next(findings.about_packages(dataclasses.replace(PACKAGES, python=python, target=target)))
    assert first.level == level and (first.remedy is not None) is (level != OK)


def test_without_the_requirements_nothing_is_compared():
    bare = dataclasses.replace(PACKAGES, pins_file=None, pins={}, installed={"torch": "2.9.0", "sglang": "0.5.1"})
    assert amiss(findings.about_packages(bare)) == []


@pytest.mark.parametrize(
    "answer, level",
    [
        (Answer(None, None, 3.0), OK),
        (Answer(None, "ImportError: libcuda.so.1", 3.0), WRONG),
        (Answer(None, "no answer within 120 seconds", 120.0, timed_out=True), WARNING),
    ],
)
def test_imports(answer, level):
    finding = findings.about_import("sglang", answer)
    assert finding.level == level and (answer.problem or "imports") in finding.text


def devices(present: int, *gpus: dict, **torch) -> Devices:
    return Devices(present, "550.54" if present else None, Answer({**TORCH, "devices": list(gpus), **torch}))


def test_gpus_that_torch_sees():
    told = list(findings.about_devices(devices(2, H100, H100), {}))
    assert amiss(told) == []
    assert "driver 550.54 (CUDA up to 12.9); 2 of 2 GPUs" in told[0].text
    assert told[2].text == "GPU 1: NVIDIA H100, 79.0 of 80.0 GiB free"


def test_memory_that_others_have_and_a_gpu_that_fails():
    used, broken = {**H100, "free": 40 * GIB}, {**H100, "free": 0, "problem": "uncorrectable ECC error"}
    warned, failed = amiss(findings.about_devices(devices(2, used, broken), {}))
    assert (warned.level, failed.level) == (WARNING, WRONG)
    assert "ECC" in failed.text


@pytest.mark.parametrize(
    "found, variables, level",
    [
        (devices(0, cuda=None), {}, OK),
        (devices(0), {}, OK),
        (devices(8, cuda=None), {}, WARNING),
        (devices(8, cuda=None), {"SLIME_ACCELERATOR": "cpu"}, OK),
        (devices(8), {"CUDA_VISIBLE_DEVICES": ""}, WARNING),
        (devices(8, problem="the NVIDIA driver is too old"), {}, WRONG),
    ],
)
def test_torch_without_devices(found, variables, level):
    told = list(findings.about_devices(found, variables))
    assert [finding.level for finding in told] == [level]
    assert (found.torch.value["problem"] or "") in told[0].text


def test_a_torch_that_does_not_import():
    broken = Devices(8, None, Answer(problem="OSError: libtorch_cuda.so: cannot open shared object file"))
    assert only(findings.about_devices(broken, {})).level == WRONG


@pytest.mark.parametrize(
    "change, level",
    [
        ({"cores": 1}, WARNING),
        ({"cores_of_container": 1.5}, WARNING),
        ({"cores_of_container": 4.0}, OK),
        ({"available": 2 * GIB}, WARNING),
        ({"memory_of_container": 3 * GIB}, WARNING),
        ({"shared_memory": None}, WRONG),
        ({"shared_memory": (64 * MIB, 64 * MIB)}, WRONG),
        ({"shared_memory": (512 * MIB, 500 * MIB)}, WARNING),
        ({"open_files": 4096}, WARNING),
        ({"open_files": 8192}, OK),
        ({"open_files": None}, OK),
        ({"processes": 1000}, WARNING),
    ],
)
def test_limits_of_the_machine(change, level):
    assert amiss(findings.about_machine(MACHINE)) == []
    listed = amiss(findings.about_machine(dataclasses.replace(MACHINE, **change)))
    assert [finding.level for finding in listed] == ([] if level == OK else [level])


def test_disks():
    of_ray = {RAY_SESSIONS: "/tmp/ray"}
    good = Disk({"caches": "/home/me/.cache"}, 100 * GIB, 50 * GIB)
    full = Disk(of_ray, 1000 * GIB, 49 * GIB)
    nearly = Disk({"caches": "/home/me/.cache"}, 1000 * GIB, 5 * GIB)
    closed = Disk(of_ray, 100 * GIB, 50 * GIB, {"/tmp/ray": "cannot be written (Permission denied)"})
    assert amiss(findings.about_disks([good])) == []
    assert only(findings.about_disks([full])).level == WRONG
    assert only(findings.about_disks([nearly])).level == WARNING
    assert only(findings.about_disks([closed])).level == WRONG
    shared = Disk({MODELS: "/models"}, 100 * GIB, 50 * GIB, {"/models": "cannot be written (Permission denied)"})
    assert only(findings.about_disks([shared])).level == WARNING
    # Who keeps models there keeps something else there too.
    both = dataclasses.replace(shared, uses={"temporary files": "/models", MODELS: "/models"})
    assert only(findings.about_disks([both])).level == WRONG


RUNNING = Cluster("10.0.0.1:6379", "RAY_ADDRESS", True, Answer({"nodes": 2, "GPU": 16.0, "CPU": 64.0}))


def test_a_port_of_a_head_is_amiss_only_where_no_cluster_runs():
    listeners = {6379: "gcs_server, process 12", 3007: ""}
    taken = only(findings.about_ports(listeners, {}, None))
    assert taken.level == WARNING and "gcs_server, process 12" in taken.text and "RAY_PORT=" in taken.remedy
    assert amiss(findings.about_ports(listeners, {}, RUNNING)) == []
    assert amiss(findings.about_ports(listeners, {"RAY_PORT": "6380"}, None)) == []


def test_ports_of_runs_are_counted_with_who_has_them():
    told = [finding.text for finding in findings.about_ports({3001: "node, process 7", 3007: "", 15001: ""}, {}, None)]
    assert told[2].startswith("ports 3000 to 3999, of routers and their metrics: 2 taken: 3001 (node, process 7)")
    assert "15000 to 15999, of engines: 1 taken" in told[3]


@pytest.mark.parametrize(
    "cluster, level",
    [
        (None, OK),
        (RUNNING, OK),
        (Cluster("auto", "RAY_ADDRESS", None), WRONG),
        (Cluster("10.0.0.1:6379", "RAY_ADDRESS", False, Answer(problem="timed out")), WRONG),
        (Cluster("10.0.0.1:6379", "/tmp/ray/ray_current_cluster", False, Answer(problem="refused")), OK),
        (Cluster("10.0.0.1:6379", "RAY_ADDRESS=auto, /tmp/ray/x", False, Answer(problem="refused")), WRONG),
        (Cluster("10.0.0.1:6379", "RAY_ADDRESS", True, Answer(problem="no answer")), WRONG),
        (Cluster("10.0.0.1:6379", "/tmp/ray/ray_current_cluster", True, Answer(problem="no answer")), WARNING),
        (Cluster("http://10.0.0.1:8265", "RAY_ADDRESS", True), OK),
    ],
)
def test_ray(cluster, level):
    finding = findings.about_cluster(cluster)
    assert finding.level == level and (finding.remedy is not None) is (level != OK)


def test_a_cluster_that_no_variable_names_is_joined_by_one():
    here = dataclasses.replace(RUNNING, source="/tmp/ray/ray_current_cluster")
    assert "nodes: 2, GPUs: 16, CPUs: 64" in findings.about_cluster(here).text
    assert "RAY_ADDRESS=10.0.0.1:6379" in findings.about_cluster(here).text


def test_optional_packages_say_what_they_are_for():
    told = list(findings.about_extras(lambda module: module == "wandb", on_gpus=False))
    assert told[0].text == "here: wandb" and {finding.level for finding in told} == {OK}
    assert any("e2b" in finding.text and "pip install e2b" in finding.remedy for finding in told)
    assert not any("flash_attn" in finding.text for finding in told)


def test_what_makes_gpus_fast_is_a_warning_there():
    warned = amiss(findings.about_extras(lambda module: False, on_gpus=True))
    assert [finding.text.split()[0] for finding in warned] == ["transformer_engine", "flash_attn", "torch_memory_saver"]
    assert {finding.level for finding in warned} == {WARNING}


def test_flash_attn_3_is_told_beside_flash_attn_and_missed_by_nobody():
    told = list(findings.about_extras(lambda module: module.startswith("flash_attn"), on_gpus=True))
    assert told[0].text == "here: flash_attn, flash_attn_interface, flash_attn_3.flash_attn_interface"
    # Alone it is as fast.
    told = list(findings.about_extras(lambda module: module == "flash_attn_interface", on_gpus=True))
    assert told[0].text == "here: flash_attn_interface"
    assert not any("flash_attn" in finding.text for finding in amiss(told))
    without = [finding for finding in findings.about_extras(lambda module: False, on_gpus=True) if finding.level == OK]
    assert sum("flash-attn-3" in finding.text for finding in without) == 2


def test_variables_show_no_secret():
    variables = {
        "WANDB_API_KEY": "f00dbeef", "HF_TOKEN": "", "RAY_ADDRESS": "http://me:hunter2@10.0.0.1:8265", "OMP_NUM_THREADS": "4",
    }  # fmt: skip
    told = list(findings.about_variables(variables, [], []))
    text = " ".join(finding.text for finding in told)
    assert "f00dbeef" not in text and "hunter2" not in text
    assert "OMP_NUM_THREADS=4" in text and "WANDB_API_KEY set" in text and "HF_TOKEN not set" in text


def test_names_that_are_nearly_those_of_others_are_told():
    misspelt = {"CUDA_VISIBLE_DEVICE": "0", "RAY_ADRESS": "x", "NVIDIA_VISIBLE_DEVICES": "all", "HF_HUB_CACHE": "/x"}
    told = [finding for finding in findings.about_variables(misspelt, [], []) if finding.level == WARNING]
    assert [finding.text.rpartition(" ")[2] for finding in told] == ["CUDA_VISIBLE_DEVICES?", "RAY_ADDRESS?"]


def test_what_a_run_refuses_is_wrong_and_what_it_ignores_a_warning():
    told = list(
        findings.about_variables({}, ["SLIME_DEBUGG is set and has no effect"], ["OMP_NUM_THREADS=x: give a number"])
    )
    assert [finding.level for finding in told[2:]] == [WRONG, WARNING]


def test_optional_packages_are_listed_once():
    assert len({extra.module for extra in findings.EXTRAS}) == len(findings.EXTRAS)
    assert not [extra for extra in findings.EXTRAS if "slime" in extra.way], "pip would put others beside the pins"
    assert set(findings._EXPECTED_ON_GPUS) <= {extra.module for extra in findings.EXTRAS if extra.needs_gpus}
