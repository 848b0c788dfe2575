"""What stands in no file that fenno writes: told by its name, or for a password in an address."""

from __future__ import annotations

import re

# How the name of a secret ends; TOKENIZERS_PARALLELISM, max-num-batched-tokens and ssl-keyfile are none.
WORDS = "TOKEN|SECRETS?|PASSWORDS?|PASSWD|CREDENTIALS?|KEY|AUTH|AUTHORIZATION"
NAME = rf"(?i:\w*(?:{WORDS})(?:_ID|_?[0-9]+)?)"
# Group 1 is the scheme; a user may be missing (redis://:password@host).
PASSWORD = re.compile(r'(\w+://)[^/\s:@"]*:[^/\s@"]+@')


def is_secret(name: str, value: str = "") -> bool:
    """Whether what a variable, a flag or a key called `name` holds must not be written down."""
    return re.fullmatch(NAME, re.sub(r"\W", "_", name)) is not None or PASSWORD.search(value) is not None


def in_flag(name: str, value: object) -> bool:
    """The same of a flag's value: text, a number, or a list of them; a switch holds none."""
    told = [item for item in (value if isinstance(value, list) else [value]) if item is not None and not isinstance(item, bool)]
    return any(is_secret(name, str(item)) for item in told)
