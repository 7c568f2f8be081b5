"""The files of deploy/ name what there is. Running them needs Ray or Kubernetes: tests/gpu/test_ray.py, docs/guide/prefixes.md."""

import ast
from typing import Any

import yaml

from tests.docs.pages import ROOT

IMAGE, DOCKERFILE = "still-export:vllm", "docker/vllm.Dockerfile"


def read(name: str) -> tuple[str, Any]:
    """Its text, and what it says."""
    text = (ROOT / "deploy" / name).read_text(encoding="utf-8")
    return text, yaml.safe_load(text)


def test_the_door_of_ray_is_a_class_of_the_package() -> None:
    _, config = read("ray/still.yaml")
    (application,) = config["applications"]
    assert application["import_path"] == "ray.serve.llm:build_openai_app"
    module, name = application["args"]["ingress_cls_config"]["ingress_cls"].split(":")
    tree = ast.parse((ROOT / module.replace(".", "/")).with_suffix(".py").read_text(encoding="utf-8"))
    (door,) = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name]
    paths = {node.name for node in door.body if isinstance(node, ast.AsyncFunctionDef)}
    assert paths == {"completions", "chat"}


def test_kubernetes_runs_the_image_that_is_built_here() -> None:
    text, service = read("kubernetes/still.yaml")
    (container,) = service["spec"]["template"]["containers"]
    assert container["name"] == "main" and container["image"] == IMAGE and DOCKERFILE in text
    assert f"docker build -f {DOCKERFILE} -t {IMAGE} ." in (ROOT / DOCKERFILE).read_text(encoding="utf-8")


def test_both_serve_alike() -> None:
    _, config = read("ray/still.yaml")
    _, service = read("kubernetes/still.yaml")
    (llm,) = config["applications"][0]["args"]["llm_configs"]
    (container,) = service["spec"]["template"]["containers"]
    assert llm["model_loading_config"]["model_id"] == service["spec"]["model"]["name"]
    assert llm["deployment_config"]["num_replicas"] == service["spec"]["replicas"]
    flags = {f"--{name.replace('_', '-')}={value}" for name, value in llm["engine_kwargs"].items()}
    assert flags == set(container["args"])
