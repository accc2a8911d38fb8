"""Is there a model in the folder that was given?"""

from __future__ import annotations

from pathlib import Path

from shardformer.errors import ConfigError


def check_folder(model: str) -> None:
    """Raises ConfigError for a folder without a config.json; anything else that MODEL may be is left to others."""
    from shardformer.testing.zoo import SMALL

    folder = Path(model).expanduser()
    if model in SMALL or not folder.is_dir() or (folder / "config.json").is_file():
        return
    inside = sorted(path.parent.name for path in folder.glob("*/config.json"))
    raise ConfigError(
        f"There is no config.json in the folder {model!r}",
        rule="A model's folder is one that save_pretrained wrote: it holds a config.json",
        remedy=f"Give {str(Path(model, inside[0]))!r}" if inside else "Correct the path, or save the model there",
    )
