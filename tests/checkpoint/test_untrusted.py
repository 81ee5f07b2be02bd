"""Whatever a saved model says, loading it without trust does nothing but build what torch has."""

from __future__ import annotations

import itertools
import json
import os
import sys
from functools import partial
from pathlib import Path
from typing import Any

import models
import pytest
from auditing import deeds
from every_row import every
from hostile import HOSTILE, LINEAR, RELU, SEQUENTIAL, bound, made, named, saved_model
from torch import nn

from sparkdl import load_module
from sparkdl.checkpoint.module_files import SavedModule, write_module
from sparkdl.checkpoint.object_spec import DEEPEST, MODEL, load_object, save_object
from sparkdl.errors import ConfigError


@pytest.fixture(scope="module", autouse=True)
def imported(tmp_path_factory: pytest.TempPathFactory) -> None:
    """What a first load imports is no deed of the model's."""
    load_module(saved_model(tmp_path_factory.mktemp("first") / "model", bound(RELU)))


def test_the_auditing_sees_what_a_trusted_recipe_does(tmp_path: Path) -> None:
    touch = bound("os:system", f"touch {tmp_path / 'touched'}")
    directory = saved_model(tmp_path / "model", touch)
    with pytest.raises(ConfigError, match="int"), deeds() as done:
        load_module(directory, trust=True)
    assert [deed.split()[0] for deed in done] == ["os.system"]
    assert (tmp_path / "touched").exists()


@every("path", HOSTILE)
def test_a_hostile_name_is_refused_in_every_position(tmp_path: Path, path: Any) -> None:
    argument = f"touch {tmp_path / 'touched'}"
    specs = [
        named(path),
        made(path, command=argument),
        made(path, args=argument, shell=True),
        bound(path, argument),
        made(SEQUENTIAL, args=made(path, command=argument)),
        bound(SEQUENTIAL, {"list": [{"dict": {"a": {"tuple": [bound(path, argument)]}}}]}),
        {"partial": bound(path, argument), "args": [], "kwargs": {}},
        {"partial": made(path, command=argument), "args": [], "kwargs": {}},
    ]
    for spec in specs:
        directory = saved_model(tmp_path / "model", spec)
        with pytest.raises(ConfigError, match=r"trust=\[|damaged"), deeds() as done:
            load_module(directory)
        assert done == []
    assert not (tmp_path / "touched").exists()


def test_a_module_beside_the_script_is_not_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "planted.py").write_text(f"open({str(tmp_path / 'imported')!r}, 'w').close()\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend("")
    for _ in range(2):
        with pytest.raises(ConfigError, match=r"imports \['planted'\].*trust=\['planted'\]"):
            load_module(saved_model(tmp_path / "model", named("planted:Net")))
    assert not (tmp_path / "imported").exists()
    assert "planted" not in sys.modules


@every(
    "path",
    [
        *("models:os.system", "models:torch.load", "models:nn.Module"),  # imported by it
        *("models:time.sleep", "models:Path"),
        *("models:Net.__init__.__globals__", "models:Net.forward.__globals__"),
        *("models:Net.__class__", "models:__builtins__"),
        *("models:missing", "models:", "models.missing:Net"),
    ],
)
def test_of_a_trusted_module_only_what_it_defines_is_found(tmp_path: Path, path: Any) -> None:
    directory = saved_model(tmp_path / "model", bound(path))
    with pytest.raises(ConfigError, match="cannot be imported here"), deeds() as done:
        load_module(directory, trust=[models.__name__])
    assert [deed for deed in done if not deed.startswith("import ('models.")] == []


def test_a_package_stands_for_its_modules_but_not_for_its_program(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "planted_package"
    (package / "nets").mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "__main__.py").write_text("from torch.nn import Module")
    (package / "nets" / "__init__.py").write_text("import torch\nclass Net(torch.nn.ReLU): pass\n")
    (tmp_path / "planted_packages.py").write_text("from planted_package.nets import Net\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    trust = ["planted_package"]
    for path, message in {
        "planted_package.__main__:Module": r"trust=\['planted_package.__main__'\]",
        "planted_packages:Net": r"trust=\['planted_packages'\]",
    }.items():
        with pytest.raises(ConfigError, match=message):
            load_module(saved_model(tmp_path / "model", named(path)), trust=trust)
    directory = saved_model(tmp_path / "model", named("planted_package.nets:Net"))
    assert type(load_module(directory, trust=trust)).__name__ == "Net"
    directory = saved_model(tmp_path / "model", named("planted_packages:Net"))
    with pytest.raises(ConfigError, match=r"Net belongs to planted_package\.nets, which trust"):
        load_module(directory, trust=["planted_packages"])


@every("trust", ["models", ["models:Net"], ["a/b.py"], [""], [3], None, 1])
def test_trust_that_names_no_modules_is_refused(tmp_path: Path, trust: Any) -> None:
    with pytest.raises(ConfigError, match=r"trust must be True, False or a list of modules"):
        load_module(saved_model(tmp_path / "model", named(RELU)), trust=trust)


def test_a_trusted_function_that_builds_no_module_is_refused(tmp_path: Path) -> None:
    directory = saved_model(tmp_path / "model", bound("models:lines", "nowhere"))
    message = r"something that builds <class 'list'>, not an nn\.Module"
    with pytest.raises(ConfigError, match=message):
        load_module(directory, trust=["models"])


@every("depth", [DEEPEST + 1, 300, 5_000, 100_000])
def test_a_deeply_nested_recipe_is_refused_in_words(tmp_path: Path, depth: Any) -> None:
    directory = saved_model(tmp_path / "model", "here")
    path = directory / "module.json"
    deep = '{"list": [' * depth + "1" + "]}" * depth
    path.write_text(path.read_text().replace('"here"', deep))
    with pytest.raises(ConfigError, match=r"nested (more than 64 deep|too deeply)"):
        load_module(directory)


def test_what_is_saved_can_be_as_deep_as_what_is_loaded(tmp_path: Path) -> None:
    for depth in (DEEPEST - 2, DEEPEST - 1, DEEPEST, DEEPEST + 1):
        value: Any = nn.CrossEntropyLoss()
        for _ in range(depth):
            value = [value]
        written = save_object(partial(nn.Sequential, value), tmp_path, "model")
        saved = json.loads(json.dumps(written))
        if "pickle" not in saved["recipe"]:
            load_object(saved, tmp_path, "model", expected=MODEL, trust=False)
    assert "pickle" in saved["recipe"]


def test_a_list_that_holds_itself_is_pickled(tmp_path: Path) -> None:
    value: list[Any] = []
    value.append(value)
    saved = save_object(partial(nn.Sequential, value), tmp_path, "model")
    loaded = load_object(saved, tmp_path, "model", expected=MODEL, trust=True)
    assert loaded.args[0][0] is loaded.args[0]


def evil_pickle(touched: Path) -> bytes:
    return b"cposix\nsystem\n(Vtouch " + str(touched).encode() + b"\ntR."


def link(path: Path, target: str) -> None:
    path.unlink(missing_ok=True)
    path.symlink_to(target)


OUTSIDE = ["../model.pkl", "{outside}/model.pkl", "sub/../../model.pkl"]


@every(
    ("file", "trust"),
    itertools.product([*OUTSIDE, "other.pkl", "", ".", 3, None], [False, ["models"], True]),
)
def test_a_pickle_elsewhere_is_never_loaded(tmp_path: Path, file: Any, trust: Any) -> None:
    (tmp_path / "model.pkl").write_bytes(evil_pickle(tmp_path / "touched"))
    spec = {"pickle": file.format(outside=tmp_path) if isinstance(file, str) else file}
    directory = saved_model(tmp_path / "model", spec)
    (directory / "other.pkl").write_bytes(evil_pickle(tmp_path / "touched"))
    message = r"can only be in model\.pkl" if trust is True else "trust=True"
    with pytest.raises(ConfigError, match=message):
        load_module(directory, trust=trust)
    assert not (tmp_path / "touched").exists()


@every("target", ["../model.pkl", "{outside}/model.pkl", "link", "model.pkl"])
def test_a_pickle_that_is_a_link_out_of_the_directory_is_never_loaded(
    tmp_path: Path, target: Any
) -> None:
    (tmp_path / "model.pkl").write_bytes(evil_pickle(tmp_path / "touched"))
    directory = saved_model(tmp_path / "model", {"pickle": "model.pkl"})
    link(directory / "model.pkl", target.format(outside=tmp_path))
    link(directory / "link", "../model.pkl")
    with pytest.raises(ConfigError, match=r"is a link to|is missing"):
        load_module(directory, trust=True)
    assert not (tmp_path / "touched").exists()


def test_a_directory_may_itself_be_reached_by_a_link(tmp_path: Path) -> None:
    layer = nn.Linear(2, 3)
    write_module(SavedModule(layer, layer, (), "logits", {None: 3}, ()), tmp_path)
    (tmp_path / "link").symlink_to(tmp_path)
    assert isinstance(load_module(tmp_path / "link", trust=True), nn.Linear)


@pytest.mark.timeout(120)
@every("file", ["module.json", "module.safetensors", "model.pkl"])
def test_what_is_no_plain_file_is_not_read(tmp_path: Path, file: Any) -> None:
    spec = {"pickle": "model.pkl"} if file == "model.pkl" else named(RELU)
    for number, put in enumerate([partial(os.symlink, "/dev/zero"), os.mkfifo, os.mkdir]):
        directory = saved_model(tmp_path / f"{number}", spec)
        (directory / file).unlink(missing_ok=True)
        put(directory / file)
        with pytest.raises(ConfigError, match=file):
            load_module(directory, trust=True)


def test_more_json_than_any_model_has_is_refused(tmp_path: Path) -> None:
    directory = saved_model(tmp_path / "model", named(RELU))
    with (directory / "module.json").open("ab") as file:
        file.truncate(1 << 40)
    with pytest.raises(ConfigError, match=r"module\.json is larger than 64 MiB"):
        load_module(directory)


@every("size", [10**9, 10**30, -1, 2**63])
def test_a_layer_too_large_for_any_memory_is_refused(tmp_path: Path, size: Any) -> None:
    directory = saved_model(tmp_path / "model", bound(LINEAR, size, size))
    with pytest.raises(ConfigError, match="model cannot be built as it was saved"):
        load_module(directory)
