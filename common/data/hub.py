"""Ask within seconds whether the Hugging Face hub can be reached, because its own client tries for minutes."""

from __future__ import annotations

import urllib.error
import urllib.request

from gptscale.common.errors import DataError

WAIT_S_MAX = 3.0


def check_hub(what: str, where: str, fix: str) -> None:
    """Raise DataError within seconds if `what` would have to come from a hub that cannot be reached.

    With HF_HUB_OFFLINE set the hub's client reads its cache alone, and nothing has to be reached.
    """
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return
    try:
        urllib.request.urlopen(urllib.request.Request(constants.ENDPOINT, method="HEAD"), timeout=WAIT_S_MAX).close()
    except urllib.error.HTTPError:
        # A refusal is an answer.
        return
    except OSError as error:
        raise DataError(f"{what} is not on this machine, and the hub cannot be reached ({error})", where, fix) from None
