"""Eight workers of Spark's executors train one model that each has a part of."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from subprocesses import printed_by

PROGRAM = """
import json
import sys
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
import sparkdl

WHOLE = StateDictOptions(full_state_dict=True, cpu_offload=True)

def build():
    torch.manual_seed(3)
    layers = nn.Linear(8, 16), nn.LayerNorm(16), nn.Tanh(), nn.Linear(16, 4)
    return nn.Sequential(*layers).double()

def steps(model):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(5):
        rows = torch.randn(8, 8, generator=torch.Generator().manual_seed(step)).double()
        loss = (model(rows) - rows[:, :4]).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return loss.item()

def train(path):
    worker = sparkdl.current_worker()
    refused = None
    try:
        worker.mesh(q=3)
    except sparkdl.errors.ConfigError as error:
        refused = str(error)
    model = sparkdl.parallelize_3d(build(), worker.mesh(q=2))
    loss = steps(model)
    worker.report(loss=loss)
    worker.save_checkpoint(path, {"model": get_model_state_dict(model, options=WHOLE)})
    return loss, refused, model[0].weight.to_local().numel()

if __name__ == "__main__":
    sparkdl.create_session("cube", master="local-cluster[2,4,1024]", conf={
        "spark.executor.memory": "1024m",
        "spark.ui.enabled": "false",
    }).sparkContext.setLogLevel("OFF")
    found = sparkdl.run(train, sys.argv[1], num_workers=8)
    alone = build()
    expected = steps(alone)
    state = sparkdl.load_checkpoint(sys.argv[1])["model"]
    far = max(float((state[name] - each).abs().max()) for name, each in alone.state_dict().items())
    print(json.dumps({"found": found, "expected": expected, "far": far}))
"""


@pytest.mark.nightly
def test_eight_workers_train_what_one_process_trains(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    printed = json.loads(printed_by(program, tmp_path / "c").splitlines()[-1])
    assert len(printed["found"]) == 8
    for loss, refused, part in printed["found"]:
        assert loss == pytest.approx(printed["expected"], rel=1e-9)
        assert "q=3 has 3 x 3 x 3 = 27 workers, and this run has 8" in refused
        assert part == 8 * 16 // 8
    assert printed["far"] <= 1e-9
