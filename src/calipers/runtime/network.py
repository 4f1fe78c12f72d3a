"""Whether the hub of models and data sets can be asked."""

from __future__ import annotations

import threading

PATIENCE = 3.0
"""How many seconds the hub has to answer at all."""


def hub_answers() -> bool:
    """Whether the hub is there; libraries try again for half a minute before they say no.

    Looking up its address, which knows no limit of its own, is part of the waiting.
    """
    from huggingface_hub import constants, get_session

    if constants.HF_HUB_OFFLINE:
        return False
    answered = threading.Event()

    def ask() -> None:
        try:
            get_session().head(constants.ENDPOINT, timeout=PATIENCE)
        except Exception:  # whatever it was: nobody has answered
            return
        answered.set()

    threading.Thread(target=ask, daemon=True).start()
    return answered.wait(PATIENCE)
