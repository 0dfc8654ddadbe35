"""What several commands take."""

from typing import Annotated

import typer

RunName = Annotated[str, typer.Argument(metavar="RUN", help="A run's name, or its folder.")]
