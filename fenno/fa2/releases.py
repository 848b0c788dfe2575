"""The releases of flash-attn that fenno can build: what each is made of, and the hash of its source archive.

Read in those archives: the head sizes and units from `setup.py`, the namespace from `flash.h`, the conditions from
`flash_fwd_launch_template.h` and `flash_bwd_launch_template.h`.
"""

from __future__ import annotations

from dataclasses import dataclass

from fenno.errors import UsageError


@dataclass(frozen=True)
class Release:
    """`heads`: the head sizes that have kernels. `sha256` of the source archive. `namespaced`: the functions to be defined lie in
    FLASH_NAMESPACE. `alibi_uneven`: kernels with ALiBi exist for uneven lengths alone, which makes for fewer of them."""

    version: str
    sha256: str
    heads: tuple[int, ...]
    namespaced: bool = True
    alibi_uneven: bool = False


_WITH_160 = (32, 64, 96, 128, 160, 192, 256)
_SIX = (32, 64, 96, 128, 192, 256)
RELEASES = {
    release.version: release
    for release in (
        Release("2.6.3", "5bfae9500ad8e7d2937ebccb4906f3bc464d1bf66eedd0e4adabd520811c7b52", _WITH_160, namespaced=False),
        Release("2.7.2.post1", "574897afeb6cbd63e78a612dded95491efe4a46818245cf1a5ace7357d993faa", _WITH_160, namespaced=False),
        Release("2.7.4.post1", "f03485c9a49a4d68d0733acdcad80ab0e72afa025a777fdc2966ceccf9d51765", _WITH_160),
        Release("2.8.3", "1e71dd64a9e0280e0447b8a0c2541bad4bf6ac65bdeaa2f90e51a9e57de0370d", _SIX, alibi_uneven=True),
        Release("2.8.3.post2", "d0f9f0b08a986cdeadbffcf5ec8b3a8f514366c68ad1853d3ab061bc83cc340b", _SIX, alibi_uneven=True),
    )
}
NEWEST = "2.8.3.post2"


def release(version: str) -> Release:
    """The release called `version`. Raises `UsageError` for one that fenno does not know."""
    if version in RELEASES:
        return RELEASES[version]
    known = f"fenno can build {', '.join(RELEASES)}"
    if version.startswith(("1.", "2.0", "2.1", "2.2", "2.3", "2.4", "2.5")):
        raise UsageError(f"flash-attn {version} has no soft cap, and its units hold both masks: it cannot be trimmed", known)
    raise UsageError(f"fenno does not know flash-attn {version}", known)
