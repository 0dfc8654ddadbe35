"""Fixtures that several test files share."""

pytest_plugins = ["vllm_fixtures"]
