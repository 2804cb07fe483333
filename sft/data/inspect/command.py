"""`sft data inspect`: a recipe in, text or JSON out, and a picture where one is asked for.

Decides what is refused before anything is tokenised: a picture that could not be written.  Does not print.
"""

import json
from pathlib import Path

from sft.config import Config
from sft.console import Console
from sft.data.chat.tokenizer import load_tokenizer
from sft.data.inspect.report import survey_lines
from sft.data.inspect.survey import take_survey
from sft.errors import ConfigError


def inspect(
    config: Config,
    recipe: str,
    *,
    num_previews: int,
    as_json: bool,
    color: bool,
    picture: Path | None,
    console: Console,
) -> str:
    """What the command prints on stdout; `console` shows progress.

    recipe  path of the recipe, for the heading

    Raises ConfigError for options, DataError for data that cannot be used.
    """
    if num_previews < 0:
        raise ConfigError(f"--samples {num_previews} is not a number of samples; give 0 or more.")
    if picture is not None:
        _check_picture(picture)
    data = config.data
    cache_dir = Path(config.cache_dir)
    survey = take_survey(recipe, data, load_tokenizer(data), cache_dir, num_previews, console)
    if picture is not None:
        from sft.data.inspect.picture import draw

        try:
            draw(survey, picture)
        except OSError as error:
            raise ConfigError(f"--png {picture} cannot be written: {error.strerror}.") from error
        console.say(f"picture {picture}")
    if as_json:
        return json.dumps(survey.as_dict(), indent=1)  # ASCII: no terminal or pipe can spoil it
    return "\n".join(survey_lines(survey, color=color)).rstrip()


def _check_picture(path: Path) -> None:
    if path.suffix != ".png":
        raise ConfigError(f"--png {path} does not end in .png, and a PNG is what is written.")
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise ConfigError("--png draws with matplotlib, which is not installed: pip install matplotlib") from None
