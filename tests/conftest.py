"""Fixtures that several test files share."""

pytest_plugins = ["flow_fixtures", "vllm_fixtures"]
