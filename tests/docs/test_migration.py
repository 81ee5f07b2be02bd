"""Every name of ours that the page about migration gives is one that this package has."""

from __future__ import annotations

import ast
import inspect
import re
from pathlib import Path
from typing import Any

import sparkdl
import sparkdl.callbacks
import sparkdl.strategies

PAGE = (Path(__file__).parents[2] / "docs/migration.md").read_text()
SAYS_WHY_NOT = {"not needed", "none", ""}


def table_rows() -> list[tuple[str, str]]:
    """(theirs, ours) of every row of every table."""
    lines = [line for line in PAGE.splitlines() if line.startswith("| ")]
    cells = [[c.strip() for c in line.strip("|").split("|")] for line in lines]
    return [(row[0], row[1]) for row in cells if row[1] != "here"]


def names(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


def arguments(of: Any) -> set[str]:
    return set(inspect.signature(of).parameters)


def home(name: str) -> Any:
    """The public object of a name such as ``sparkdl.run`` or ``EarlyStopping``, if there is one."""
    for module in (sparkdl, sparkdl.callbacks, sparkdl.strategies):
        if name.removeprefix("sparkdl.") in module.__all__:
            return getattr(module, name.removeprefix("sparkdl."))
    return None


def exists(expression: str) -> bool:
    """Whether an argument, an attribute or a call of ours is one that there is."""
    node = ast.parse(expression.replace("...", "None"), mode="eval").body
    if isinstance(node, ast.Call):
        called = home(ast.unparse(node.func))
        if called is None:
            return False
        known = arguments(called)
        return all(keyword.arg is None or keyword.arg in known for keyword in node.keywords)
    text = ast.unparse(node)
    if text in EVERY_ARGUMENT:
        return True
    if "." in text and not text.startswith("sparkdl."):
        owner, attribute = text.split(".")
        documented = inspect.getdoc(home(owner)) or ""
        return hasattr(home(owner), attribute) or f"{attribute}:" in documented
    return home(text) is not None


EVERY_ARGUMENT = (
    arguments(sparkdl.TorchEstimator.__init__)
    | arguments(sparkdl.run)
    | arguments(sparkdl.ParameterAveraging)
)


def test_ours_exists() -> None:
    wrong = []
    for theirs, ours in table_rows():
        if not (names(ours) or ours in SAYS_WHY_NOT):
            wrong.append(f"{theirs}: {ours!r} names nothing")
        wrong += [f"{theirs}: there is no {each}" for each in names(ours) if not exists(each)]
    assert not wrong, "\n".join(wrong)


THEIRS = """
num_proc model store optimizer loss loss_constructors metrics loss_weights sample_weight_col
gradient_compression feature_cols input_shapes validation label_cols callbacks batch_size
val_batch_size epochs verbose random_seed shuffle_buffer_size shuffle run_id train_minibatch_fn
transformation_fn label_shapes inmemory_cache_all use_gpu backward_passes_per_step fit_on_parquet
setOutputCols LocalStore HDFSStore DBFSLocalStore FilesystemStore start_timeout use_mpi use_gloo
extra_mpi_args env stdout stderr nics prefix_output_with_timestamp executable elastic_timeout
max_num_proc reset_limit logger log_every_n_steps num_gpus trainer_args profiler terminate_on_nan
loader_num_epochs num_processes local_mode ignoreSsl DeepspeedTorchDistributor numWorkers
batchSizePerWorker averagingFrequency aggregationDepth saveUpdater repartionData repartitionStrategy
storageLevel storageLevelStreams rngSeed trainingHooks collectTrainingStats thresholdAlgorithm
residualPostProcessor updatesThreshold minUpdatesThreshold thresholdStep stepTrigger stepDelay
shakeFrequency repartitioner encodingDebugMode debugLongerIterations transport unicastPort
meshBuildMode networkMask retransmitTimeout responseTimeframe responseTimeout
"""
"""The options of Horovod's estimators, run and run_elastic, of TorchDistributor, and of
Deeplearning4j's two masters and VoidConfiguration, in the versions that the page names, but for
those of files, readers and messages, which the page calls all others: there is nothing to set."""


def test_every_option_of_theirs_has_a_row() -> None:
    said = " ".join(theirs for theirs, _ in table_rows())
    assert [each for each in THEIRS.split() if not re.search(rf"\b{each}\b", said)] == []


def test_a_name_that_is_not_there_would_be_noticed() -> None:
    assert not exists("TorchModel.getHistory")
    assert not exists("GradientAllReduce(compress=True)")
    assert not exists("num_proc")
    assert not exists("Estimator(compress=True)")


def test_the_programs_name_what_there_is() -> None:
    blocks = re.findall(r"^```python\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    assert len(blocks) == 1
    for block in blocks:
        for node in ast.walk(ast.parse(block)):
            if isinstance(node, ast.ImportFrom) and node.module == "sparkdl":
                assert {alias.name for alias in node.names} <= set(sparkdl.__all__)
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                called = node.func.id
                if called in sparkdl.__all__:
                    owner = getattr(sparkdl, called)
                    assert {k.arg for k in node.keywords} <= arguments(owner), called


def test_the_defaults_that_are_given_are_so() -> None:
    ours = sparkdl.ParameterAveraging()
    assert (ours.period, ours.average_optimizer_state) == (5, True)
    assert inspect.signature(sparkdl.TorchEstimator.__init__).parameters["batchSize"].default == 32
    assert sparkdl.AsynchronousSGD().barrier == sparkdl.strategies.ASP()
    shared = sparkdl.ThresholdGradientSharing()
    assert (shared.threshold, shared.sparsity, shared.clip) == (1e-3, (1e-4, 1e-2), 5)
