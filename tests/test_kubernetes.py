"""The job template of Kubernetes work pools, filled as Prefect's worker does it, without a cluster.

The worker itself comes with prefect-kubernetes, which is not among our packages: wherever it is installed, Prefect's
server loads it and starts two seconds later. With it, the last test asks the worker too.
"""

import json
import re
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
import yaml
from prefect import get_client
from prefect.client.schemas.actions import WorkPoolCreate
from prefect.client.schemas.objects import FlowRun
from prefect.utilities.callables import parameter_schema
from prefect.utilities.importtools import import_object
from prefect.utilities.schema_tools import validate
from prefect.utilities.schema_tools.validation import ValidationError
from prefect.utilities.templating import apply_values

from flows.command import HEARTBEATS

# Prefect's own clients are collected rather than closed.
pytestmark = [pytest.mark.filterwarnings("ignore::ResourceWarning"), pytest.mark.timeout(200)]

FOLDER = Path(__file__).parents[1] / "kubernetes"
TEMPLATE = json.loads((FOLDER / "base-job-template.json").read_text())
DEPLOYED = yaml.safe_load((FOLDER / "prefect.yaml").read_text())["deployments"]
CPU = {"image": "nightschool/flow:1", "flow_image": "nightschool/flow:1", "runs_claim": "runs"}
GPU = CPU | {
    "image": "nightschool/train:1",
    "gpus": 2,
    "memory_limit": "64Gi",
    "node_selector": {"nvidia.com/gpu.product": "H200"},
    "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists"}],
    "env": {"HF_HOME": "/runs/.hf"},
}


def pod(values: dict[str, Any]) -> Any:
    """The pod of a job, from valid values of a deployment's `job_variables`."""
    validate(values, TEMPLATE["variables"], raise_on_error=True)
    properties = TEMPLATE["variables"]["properties"]
    defaults = {name: variable["default"] for name, variable in properties.items() if "default" in variable}
    return apply_values(TEMPLATE["job_configuration"], defaults | values)["job_manifest"]["spec"]["template"]["spec"]


def test_a_gpu_step_gets_its_gpus_on_its_nodes() -> None:
    filled = pod(GPU)
    (step,) = filled["containers"]
    assert step["image"] == "nightschool/train:1"
    assert step["resources"]["limits"] == {"memory": "64Gi", "nvidia.com/gpu": 2}
    assert filled["nodeSelector"] == {"nvidia.com/gpu.product": "H200"}
    assert filled["tolerations"] == [{"key": "nvidia.com/gpu", "operator": "Exists"}]


@pytest.mark.parametrize("deployed", DEPLOYED, ids=[f"{entry['entrypoint']}/{entry['name']}" for entry in DEPLOYED])
def test_a_deployment_fits_the_template(deployed: dict[str, Any]) -> None:
    work_pool = deployed["work_pool"]
    (step,) = pod(work_pool["job_variables"])["containers"]
    image = step["image"].split("/")[-1].partition(":")[0]
    assert image == {"train": "train", "model": "serve"}.get(deployed["name"], "flow")
    assert step["resources"]["limits"]["nvidia.com/gpu"] == (0 if image == "flow" else 1)
    assert work_pool["name"] == ("cpus" if image == "flow" else "gpus")
    assert work_pool["job_variables"]["env"] == HEARTBEATS
    assert set(deployed.get("parameters", {})) <= set(
        parameter_schema(import_object(deployed["entrypoint"])).properties
    )


def test_a_step_finds_the_runs_and_both_environments() -> None:
    filled = pod(GPU)
    (step,), (copy,) = filled["containers"], filled["initContainers"]
    env = {variable["name"]: variable["value"] for variable in step["env"]}
    assert {"name": "runs", "mountPath": env["NIGHTSCHOOL_RUNS"]} in step["volumeMounts"]
    assert {"name": "runs", "persistentVolumeClaim": {"claimName": "runs"}} in filled["volumes"]
    assert env["NIGHTSCHOOL_TRAIN_PYTHON"] == env["NIGHTSCHOOL_SERVE_PYTHON"] == "/opt/venv/bin/python"
    assert copy["command"][-1] == copy["volumeMounts"][0]["mountPath"] + "/"
    assert step["args"].startswith("/opt/flow/bin/python -m prefect ")


def test_secrets_are_named_and_not_held() -> None:
    (step,) = pod(GPU | {"secret": "mine"})["containers"]
    assert step["envFrom"] == [{"secretRef": {"name": "mine", "optional": True}}]


def test_a_pod_may_no_more_than_it_must() -> None:
    filled = pod(CPU)
    assert filled["securityContext"]["runAsUser"] == 1000
    assert filled["securityContext"]["runAsNonRoot"]
    assert filled["automountServiceAccountToken"] is False
    for container in (*filled["containers"], *filled["initContainers"]):
        assert container["securityContext"] == {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
    assert filled["containers"][0]["resources"]["limits"] == {"nvidia.com/gpu": 0}


def test_every_variable_is_used_and_every_placeholder_is_one() -> None:
    used = set(re.findall(r"{{ (\w+) }}", json.dumps(TEMPLATE["job_configuration"])))
    assert used == set(TEMPLATE["variables"]["properties"])


def test_what_is_required_is_asked_for() -> None:
    with pytest.raises(ValidationError, match="'runs_claim' is a required property"):
        pod({"image": "a", "flow_image": "b"})


@pytest.mark.slow
def test_the_server_takes_it_for_a_work_pool(prefect_server: None) -> None:
    with get_client(sync_client=True) as client:
        pool = client.create_work_pool(WorkPoolCreate(name="gpus", type="kubernetes", base_job_template=TEMPLATE))
    assert pool.base_job_template == TEMPLATE


@pytest.mark.slow
async def test_the_worker_makes_a_job_of_it(prefect_server: None) -> None:
    worker = pytest.importorskip("prefect_kubernetes.worker", reason="prefect-kubernetes is not installed")
    theirs = worker.KubernetesWorker.get_default_base_job_template()["job_configuration"]
    assert theirs.keys() - TEMPLATE["job_configuration"].keys() == {"cluster_config"}  # it runs in the cluster
    configuration = await worker.KubernetesWorkerJobConfiguration.from_template_and_values(TEMPLATE, GPU)
    configuration.env["PREFECT_API_URL"] = "http://prefect.example/api"
    configuration.prepare_for_flow_run(FlowRun(id=uuid4(), flow_id=uuid4(), name="train checkpoints/0001"))
    (step,) = configuration.job_manifest["spec"]["template"]["spec"]["containers"]
    assert step["args"] == ["/opt/flow/bin/python", "-m", "prefect", "flow-run", "execute"]
    env = {variable["name"]: variable["value"] for variable in step["env"]}
    assert env["NIGHTSCHOOL_RUNS"] == "/runs"
    assert env["HF_HOME"] == "/runs/.hf"
    assert env["PREFECT_API_URL"] == "http://prefect.example/api"
    assert step["resources"]["limits"] == {"memory": "64Gi", "nvidia.com/gpu": 2}
