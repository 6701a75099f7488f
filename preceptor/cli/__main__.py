"""`python -m preceptor.cli`, where the script `preceptor` is not on PATH."""

from preceptor.cli import app

app(prog_name="preceptor")
