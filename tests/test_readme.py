"""The README's code runs, and its table says what there is."""

import re

from processes import ROOT, output

import keras_distrib as kd

README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


def test_the_first_example_is_short_and_near_the_top():
    assert README[: README.index("```\n")].count("\n") < 20
    assert BLOCKS[0].count("\n") <= 12


def test_the_code_runs():
    """All blocks, one after the other, with a loader of 64 rows for the loop; the CPU is split first."""
    first, split, loop = BLOCKS
    imports, rest = first.split("\n\nx, y", 1)
    loader = """
import torch
data = torch.utils.data.TensorDataset(torch.rand(150, 8), torch.rand(150, 1))
loader = torch.utils.data.DataLoader(data, batch_size=64)
"""
    code = "\n".join([imports, split, "x, y" + rest, loader, loop, "print(strategy.num_replicas_in_sync)"])
    printed = output("-c", code, KERAS_DISTRIB_LOGICAL_DEVICES=None)
    assert printed.rstrip().endswith("\n2")
    assert len(re.findall(r"^tensor\(", printed, re.MULTILINE)) == 3


def test_the_table_says_what_there_is():
    rows = re.findall(r"^\| `(?:experimental\.)?(\w+)` \| (yes|not yet) \|", README, re.MULTILINE)
    assert len(rows) == 5
    for name, works in rows:
        assert (hasattr(kd, name) or hasattr(kd.experimental, name)) == (works == "yes")
