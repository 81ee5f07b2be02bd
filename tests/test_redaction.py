"""What is shown to others holds no credentials, and is otherwise as it was."""

from __future__ import annotations

import dataclasses
import importlib
import json
import pkgutil
from pathlib import Path

import pytest
import torch
from every_row import every_row
from torch import nn

import sparkdl
from sparkdl.callbacks import MLflow, TrainingReport
from sparkdl.checkpoint.storage import CheckpointStore
from sparkdl.errors import ConfigError
from sparkdl.estimator.estimator import TorchEstimator
from sparkdl.estimator.params.declaration import LONGEST, described
from sparkdl.redaction import shown, without_credentials, without_secrets
from sparkdl.spark.launch.rank_host import RankCall


def test_uris_lose_users_passwords_keys_and_signatures() -> None:
    for wanted, given in {
        "s3://***@bucket/ck": "s3://KEY:SECRET@bucket/ck",
        "s3://***@bucket/a?region=x": "s3://KEY:SEC/R+ET@bucket/a?region=x",
        "https://***@host:80/x": "https://user:p@ss@host:80/x",
        "hdfs://***@host/x": "hdfs://user@host/x",
        "https://h/x?sig=***&sv=1&X-Amz-Signature=***": "https://h/x?sig=ab&sv=1&X-Amz-Signature=cd",
        "s3://b?access_key=***&secret_key=***&a=1": "s3://b?access_key=A&secret_key=B&a=1",
        "jdbc:x://h/d?user=me&password=***": "jdbc:x://h/d?user=me&password=b1",
        "jdbc:sqlserver://h;password=***;z=1": "jdbc:sqlserver://h;password=yyy;z=1",
        "jdbc:oracle:thin:***@//h:1521/x": "jdbc:oracle:thin:scott/tiger@//h:1521/x",
        "['s3://***@a', 's3a://***@b']": "['s3://K:S@a', 's3a://K:S@b']",
        '{"sas_token": "***", "b": "c"}': '{"sas_token": "x\\"y", "b": "c"}',
        "{'password': '***', 'b': 1}": "{'password': 'x,y', 'b': 1}",
        "Authorization: ***, a: b": "Authorization: Bearer x.y.z, a: b",
    }.items():
        assert without_credentials(given) == wanted
        assert without_credentials(wanted) == wanted


@every_row(
    "s3://bucket/p@v1",
    "http://host:8080/p@x",
    "abfss://container@account.dfs.core.windows.net/p",
    "/local/a@b:c",
    "mail me@home.org, 3:4",
    "hdfs://nn:8020/x?y=1",
    "columnDtypes {'token': 'int64', 'key': 'int8'}",
)
def test_what_holds_none_stays(text: str) -> None:
    assert without_credentials(text) == text


def test_a_place_is_shown_without_what_its_secret_keys_hold() -> None:
    place = {
        "driver": "http",
        "base_url": "https://u:SECRET@h/x?sig=SECRET",
        "headers": ["Authorization: Bearer SECRET"],
        "context": {"credentials": {"type": "plain", "value": ["SECRET"]}, "token": None},
    }
    told = shown(place)
    assert "SECRET" not in told
    assert json.loads(told)["driver"] == "http"
    assert json.loads(told)["context"]["token"] is None
    assert shown(Path("/a/b")) == "/a/b"
    assert shown("s3://K:SECRET@b/x?token=SECRET") == "s3://***@b/x?token=***"


def test_the_values_of_secret_keys_are_found_wherever_they_are() -> None:
    configuration = {
        "session": {"conf": {"spark.hadoop.fs.s3a.secret.key": "abc/123", "spark.cores": "2222"}},
        "source": {"options": [{"password": 45678}, {"dbtable": "flights"}]},
    }
    text = "flights 2222 abc/123 45678 s3://K:S@b"
    assert without_secrets(text, configuration) == "flights 2222 *** *** s3://***@b"


def test_settings_are_described_without_credentials_however_long() -> None:
    uri = "s3://KEY:" + "SECRET" * LONGEST + "@bucket/ck"
    mlflow = MLflow(tracking_uri="https://user:SECRET@host")
    for value in (uri, [uri], {"a": uri}, [TrainingReport(uri)], [mlflow], (uri, {uri})):
        assert "SECRET" not in str(described(value))
        assert "://***@" in str(described(value))


def test_errors_and_explanations_of_params_show_no_credentials() -> None:
    path = "nosuch://KEY:SECRET@bucket/ck"
    with pytest.raises(ConfigError, match=r"nosuch://\*\*\*@bucket/ck") as caught:
        CheckpointStore(path, keep_last=1)
    assert "SECRET" not in str(caught.value)
    estimator = TorchEstimator(
        model=nn.Identity, loss=nn.MSELoss(), optimizer=torch.optim.SGD, checkpointPath=path
    )
    assert "current: nosuch://***@bucket/ck" in estimator.explainParams()
    assert estimator.getCheckpointPath() == path


SECRETS = ("token", "secret", "password")


def test_no_dataclass_shows_a_secret_in_its_repr() -> None:
    secret = {
        (value.__qualname__, field.name): field.repr
        for module in pkgutil.walk_packages(sparkdl.__path__, "sparkdl.")
        for value in vars(importlib.import_module(module.name)).values()
        if isinstance(value, type) and dataclasses.is_dataclass(value)
        for field in dataclasses.fields(value)
        if field.name in SECRETS
    }
    assert {"ServiceAddress"} <= {name for name, _ in secret}
    assert [name for name, told in secret.items() if told] == []


def test_a_call_for_a_process_of_its_own_does_not_show_what_it_hands_over() -> None:
    call = RankCall(rank=1, entry="module:function", arguments=(("host", 1, "a secret"),))
    assert "a secret" not in repr(call)
