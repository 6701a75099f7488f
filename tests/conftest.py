"""Fixtures that several test files share."""

pytest_plugins = ["tests.redis_fixtures"]
