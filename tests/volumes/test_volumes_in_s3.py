"""Volumes in an object store are predicted, and gone on with, as those in files are."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorstore
from s3_server import object_store
from test_transform_volume import CHUNK, SIZES, expected, image, model_of
from volume_models import Edges

from sparkdl.durable import lease
from sparkdl.errors import ConfigError, DataError, InUseError
from sparkdl.volumes.leases import alone


@pytest.mark.nightly
@pytest.mark.usefixtures("spark")
def test_a_volume_in_s3_at_an_endpoint_is_predicted_and_what_is_done_is_not_done_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with object_store() as (endpoint, objects):

        def place(path: str) -> dict[str, Any]:
            store = {"driver": "s3", "bucket": "bucket", "path": path, "endpoint": endpoint}
            store |= {"aws_region": "us-east-1", "aws_credentials": {"type": "anonymous"}}
            return {"driver": "zarr3", "kvstore": store}

        source, target, module = place("in.zarr/"), place("out.zarr/"), Edges()
        made = tensorstore.open(source, create=True, dtype="uint8", shape=image().shape)
        made.result().write(image()).result()
        model = model_of(module)
        done = model.transform_volume(source, target, chunk=CHUNK, **SIZES)
        assert done.computed == done.chunks == 6
        wanted = expected(image()[None], module)
        del objects["out.zarr/.sparkdl/chunks/3"]
        again = model.transform_volume(source, target, **SIZES)
        assert (again.computed, again.chunk) == (1, CHUNK)
        monkeypatch.setattr(lease, "RENEWED_EVERY_S", 0.5)
        with alone(target, "another"), pytest.raises(InUseError, match=r"out\.zarr.*written by"):
            model.transform_volume(source, target, **SIZES)
        assert not [name for name in objects if "in-use" in name]
        found = tensorstore.open(target).result().read().result()
        assert np.abs(found - wanted).max() < 1e-3
        with pytest.raises(ConfigError, match=r"in\.zarr.*transform_volume has not made it"):
            model.transform_volume(source, source, **SIZES)
        with pytest.raises(DataError, match=r"nowhere.*cannot be opened.*does not exist"):
            model.transform_volume(place("nowhere/"), place("other/"), **SIZES)
