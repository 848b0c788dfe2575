"""The database that a study's trials are kept in: the study folder's own SQLite, or one that several workers share."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fenno.errors import DiskError, UsageError

# A worker whose host stands still may hold SQLite's lock meanwhile.
LOCKED = 60.0
# Where a URL names no driver, and SQLAlchemy's own choice is not what `fenno[postgres]` brings.
_DRIVERS = {"postgres": "postgresql+psycopg", "postgresql": "postgresql+psycopg"}


def own(folder: Path) -> str:
    """The address of the database in a study's folder."""
    return f"sqlite:///{folder / 'study.db'}"


def address(text: str) -> str:
    """An address as it is given, the path of a file made absolute. Raises `UsageError` for what is none that workers can share."""
    from sqlalchemy.engine import make_url
    from sqlalchemy.exc import ArgumentError

    hint = "write it as sqlite:////shared/fenno.db, or postgresql://USER@HOST/DATABASE with the password in ~/.pgpass"
    try:
        url = make_url(text)
    except ArgumentError as error:
        raise UsageError(f"--storage is {text!r}: that is no address of a database", hint) from error
    if url.get_backend_name() == "sqlite":
        if url.database in (None, "", ":memory:"):
            raise UsageError(f"--storage is {text!r}: a database in memory is nobody else's", hint)
        url = url.set(database=str(Path(str(url.database)).resolve()))
    return url.render_as_string(hide_password=False)


def shown(url: str) -> str:
    """An address without its password."""
    from sqlalchemy.engine import make_url

    known = make_url(url)
    return known._replace(password=None).difference_update_query(("password", "sslpassword")).render_as_string()


def reach(url: str) -> Any:
    """Optuna's storage at an address; tables are made where there are none.

    Raises `UsageError`, and what `kept` makes a `DiskError`.
    """
    import optuna
    from sqlalchemy.engine import make_url
    from sqlalchemy.exc import DatabaseError, NoSuchModuleError

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    where = make_url(url)
    where = where.set(drivername=_DRIVERS.get(where.drivername, where.drivername))
    # A server that was started anew in the meantime is no end of a study.
    options: dict[str, Any] = {"pool_pre_ping": True}
    if where.get_backend_name() == "sqlite":
        options["connect_args"] = {"timeout": LOCKED}
    for last in (False, False, False, True):
        try:
            return optuna.storages.RDBStorage(where.render_as_string(hide_password=False), engine_kwargs=options)
        except (ImportError, NoSuchModuleError) as error:
            hint = "for PostgreSQL: pip install 'fenno[postgres]'"
            raise UsageError(f"there is no driver here for the database {shown(url)}", hint) from error
        except DatabaseError:
            # Another worker makes the same tables at this moment.
            if last:
                raise
            time.sleep(0.5)
    raise AssertionError("the last attempt returns or raises")


@contextlib.contextmanager
def kept(where: object) -> Iterator[None]:
    """A database that cannot be written is a `DiskError`, in one sentence."""
    from optuna.exceptions import StorageInternalError
    from sqlalchemy.exc import SQLAlchemyError

    try:
        yield
    except (OSError, SQLAlchemyError, StorageInternalError) as error:
        root: BaseException = error
        while root.__cause__:
            root = root.__cause__
        reason = root.strerror if isinstance(root, OSError) else str(root).partition("\n")[0]
        hint = "choose another --out folder, or free some space"
        if isinstance(where, str):
            hint = "is the database there, and may this user write to it?"
        raise DiskError(f"cannot keep a study in {where}: {reason}", hint) from error
