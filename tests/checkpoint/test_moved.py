"""What was written before a module moved is understood afterwards.

The names and digests are those of the first files. A strategy that moves keeps its line here.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from sparkdl import strategies
from sparkdl.checkpoint.identity import describe
from sparkdl.checkpoint.object_spec import load_object, save_object
from sparkdl.estimator.persistence import EXPECTED

DIGESTS = {
    "sparkdl.strategies.adascale:AdaScale": "b576ea029ee00e10",
    "sparkdl.strategies.asynchronous_outer_optimizer:AsynchronousOuterOptimizer": (
        "1725b692e8fe62d5"
    ),
    "sparkdl.strategies.asynchronous_outer_optimizer:DelayedNesterov": "20fd73043ca92bf7",
    "sparkdl.strategies.asynchronous_sgd:AsynchronousSGD": "91412230ae2eeb7f",
    "sparkdl.strategies.barriers:ASP": "a4c46b360849d7cc",
    "sparkdl.strategies.barriers:BSP": "e75ca06f1338aa8a",
    "sparkdl.strategies.barriers:Barrier": "932119117552ff6a",
    "sparkdl.strategies.barriers:PBSP": "45ea4c91899a02c7",
    "sparkdl.strategies.barriers:PSSP": "b0145fba28b611cb",
    "sparkdl.strategies.barriers:SSP": "9a9ca33734ca4945",
    "sparkdl.strategies.barriers:Softsync": "ef5ef2c2fa0d40b5",
    "sparkdl.strategies.base:Strategy": "b1ea3acf84af3e64",
    "sparkdl.strategies.compression.base:Compression": "c47186e5fca54725",
    "sparkdl.strategies.compression.one_bit_adam:OneBitAdam": "635cb4ab52ab7aa5",
    "sparkdl.strategies.compression.power_sgd:PowerSGD": "02f3c6dde4ddf03b",
    "sparkdl.strategies.compression.top_k:TopK": "795de1ad721fda8b",
    "sparkdl.strategies.elastic_averaging:ElasticAveraging": "eaedd92865a48a1c",
    "sparkdl.strategies.gossip_averaging:GossipAveraging": "843a70afa01b30e4",
    "sparkdl.strategies.gradient_all_reduce:GradientAllReduce": "cfdded7d4fbdcbf6",
    "sparkdl.strategies.kfac.preconditioner:KFACPreconditioner": "e8aa37c9939a932f",
    "sparkdl.strategies.outer_optimizer:OuterOptimizer": "996eb3f61306eb9f",
    "sparkdl.strategies.outer_optimizer:OuterSGD": "64de95fd79c2925f",
    "sparkdl.strategies.parameter_averaging:ParameterAveraging": "14b4e0f5394720d8",
    "sparkdl.strategies.threshold_gradient_sharing:ThresholdGradientSharing": "a0be5d24f6794f99",
}


@pytest.mark.parametrize(("path", "digest"), DIGESTS.items(), ids=str)
def test_a_checkpoint_knows_a_strategy_by_the_name_that_it_had(path: str, digest: str) -> None:
    kind = getattr(strategies, path.partition(":")[2])
    assert describe(kind)["parts"] == {"name": digest}


def test_a_checkpoint_knows_a_strategy_of_the_users_by_its_bases_former_name() -> None:
    class Own(strategies.AsynchronousSGD):
        pass

    assert describe(Own)["parts"] == {"bases": "6ffeefb72d66f4bb"}


INSTANCES = [
    strategies.AdaScale(decay=0.5),
    strategies.AsynchronousSGD(3, barrier=strategies.SSP(2)),
    strategies.ElasticAveraging(period=9, moving_rate=0.2),
    strategies.GossipAveraging(3, "pull", "ring"),
    strategies.GradientAllReduce(),
    strategies.OuterOptimizer(9, strategies.OuterSGD(0.6)),
    strategies.ThresholdGradientSharing(0.02),
]


def with_names_of(spec: Any, names: dict[str, str]) -> Any:
    if isinstance(spec, dict):
        return {key: with_names_of(each, names) for key, each in spec.items()}
    return names.get(spec, spec) if isinstance(spec, str) else spec


@pytest.mark.parametrize("value", INSTANCES, ids=repr)
def test_a_strategy_that_was_saved_before_its_module_moved_is_loaded(
    value: strategies.Strategy[Any], tmp_path: Path
) -> None:
    first = {path.partition(":")[2]: path for path in DIGESTS}
    kinds = {name: getattr(strategies, name) for name in first}
    names = {f"{kind.__module__}:{name}": first[name] for name, kind in kinds.items()}
    saved = save_object(value, tmp_path, "strategy")
    before = with_names_of(saved, names)
    assert before != saved
    for each in (saved, before):
        loaded = load_object(each, tmp_path, "strategy", expected=EXPECTED["strategy"], trust=False)
        assert loaded == value


def test_a_pickle_from_before_a_module_moved_is_loaded(tmp_path: Path) -> None:
    (tmp_path / "strategy.pkl").write_bytes(b"csparkdl.strategies.barriers\nSSP\n.")
    loaded = load_object(
        {"recipe": {"pickle": "strategy.pkl"}},
        tmp_path,
        "strategy",
        expected=EXPECTED["strategy"],
        trust=True,
    )
    assert loaded is strategies.SSP
