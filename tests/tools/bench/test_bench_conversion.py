"""Which converters the bench of conversions runs, in which order, and which of them it tells of."""

from __future__ import annotations

import os
from argparse import Namespace
from pathlib import Path
from types import SimpleNamespace

import pytest

from tools.bench import bench_conversion


@pytest.mark.parametrize(
    "only, expected",
    [
        (["fp8_cast_bf16"], ["convert_hf_to_fp8", *["fp8_cast_bf16"] * 2]),
        (["convert_torch_dist_to_hf"], ["convert_hf_to_torch_dist", *["convert_torch_dist_to_hf"] * 2]),
        (["convert_hf_to_int4_direct"], ["convert_hf_to_int4_direct"] * 2),
        (
            ["convert_k2_thinking_int4_to_bf16"],
            ["convert_hf_to_int4_direct", *["convert_k2_thinking_int4_to_bf16"] * 2],
        ),
        (["convert_hf_to_fp8", "fp8_cast_bf16"], ["convert_hf_to_fp8", "fp8_cast_bf16"] * 2),
        (["fp8_cast_bf16", "convert_hf_to_fp8"], ["convert_hf_to_fp8", *["fp8_cast_bf16", "convert_hf_to_fp8"] * 2]),
    ],
)
def test_a_converter_finds_what_it_reads_whatever_is_asked_for(tmp_path, monkeypatch, capsys, only, expected):
    ran = []

    def run(command: list, *, check: bool) -> None:
        words = [str(word) for word in command]
        source, target = (
            next(Path(words[at + 1]) for at, word in enumerate(words) if word in names)
            for names in (
                ("--hf-checkpoint", "--input-dir", "--model-dir", "--input-fp8-hf-path"),
                ("--save", "--output-dir", "--save-dir", "--output-bf16-hf-path"),
            )
        )
        assert check and source.is_dir() and not target.exists() and words[-2:] == ["--max-workers", "3"]
        target.mkdir()
        ran.append(Path(words[3]).stem)

    def write_model(directory: Path, nbytes: int) -> None:
        directory.mkdir()
        (directory / "model.safetensors").write_bytes(b"0" * nbytes)

    def wait() -> None:
        raise ChildProcessError

    monkeypatch.setattr(bench_conversion, "subprocess", SimpleNamespace(run=run))
    # Children of the process that runs the tests are not the bench's.
    monkeypatch.setattr(os, "wait", wait)
    monkeypatch.setattr(bench_conversion, "write_model", write_model)
    bench_conversion.tell(Namespace(gigabytes=1e-6, rounds=2, workers=3, only=only), tmp_path)
    assert ran == expected
    told = [line.split()[0] for line in capsys.readouterr().out.splitlines()[1:]]
    assert told == ["copy", *only]
