"""Every public name of tf.distribute 2.21 works here, or is listed with the reason why not."""

import importlib.resources
import inspect
import re
import tomllib
from pathlib import Path

import pytest

import keras_distrib as kd

LISTED = tomllib.loads((importlib.resources.files("keras_distrib") / "not_offered.toml").read_text())
MISSING = LISTED["not_offered"] | LISTED["not_yet"]
SURFACE = (Path(__file__).parent / "data" / "tf_distribute_names.txt").read_text().splitlines()
MORE = ["tf.VariableAggregation", "tf.VariableSynchronization"]
STRATEGIES = ("Strategy", "MirroredStrategy", "OneDeviceStrategy", "experimental.CentralStorageStrategy")


def surface():
    """(name, parameters) of each function, class, method, property and attribute; parameters of functions."""
    owner = ""
    for line in SURFACE:
        found = re.match(r"(CLASS|FUNC|MODULE) (\S+)(?: \((.*)\))?", line)
        if found:
            kind, owner, parameters = found.groups()
            yield owner, parameters if kind == "FUNC" else None
            continue
        found = re.match(r"    (def|staticmethod|prop|attr) (\w+)(?: \((.*?)\)(?: ->.*)?$)?", line)
        if found:
            kind, name, parameters = found.groups()
            yield f"{owner}.{name}", parameters if kind in ("def", "staticmethod") else None


def names_of_parameters(text):
    names = re.findall(
        r"(?:^|, )\*{0,2}(\w+)(?=[,:=]|$)", re.sub(r"<[^<>]*(<[^<>]*>)?[^<>]*>|Optional\[.*?\]\]", "", text)
    )
    return (
        [] if names in (["self", "args", "kwargs"], ["args", "kwargs"]) else [name for name in names if name != "self"]
    )


def entries(name):
    """The keys that a name may be listed under: itself, what it is a member of, and every strategy's method."""
    keys = [name[: match.start()] for match in re.finditer(r"\.|$", name)]
    parts = name.split(".")
    if len(parts) > 2 and parts[-2] in ("RunOptions", "InputOptions"):
        keys.append(f"{parts[-2]}.{parts[-1]}")
    if len(parts) > 2 and parts[-2].endswith("Strategy"):
        keys.append(f"Strategy.{parts[-1]}")
    return keys


def ours(name):
    value = kd
    for part in re.sub(r"^tf\.(distribute\.|nn\.)?", "", name).split("."):
        value = getattr(value, part)
    return value


@pytest.mark.parametrize("name", [*(name for name, _ in surface() if name != "tf.distribute"), *MORE])
def test_a_name_is_here_or_listed(name):
    listed = [key for key in entries(name) if key in MISSING]
    if listed:
        assert MISSING[listed[0]].endswith(".")
        with pytest.raises(AttributeError):
            ours(name)
    else:
        ours(name)


@pytest.mark.parametrize(("name", "parameters"), [(n, p) for n, p in surface() if p is not None])
def test_calls_are_written_alike(name, parameters):
    if any(key in MISSING or key in LISTED["other_signature"] for key in entries(name)):
        return  # checked above
    expected = names_of_parameters(parameters)
    signature = inspect.signature(ours(name))
    found = [p.name for p in signature.parameters.values() if p.name != "self"]
    if expected:
        assert found[: len(expected)] == expected
        assert all(
            signature.parameters[extra].default is not inspect.Parameter.empty for extra in found[len(expected) :]
        )


def test_nothing_is_listed_that_is_no_name_of_the_original():
    known = {key for name, _ in surface() for key in entries(name)}
    assert set(MISSING) | set(LISTED["other_signature"]) <= known


def test_a_missing_name_says_why():
    with pytest.raises(AttributeError, match="keras_distrib.TPUStrategy is not offered: torch runs on TPUs"):
        kd.TPUStrategy  # noqa: B018
    with pytest.raises(AttributeError, match=r"experimental.CollectiveHints is not offered: deprecated; use"):
        kd.experimental.CollectiveHints  # noqa: B018
    with pytest.raises(AttributeError, match="unwrap.*deprecated; use experimental_local_results"):
        kd.get_strategy().unwrap(1)
    with pytest.raises(AttributeError, match="has no attribute 'nonsense'"):
        kd.nonsense  # noqa: B018
    with pytest.raises(AttributeError, match="has no attribute 'nonsense'"):
        kd.get_strategy().nonsense  # noqa: B018
