"""The `preceptor` command."""
