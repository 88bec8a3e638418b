"""`python -m bench NAME`: one measurement, with its figures, its machine and its verdict."""

import typer

from bench import claims, pipeline, starts

app = typer.Typer(no_args_is_help=True, pretty_exceptions_enable=False)
app.command("pipeline")(pipeline.pipeline)
app.command("claims")(claims.claims)
app.command("starts")(starts.starts)


@app.callback()
def measurements() -> None:
    """Measure how fast parts of Hookledger are on this machine."""


if __name__ == "__main__":
    app()
