"""Where models are fetched from, and whether it can be reached."""

from __future__ import annotations

from urllib.error import HTTPError
from urllib.request import Request, urlopen

HUB_TIMEOUT_S = 5.0


def hub() -> str:
    from huggingface_hub import constants

    return str(constants.ENDPOINT)


def hub_answers() -> bool:
    """Whether the hub can be reached: asked once, where its own client would try each file for half a minute."""
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return False
    try:
        with urlopen(Request(hub(), method="HEAD"), timeout=HUB_TIMEOUT_S):
            return True
    except HTTPError:
        return True  # an answer, if not a friendly one
    except OSError:
        return False
