"""Each example runs as its docstring says, on two logical CPUs."""

import re

import pytest
from processes import ROOT, output


def run_example(name, *arguments, cwd):
    return output(ROOT / "examples" / name, *arguments, cwd=cwd, KERAS_DISTRIB_LOGICAL_DEVICES=None)


def test_mirrored_digits(tmp_path):
    pytest.importorskip("sklearn", reason="the extra `examples` is not installed")
    pytest.importorskip("matplotlib", reason="the extra `examples` is not installed")
    out = run_example("mirrored_digits.py", "--plot", "digits.png", cwd=tmp_path)
    assert "MirroredStrategy: 2 replicas (cpu:0, cpu:1), global batch 64, per replica 32" in out
    accuracy = float(re.search(r"test accuracy on 2 replicas: (\S+)", out)[1])
    assert accuracy >= 0.97
    assert (tmp_path / "digits.png").read_bytes()[:4] == b"\x89PNG"


def test_custom_loop(tmp_path):
    out = run_example("custom_loop.py", cwd=tmp_path)
    assert "2 replicas, global batch 128" in out
    losses = [float(value) for value in re.findall(r"epoch \d: loss (\S+),", out)]
    assert len(losses) == 3
    assert losses[-1] < losses[0] / 2
    assert float(re.findall(r"accuracy (\S+)", out)[-1]) > 0.95


def test_distributed_input(tmp_path):
    out = run_example("distributed_input.py", cwd=tmp_path)
    assert "step 0: [[0, 1], [2, 3]]\nstep 1: [[4], [5]]" in out
    accuracies = re.findall(r"(arrays|dataset function|DatasetCreator|200 files): accuracy (\S+)", out)
    assert len(accuracies) == 4
    assert all(float(accuracy) > 0.9 for _, accuracy in accuracies)
    assert float(re.search(r"predicted 1797 rows in order: accuracy (\S+)", out)[1]) > 0.9
    assert "resumed after 10 of 29 batches: 19 are left" in out


def test_grain_input(tmp_path):
    out = run_example("grain_input.py", cwd=tmp_path)
    assert float(re.search(r"test accuracy on 2 replicas: (\S+)", out)[1]) > 0.85
