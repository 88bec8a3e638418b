"""docs/schema.md says of the relay's and the notifier's tables what they are."""

import re
from pathlib import Path

from tests.notifier.relay import Relay

PAGE = Path(__file__).parents[2] / "docs/schema.md"


def test_every_table_of_the_relay_and_the_notifier_is_described_column_by_column(
    relay: Relay,
) -> None:
    text = PAGE.read_text()
    found: dict[str, dict[str, str]] = {}
    for row in relay.rows(
        "select c.relnamespace::regnamespace || '.' || c.relname as name, a.attname,"
        " format_type(coalesce(nullif(t.typbasetype, 0), a.atttypid), null) as kind"
        " from pg_class c join pg_attribute a on a.attrelid = c.oid and a.attnum > 0"
        " join pg_type t on t.oid = a.atttypid"
        " where c.relkind = 'r' and c.relnamespace::regnamespace::text in ('pgrelay', 'notifier')"
        " order by 1, a.attnum"
    ):
        kind = row["kind"].replace("timestamp with time zone", "timestamptz")
        found.setdefault(row["name"], {})[row["attname"]] = kind
    assert len(found) >= 9
    for table, columns in found.items():
        heading = f"\n### `{table}`\n\n"
        assert heading in text, f"{table} is not described"
        section = text.split(heading, 1)[1].split("| column |", 1)[1].split("\n\n", 1)[0]
        described = dict(re.findall(r"^\| `(\w+)` \| ([\w\[\] ]+) \|", section, re.MULTILINE))
        assert described == columns, table
