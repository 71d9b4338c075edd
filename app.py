"""Entry of the Space, and of `python app.py`: loads the engine, builds and launches the page."""

import os
import sys

os.environ.setdefault("GRADIO_ANALYTICS_ENABLED", "False")  # read when gradio is imported: no call home

from fasteagle_lite.bench import warm_up
from fasteagle_lite.engine import Engine, LaneSpec
from fasteagle_lite.errors import UserError
from fasteagle_lite.ui import launch
from fasteagle_lite.ui.race_tab import offered


def main() -> int:
    try:
        engine = Engine.load()
    except UserError as error:
        print(f"fasteagle_lite: {error}", file=sys.stderr)
        return 2
    warm_up(engine, [LaneSpec.of(name) for name in offered(engine)])
    launch(engine)
    return 0


if __name__ == "__main__":
    sys.exit(main())
