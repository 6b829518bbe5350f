"""The service's contents in one SQLite file: the run, its groups and their items.

Invariants:
- An item is known by its uid as long as the run lasts. If it is sent again nothing changes, whatever became of its group.
- A group is open, waiting, handed out, received or dropped, and only ever moves on in this order. A group that was handed out
  stays the answer to that request until its receipt is told, so a request that is made again gets the same groups.
- Every change is written before it is answered, so that a service that is killed and started again goes on with it. (Only the
  last moments before a power cut may be lost.)
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slime.utils.errors import RunError, UserError
from slime_plugins.rollout_buffer.items import Item

# Decides about a full group: returns its items as they are handed out, or None to drop it.
Settle = Callable[[str, list[Item]], list[Item] | None]

_FORMAT = 1
_TABLES = """
CREATE TABLE IF NOT EXISTS facts (name TEXT PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS groups (
    number INTEGER PRIMARY KEY AUTOINCREMENT,
    instance_id TEXT NOT NULL,
    state TEXT NOT NULL CHECK (state IN ('open', 'waiting', 'handed', 'received', 'dropped')),
    items TEXT,
    request_id TEXT
);
CREATE INDEX IF NOT EXISTS groups_of_state ON groups (state, number);
CREATE INDEX IF NOT EXISTS groups_of_request ON groups (request_id) WHERE request_id IS NOT NULL;
CREATE UNIQUE INDEX IF NOT EXISTS open_group ON groups (instance_id) WHERE state = 'open';
CREATE TABLE IF NOT EXISTS items (uid TEXT PRIMARY KEY, group_number INTEGER NOT NULL, body TEXT);
CREATE INDEX IF NOT EXISTS items_of_group ON items (group_number);
"""


@dataclass(frozen=True)
class Group:
    """The items of one prompt, in the order in which they came."""

    instance_id: str
    items: list[Item]

    def to_json(self) -> dict[str, Any]:
        """The group as the service answers it."""
        return {"instance_id": self.instance_id, "items": self.items}


class Store:
    """The contents of one buffer, for one thread.

    Args:
        path: the file, which is made if there is none; None: in memory alone.

    Raises:
        UserError: the file is no buffer, or another service has it.
    """

    def __init__(self, path: str | Path | None = None) -> None:
        self.path = path
        if path is not None:
            Path(path).parent.mkdir(parents=True, exist_ok=True)
        try:
            # Transactions are begun by hand.
            self._database = sqlite3.connect(
                ":memory:" if path is None else str(path), timeout=2.0, isolation_level=None
            )
            # The file is locked as long as the service lives, because two services would hand out each other's groups.
            self._database.execute("PRAGMA locking_mode = EXCLUSIVE")
            self._database.execute("PRAGMA journal_mode = WAL")
            self._database.execute("PRAGMA synchronous = NORMAL")
            self._database.executescript(_TABLES)
            found = self._fact("format")
        except sqlite3.Error as error:
            raise UserError(
                f"--state {path}: {error}; give a file that no other service uses, and that this one has made"
            ) from error
        if found is None:
            self._write("INSERT INTO facts VALUES ('format', ?)", json.dumps(_FORMAT))
        elif found != _FORMAT:
            raise UserError(f"--state {path}: it has format {found}, expected {_FORMAT}; give another file")

    def close(self) -> None:
        """Close the file."""
        self._database.close()

    @property
    def run(self) -> dict[str, Any] | None:
        """The data with which the run was started; None before the first run."""
        return self._fact("run")

    @property
    def group_size(self) -> int:
        """How many items a group of the run has."""
        return int(self.run["num_repeat_per_sample"])

    def begin(self, run: dict[str, Any]) -> None:
        """Forget all groups, and begin with `run`."""
        with _Transaction(self._database):
            self._database.execute("DELETE FROM items")
            self._database.execute("DELETE FROM groups")
            self._database.execute("INSERT OR REPLACE INTO facts VALUES ('run', ?)", (json.dumps(run),))

    def forget_open(self) -> int:
        """Forget the groups that are not full, with their items, because a generator that starts again makes them again.
        Returns how many there were."""
        with _Transaction(self._database):
            self._database.execute(
                "DELETE FROM items WHERE group_number IN (SELECT number FROM groups WHERE state = 'open')"
            )
            return self._database.execute("DELETE FROM groups WHERE state = 'open'").rowcount

    def add(self, item: Item, settle: Settle) -> bool:
        """Put `item` into the open group of its instance, which is made if there is none. Returns False if the item is known.

        A group that is full now is settled at once; if `settle` raises, the item is not kept.
        """
        instance, size = item["instance_id"], self.group_size
        with _Transaction(self._database):
            if self._one("SELECT 1 FROM items WHERE uid = ?", item["uid"]) is not None:
                return False
            number = self._one("SELECT number FROM groups WHERE instance_id = ? AND state = 'open'", instance)
            if number is None:
                number = self._database.execute(
                    "INSERT INTO groups (instance_id, state) VALUES (?, 'open')", (instance,)
                ).lastrowid
            self._database.execute("INSERT INTO items VALUES (?, ?, ?)", (item["uid"], number, json.dumps(item)))
            bodies = [
                body
                for (body,) in self._database.execute(
                    "SELECT body FROM items WHERE group_number = ? ORDER BY rowid", (number,)
                )
            ]
            if len(bodies) == size:
                settled = settle(instance, [json.loads(body) for body in bodies])
                state, items = ("dropped", None) if settled is None else ("waiting", json.dumps(settled))
                self._database.execute(
                    "UPDATE groups SET state = ?, items = ? WHERE number = ?", (state, items, number)
                )
                self._database.execute("UPDATE items SET body = NULL WHERE group_number = ?", (number,))
        return True

    def hand_out(self, request_id: str, num_groups: int) -> list[Group]:
        """The `num_groups` groups that have waited longest, or none if fewer wait. The same request gets the same ones again.

        Raises:
            UserError: this request was answered with another number of groups, or reported as received.
        """
        with _Transaction(self._database):
            given = self._one("SELECT COUNT(*) FROM groups WHERE request_id = ?", request_id)
            if not given:
                if self.waiting() < num_groups:
                    return []
                self._database.execute(
                    "UPDATE groups SET state = 'handed', request_id = ? WHERE number IN "
                    "(SELECT number FROM groups WHERE state = 'waiting' ORDER BY number LIMIT ?)",
                    (request_id, num_groups),
                )
            rows = self._database.execute(
                "SELECT instance_id, items FROM groups WHERE request_id = ? AND state = 'handed' ORDER BY number",
                (request_id,),
            ).fetchall()
        if len(rows) != num_groups:
            told = "was told as received" if not rows else f"was answered with {len(rows)} groups, not {num_groups}"
            raise UserError(f"request {request_id!r} {told}; give every request an id of its own")
        return [Group(instance, json.loads(items)) for instance, items in rows]

    def received(self, request_ids: Sequence[str]) -> None:
        """Note that the groups of these requests have arrived, so that they need not be handed out again."""
        with _Transaction(self._database):
            self._database.executemany(
                "UPDATE groups SET state = 'received', items = NULL WHERE request_id = ? AND state = 'handed'",
                [(request_id,) for request_id in request_ids],
            )

    def waiting(self) -> int:
        """How many groups wait to be handed out. Unlike `counts` it does not take longer when many groups were handed out."""
        return int(self._one("SELECT COUNT(*) FROM groups WHERE state = 'waiting'"))

    def counts(self) -> dict[str, int]:
        """Number of groups by state."""
        found = dict(self._database.execute("SELECT state, COUNT(*) FROM groups GROUP BY state").fetchall())
        return {state: found.get(state, 0) for state in ("open", "waiting", "handed", "received", "dropped")}

    def is_known(self, item: Item) -> bool:
        """Whether the item is here already, or belongs to a group that has begun."""
        begun = self._one("SELECT 1 FROM groups WHERE instance_id = ? AND state = 'open'", item["instance_id"])
        return begun is not None or self._one("SELECT 1 FROM items WHERE uid = ?", item["uid"]) is not None

    def finished_instances(self) -> list[str]:
        """Instances with a group that is or was full, in the order of their first."""
        rows = self._database.execute(
            "SELECT instance_id, MIN(number) FROM groups WHERE state != 'open' GROUP BY instance_id ORDER BY 2"
        )
        return [instance for instance, _ in rows]

    def _fact(self, name: str) -> Any:
        text = self._one("SELECT value FROM facts WHERE name = ?", name)
        return None if text is None else json.loads(text)

    def _one(self, query: str, *values: Any) -> Any:
        row = self._database.execute(query, values).fetchone()
        return None if row is None else row[0]

    def _write(self, statement: str, *values: Any) -> None:
        with _Transaction(self._database):
            self._database.execute(statement, values)


class _Transaction:
    """Applies all changes of the block or none. A database that cannot be written, as on a full disk, is a RunError."""

    def __init__(self, database: sqlite3.Connection) -> None:
        self._database = database

    def __enter__(self) -> None:
        self._database.execute("BEGIN IMMEDIATE")

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> None:
        if error is not None:
            if self._database.in_transaction:
                self._database.execute("ROLLBACK")
            if isinstance(error, sqlite3.Error):
                raise RunError(f"the buffer cannot be written: {error}") from error
            return
        try:
            self._database.execute("COMMIT")
        except sqlite3.Error as failure:
            raise RunError(f"the buffer cannot be written: {failure}") from failure
