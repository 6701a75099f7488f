"""`python -m services.teacher RUN.yaml [--teacher.port 50051 ...]`"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from pathlib import Path

from transformers.utils.logging import disable_progress_bar

from modeling.head import UnsupportedModel
from modeling.load import ModelError
from preceptor.config_errors import ConfigError
from services.teacher.server import EngineDied, serve
from services.teacher.settings import TeacherConfig

logger = logging.getLogger("services.teacher")


def main(arguments: list[str]) -> int:
    """Serve until told to stop. Returns the exit status."""
    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    disable_progress_bar()
    path = Path(arguments.pop(0)) if arguments and not arguments[0].startswith("-") else None
    try:
        settings = TeacherConfig.load(path, arguments).teacher
        asyncio.run(serve(settings))
    except (EngineDied, TimeoutError) as error:
        logger.critical("%s", error, exc_info=error)
        logging.shutdown()
        # The engine's thread may hang, and an orderly exit would wait for those that wait for it.
        os._exit(1)
    except (ConfigError, ModelError, UnsupportedModel) as error:
        logger.error("%s", error)
        # Starting again would end the same way; the launcher does not try.
        return 2
    except OSError as error:
        # A port that is taken may be free later.
        logger.error("%s", error)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
