"""conf/spark-defaults.conf: every setting has a reason, and agrees with what sparkdl refuses."""

from __future__ import annotations

import re
from pathlib import Path

import yaml

CONF = Path(__file__).parents[2] / "conf"


def settings() -> dict[str, str]:
    lines = (CONF / "spark-defaults.conf").read_text().splitlines()
    return dict(line.split(maxsplit=1) for line in lines if line and not line.startswith("#"))


def test_each_setting_stands_below_a_comment_of_its_own() -> None:
    blocks = (CONF / "spark-defaults.conf").read_text().split("\n\n")
    for block in blocks:
        lines = block.strip().splitlines()
        comments = [line for line in lines if line.startswith("# ")]
        assert len(lines) - len(comments) <= 2, block
        if len(lines) > len(comments):
            assert lines[0].startswith("# "), block
            assert all(line.startswith("spark.") for line in lines[len(comments) :]), block


def test_nothing_is_set_twice_nor_left_for_another_file_to_contradict() -> None:
    found = settings()
    names = [line.split()[0] for line in (CONF / "spark-defaults.conf").read_text().splitlines()
             if line.startswith("spark.")]  # fmt: skip
    assert sorted(names) == sorted(found)
    assert found["spark.speculation"] == "false"
    assert found["spark.dynamicAllocation.enabled"] == "false"
    job = yaml.safe_load((CONF / "flights.yaml").read_text())["session"]["conf"]
    shared = found.keys() & job.keys()
    assert {name: found[name] for name in shared} == {name: job[name] for name in shared}


def test_the_image_has_the_spark_that_the_constraints_have() -> None:
    """Another minor version may not even start a Python worker of this one."""
    image = re.findall(
        r"^FROM apache/spark:(\d+\.\d+)\.", (CONF.parent / "deploy/Dockerfile").read_text(), re.M
    )
    pinned = re.findall(r"^pyspark==(\d+\.\d+)\.", (CONF / "constraints.txt").read_text(), re.M)
    assert len(pinned) == 1
    assert image == pinned


def test_the_pod_template_and_the_image_are_what_spark_asks_for() -> None:
    deploy = CONF.parent / "deploy"
    pod = yaml.safe_load((deploy / "pod-template.yaml").read_text())
    assert (pod["kind"], pod["apiVersion"]) == ("Pod", "v1")
    (container,) = pod["spec"]["containers"]
    mounted = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    assert mounted.keys() == {volume["name"] for volume in pod["spec"]["volumes"]}
    assert mounted["dshm"] == "/dev/shm"
    assert any(name.startswith("spark-local-dir-") for name in mounted)
    image = (deploy / "Dockerfile").read_text()
    for copied in ("conf/constraints.txt",):
        assert (CONF.parent / copied).exists()
        assert f"COPY {copied.rsplit('/', 1)[0]}/" in image
