"""Fixtures that several test files share."""

from importlib.util import find_spec

# Tests of steps/grpo run in an environment without Prefect.
pytest_plugins = ["vllm_fixtures", *(["flow_fixtures", "s3_fixtures"] if find_spec("prefect") else [])]
